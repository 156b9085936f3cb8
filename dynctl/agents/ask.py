"""One HTTP request to a unit of this host, and whether a unit is ready: the questions, not the decisions.

Not here: when to ask (`unit`), what follows (`lifecycle`).
IO: sockets.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import msgspec

from dynctl.agents.launch import Capabilities, Endpoints, cache_facts
from dynctl.agents.protocol import EngineWish
from dynctl.agents.root import Facts
from dynctl.core.text import clean
from dynctl.core.units import whole
from dynctl.errors import EngineError, ProbeError
from dynctl.http1.message import Header
from dynctl.http1.upstream import Address, Response, Upstream, UpstreamError
from dynctl.kv.ranks import rank_headers

_QUICK_S = 2.0
_METRICS_S = 5.0
# A first token may wait for compilation, and for cores that other engines hold.
_TOKEN_S = 120.0
_UCRED = struct.Struct("3i")

Pids = Callable[[], Collection[int]]
"""Lists the processes of one start; called only when something answered, since it reads all of /proc."""

Say = Callable[[str], None]
"""Takes in what something that starts lacks, one line, for people."""


class UnfitError(EngineError):
    """Raised when what answers can never become ready: wrong program, model or version."""


async def ask(
    at: Endpoints,
    method: str,
    target: str,
    body: bytes = b"",
    *,
    headers: tuple[Header, ...] = (),
    timeout_s: float = _QUICK_S,
) -> Response:
    """Send one request on a connection of its own.

    Raises:
        UpstreamError: when there is no whole answer in time.
    """
    if at.socket:
        address = Address(path=at.socket)
    else:
        parts = urlsplit(at.url)
        address = Address(host=parts.hostname or "", port=parts.port or 80)
    upstream = Upstream(address)
    if body:
        headers = ((b"content-type", b"application/json"), *headers)
    try:
        return await upstream.fetch(method, target, headers, body, timeout_s)
    finally:
        await upstream.close()


async def status_of(at: Endpoints, target: str) -> int:
    """Return the status of a GET, 0 when there is no answer."""
    try:
        return (await ask(at, "GET", target)).status
    except UpstreamError:
        return 0


async def answers(at: Endpoints) -> bool:
    """Tell whether `GET /health` says 200."""
    return await status_of(at, "/health") == 200


async def is_healthy(at: Endpoints, say: Say) -> bool:
    """Tell whether `GET /health` says 200, and `say` what it does instead."""
    try:
        response = await ask(at, "GET", "/health")
    except UpstreamError as error:
        where = at.socket or urlsplit(at.url).netloc
        say(f"no answer to /health: {error.message.removeprefix(f'{where}: ')}")
        return False
    if response.status != 200:
        reason = clean(response.body.decode("utf-8", "replace"), 120)
        say(f"/health answered {response.status}" + (f": {reason}" if reason else ""))
    return response.status == 200


async def metrics(at: Endpoints) -> str:
    """Fetch `/metrics`.

    Raises:
        UpstreamError: when there is no answer.
        ProbeError: when the answer is no metrics.
    """
    response = await ask(at, "GET", "/metrics", timeout_s=_METRICS_S)
    if response.status != 200:
        raise ProbeError(f"/metrics answered {response.status}")
    return response.body.decode("utf-8", "replace")


async def listener_pid(path: str) -> int | None:
    """Return the PID of whoever listens on a Unix socket, None when nobody does."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            async with asyncio.timeout(_QUICK_S):
                await loop.sock_connect(probe, path)
        except (OSError, TimeoutError):
            return None
        pid, _, _ = _UCRED.unpack(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
    return int(pid)


async def engine_facts(
    wish: EngineWish, capabilities: Capabilities, at: Endpoints, own_pids: Pids, say: Say
) -> Facts | None:
    """Go through all an engine must show to be ready: health, identity, version, a token, its model, its cache.

    Returns None while it is not there yet; `say` has been told what it lacks.

    Raises:
        UnfitError: when waiting would not help.
    """
    if not await is_healthy(at, say):
        return None
    if at.socket:
        pid = await listener_pid(at.socket)
        if pid is None:
            say("nobody listens on its socket")
            return None
        if pid not in own_pids():
            raise UnfitError(
                f"{at.socket} is answered by process {pid}, which is none of {wish.id}"
            )
    try:
        version = await _version(wish, capabilities, at)
        say("/health says 200; asked for a first token")
        for rank in range(wish.dp):
            await _produce_token(wish, at, rank)
        max_model_len = await _model_limit(wish, at)
        facts = cache_facts(await metrics(at))
    except (UpstreamError, ProbeError) as error:
        say(error.message)
        return None
    return Facts(
        block_size_tokens=facts.block_size_tokens or wish.block_size_tokens or 0,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        max_model_len_tokens=max_model_len or wish.max_model_len_tokens or 0,
        version=version,
    )


async def _version(wish: EngineWish, capabilities: Capabilities, at: Endpoints) -> str:
    """Ask an engine whose kind has a floor for its version; empty: it has none, or does not say."""
    floor = capabilities.version_floor
    if not floor:
        return ""
    response = await ask(at, "GET", "/version")
    text = str(_object(response).get("version", ""))
    parts = map(whole, text.split("+", maxsplit=1)[0].split("."))
    digits = tuple(part for part in parts if part is not None)
    if not wish.allow_old_version and (not digits or digits < floor):
        wanted = ".".join(map(str, floor))
        raise UnfitError(
            f"{wish.kind} {clean(text) or '(unknown version)'} is older than {wanted}",
            "upgrade the engine's environment, or set engine.allow_old_version: true",
        )
    return text


async def says_token(wish: EngineWish, at: Endpoints, rank: int, timeout_s: float) -> bool:
    """Ask a rank of an engine that was ready for one token; a refusal is a sign of life, too."""
    try:
        response = await _ask_token(wish, at, rank, timeout_s)
    except UpstreamError:
        return False
    return response.status < 500


async def _ask_token(wish: EngineWish, at: Endpoints, rank: int, timeout_s: float) -> Response:
    body = {"model": wish.name, "prompt": "1", "max_tokens": 1, "temperature": 0}
    headers = rank_headers(rank, wish.dp)
    content = json.dumps(body).encode()
    return await ask(at, "POST", "/v1/completions", content, headers=headers, timeout_s=timeout_s)


async def _produce_token(wish: EngineWish, at: Endpoints, rank: int) -> None:
    response = await _ask_token(wish, at, rank, _TOKEN_S)
    answer = _object(response)
    if response.status == 200 and answer.get("choices"):
        return
    if 400 <= response.status < 500 and response.status not in (408, 425, 429):
        reason = clean(response.body.decode("utf-8", "replace"))
        raise UnfitError(f"a one-token request was answered {response.status}: {reason}")
    raise ProbeError(f"a one-token request was answered {response.status}")


async def _model_limit(wish: EngineWish, at: Endpoints) -> int:
    response = await ask(at, "GET", "/v1/models")
    listed = _object(response).get("data")
    models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    for model in models:
        if model.get("id") == wish.name:
            limit = model.get("max_model_len")
            return limit if isinstance(limit, int) else 0
    names = ", ".join(clean(str(m.get("id")), 60) for m in models) or "none"
    raise UnfitError(f"it serves {names}, not {wish.name}", "set served_name in the inventory")


def complaint(response: Response) -> str:
    """What an answer says is wrong, in the form all routers use; empty where it says nothing."""
    error = _object(response).get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return clean(said, 200) if isinstance(said, str) else ""


def _object(response: Response) -> dict[str, object]:
    """Read a JSON object; anything else is an empty one."""
    try:
        value = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
