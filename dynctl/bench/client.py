"""Talks to an OpenAI-compatible server: sends one request and reads its stream, and asks who it is.

Not here: schedules, summaries. IO: HTTP through aiohttp, clock.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from dynctl.bench import router_times
from dynctl.bench.causes import cause
from dynctl.bench.record import OK
from dynctl.bench.stream import Stream
from dynctl.bench.workload import Ask, prompt_text
from dynctl.core.exposition import ROUTER_NAMES, histogram, histogram_names, parse, total
from dynctl.core.snapshot import Histogram
from dynctl.core.text import clean
from dynctl.errors import ConnectError, DynctlError, UsageError

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 4096
MAX_CONTROL_BYTES = 16 * 1024**2
"""Lists of models and metrics are far smaller, whoever answers."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Extensions of the OpenAI API that the server takes."""

    per_chunk_usage: bool = True
    """`stream_options.continuous_usage_stats`."""
    fixed_lengths: bool = True
    """`ignore_eos` and `min_tokens`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request."""

    outcome: str
    error: str
    sent_s: float
    stream: Stream


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server is doing already; None where it does not say."""

    requests_total: float | None
    under_way: float | None
    prompt_tokens_total: float | None
    predicted_hit_tokens_total: float | None
    decision: Histogram | None = None
    queue: Histogram | None = None
    """Of a dynctl router, since it started: how long its decisions took, and how long requests waited for an engine."""


class Target:
    """A server under test. Made by `open_target`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api: str, timeout_s: float
    ) -> None:
        self._session = session
        self._path = f"{url}/v1/{'chat/completions' if api == 'chat' else 'completions'}"
        self._timeout_s = timeout_s
        self.url = url
        self.api = api
        self.model = ""
        self.max_model_len_tokens: int | None = None
        self.dialect = Dialect()

    async def find_model(self, wanted: str | None) -> None:
        """Learn which model to ask for; the only one served when none is named.

        Raises:
            ConnectError: when the server does not answer.
            UsageError: when the model must be named, or is not served.
        """
        answer = await self._get("/v1/models")
        try:
            models = {str(m["id"]): m for m in msgspec.json.decode(answer)["data"]}
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise DynctlError(
                f"{self.url}/v1/models gave no list of models",
                "is this an OpenAI-compatible server?",
            ) from error
        names = clean(", ".join(models)) or "none"
        if wanted is None and len(models) != 1:
            raise UsageError(
                f"{self.url} serves {len(models)} models: {names}", "name one: --model NAME"
            )
        if wanted is not None and wanted not in models:
            raise UsageError(f"{self.url} does not serve {wanted!r}", f"it serves: {names}")
        self.model = wanted or next(iter(models))
        length = models[self.model].get("max_model_len")
        self.max_model_len_tokens = length if isinstance(length, int) else None

    async def version(self) -> str | None:
        """Ask for the server's version; None when it does not tell."""
        with contextlib.suppress(DynctlError, msgspec.DecodeError):
            answer = msgspec.json.decode(await self._get("/version"))
            if isinstance(answer, dict) and "version" in answer:
                return clean(str(answer["version"]))
        return None

    async def traffic(self) -> Traffic:
        """Read the counters of a dynctl router or a vLLM engine; all None for other servers."""
        names = ROUTER_NAMES | {"vllm:num_requests_running", "vllm:num_requests_waiting"}
        names |= {"vllm:request_success_total"}
        names |= histogram_names(router_times.DECISION, router_times.QUEUE)
        try:
            text = (await self._get("/metrics")).decode(errors="replace")
            scrape = parse(text, names)
            decision = histogram(scrape, router_times.DECISION)
            queue = histogram(scrape, router_times.QUEUE)
        except DynctlError:
            return Traffic(None, None, None, None)
        parts = [
            total(scrape, "dynctl_router_inflight", "vllm:num_requests_running"),
            total(scrape, "dynctl_router_queued", "vllm:num_requests_waiting"),
        ]
        under_way = [part for part in parts if part is not None]
        return Traffic(
            total(scrape, "dynctl_router_requests_total", "vllm:request_success_total"),
            sum(under_way) if under_way else None,
            total(scrape, "dynctl_router_prompt_tokens_total"),
            total(scrape, "dynctl_router_predicted_hit_tokens_total"),
            decision,
            queue,
        )

    async def settle_dialect(self, ask: Ask) -> Stream:
        """Send a first request and drop the extensions the server refuses.

        Raises:
            DynctlError: when it refuses the request even without them.
        """
        for dialect in (Dialect(), Dialect(per_chunk_usage=False), Dialect(False, False)):
            self.dialect = dialect
            reply = await self.send(ask)
            if reply.outcome == OK:
                return reply.stream
            if reply.outcome not in {"http 400", "http 422"}:
                break
        raise DynctlError(
            f"{self.url} does not answer a first request: {reply.outcome}: {reply.error}",
            "try it with curl; bench needs a server that answers",
        )

    async def send(self, ask: Ask) -> Reply:
        """Send a request and read its stream to the end; failures are outcomes, never exceptions."""
        body = msgspec.json.encode(self._body(ask))
        stream = Stream()
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome, error = await self._exchange(body, ask.session, stream)
        except TimeoutError:
            outcome, error = "timeout", f"no end within {self._timeout_s:g} s"
        except aiohttp.ClientConnectionError as failure:
            is_connect = isinstance(failure, aiohttp.ClientConnectorError)
            outcome, error = "connect" if is_connect else "broken stream", cause(failure)[0]
        except (aiohttp.ClientError, OSError) as failure:
            outcome, error = "broken stream", cause(failure)[0]
        return Reply(outcome, clean(error), sent_s, stream)

    async def _exchange(self, body: bytes, session: str, stream: Stream) -> tuple[str, str]:
        headers = {"content-type": "application/json"}
        if session:
            headers["x-dynctl-session"] = session
        async with self._session.post(self._path, data=body, headers=headers) as response:
            if response.status != 200:
                return f"http {response.status}", _error_text(
                    await response.content.read(MAX_ERROR_BYTES)
                )
            async for piece in response.content.iter_any():
                stream.feed(piece, time.monotonic())
                if stream.error is not None:
                    return "error event", stream.error
        if stream.end_s is None:
            return "broken stream", "it ended without [DONE]"
        if stream.first_s is None:
            return "empty", "no token came"
        return OK, ""

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.osl_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.dialect.per_chunk_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if self.dialect.fixed_lengths:
            body |= {"ignore_eos": True, "min_tokens": ask.osl_tokens}
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in ask.messages]
        else:
            body["prompt"] = prompt_text(ask.messages)
        return body

    async def _get(self, path: str) -> bytes:
        try:
            async with (
                asyncio.timeout(CONTROL_TIMEOUT_S),
                self._session.get(self.url + path) as response,
            ):
                answer = await self._read(path, response.content)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why, next_step = cause(error)
            raise ConnectError(f"{self.url}{path} does not answer: {why}", next_step) from error
        if response.status == 401:
            raise UsageError(f"{self.url} wants an API key", "pass it with --api-key-env NAME")
        if response.status != 200:
            raise DynctlError(f"{self.url}{path} answered {response.status}: {_error_text(answer)}")
        return answer

    async def _read(self, path: str, content: aiohttp.StreamReader) -> bytes:
        answer = bytearray()
        async for piece in content.iter_any():
            answer += piece
            if len(answer) > MAX_CONTROL_BYTES:
                raise DynctlError(
                    f"{self.url}{path} answers with more than {MAX_CONTROL_BYTES / 1024**2:g} MiB",
                    "is this an OpenAI-compatible server?",
                )
        return bytes(answer)


def server_of(url: str) -> str:
    """The server that an address means: some write it with the API's /v1, as routers are shown."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error, else the start of the body."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        return clean(str(msgspec.json.decode(body)["error"]["message"]))
    return clean(body.decode(errors="replace"))


@contextlib.asynccontextmanager
async def open_target(
    url: str, api: str, api_key: str | None, timeout_s: float
) -> AsyncIterator[Target]:
    """Open a session with a server; connections are not capped, so that no request waits for one here."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout
    ) as session:
        yield Target(session, server_of(url), api, timeout_s)


def growth(before: Traffic, after: Traffic) -> Traffic:
    """Subtract counters; None where either is unknown."""

    def minus(name: str) -> float | None:
        early, late = getattr(before, name), getattr(after, name)
        return None if early is None or late is None else late - early

    return replace(
        after,
        requests_total=minus("requests_total"),
        prompt_tokens_total=minus("prompt_tokens_total"),
        predicted_hit_tokens_total=minus("predicted_hit_tokens_total"),
        decision=router_times.growth(before.decision, after.decision),
        queue=router_times.growth(before.queue, after.queue),
    )
