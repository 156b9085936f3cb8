"""The controller's side of the agent's control API, over a Unix socket (forwarded by SSH or local).

Not here: decisions, SSH. IO: sockets.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

from dynctl.agents.protocol import (
    PROTOCOL_VERSION,
    AgentStatus,
    ApiError,
    HostSlice,
    ShutdownRequest,
    decode,
    encode,
)
from dynctl.core.snapshot import HostSnapshot
from dynctl.core.text import clean
from dynctl.errors import ConnectError, DeployError, DynctlError, ExitCode, UnknownOutcomeError
from dynctl.http1.stream import open_stream
from dynctl.http1.upstream import Address, Upstream, UpstreamError, UpstreamLimits

_QUICK_S = 10.0
_SAMPLE_S = 15.0
# Draining may take 120 s and stopping 30 s for each of routers, engines and relay.
_SHUTDOWN_S = 600.0
_FOLLOW_S = 365 * 86400.0
"""A log may be silent for as long as anybody looks at it."""
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Decisions of a busy router; the agent is ours, so this only catches what runs wild."""

T = TypeVar("T")


class AgentClient:
    """Calls one agent; use as `async with AgentClient(path) as agent`."""

    def __init__(self, socket_path: str | Path) -> None:
        self._socket_path = str(socket_path)
        limits = UpstreamLimits(connect_timeout_s=_QUICK_S, silence_timeout_s=_FOLLOW_S)
        self._http = Upstream(Address(path=self._socket_path), limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def status(self) -> AgentStatus:
        """Ask what runs."""
        status = await self._call("GET", "/v1/status", AgentStatus)
        if status.protocol_version != PROTOCOL_VERSION:
            raise DeployError(
                f"the agent speaks protocol {status.protocol_version}, this dynctl {PROTOCOL_VERSION}",
                "run `dynctl up` with the newer of the two",
            )
        return status

    async def put_slice(self, wanted: HostSlice) -> AgentStatus:
        """Say what shall run; returns when the change is under way.

        Raises:
            DeployError: when it is refused (older fence or generation, contradiction); nothing changed.
            UnknownOutcomeError: when the connection broke and nobody knows; ask `status`.
        """
        return await self._call("PUT", "/v1/slice", AgentStatus, encode(wanted))

    async def sample(self) -> HostSnapshot:
        """Ask for the host's figures now."""
        return await self._call("GET", "/v1/sample", HostSnapshot, timeout_s=_SAMPLE_S)

    async def ask_router(self, unit_id: str, target: str, method: str = "GET") -> bytes:
        """Ask a path of a router's admin socket, as `/decisions?limit=1`: its JSON; a POST changes policy or shadow."""
        path = f"/v1/router/{quote(unit_id, safe='')}{target}"
        try:
            answer = await self._http.fetch(
                method, path, timeout_s=_SAMPLE_S, max_body_bytes=_MAX_ANSWER_BYTES
            )
        except UpstreamError as error:
            raise self._unreachable(error) from error
        if answer.status != 200:
            raise _refused(answer.status, answer.body)
        return answer.body

    async def drain(self, unit_id: str) -> AgentStatus:
        """Take a unit out of service and keep it down; returns at once."""
        return await self._call("POST", f"/v1/drain/{quote(unit_id, safe='')}", AgentStatus)

    async def restart(self, unit_id: str) -> AgentStatus:
        """Drain a unit and start it again; returns at once."""
        return await self._call("POST", f"/v1/restart/{quote(unit_id, safe='')}", AgentStatus)

    async def shutdown(self, *, now: bool = False, timeout_s: float = _SHUTDOWN_S) -> AgentStatus:
        """End every unit and then the agent; returns when all units are gone."""
        body = encode(ShutdownRequest(now))
        return await self._call("POST", "/v1/shutdown", AgentStatus, body, timeout_s=timeout_s)

    @asynccontextmanager
    async def logs(
        self, unit_id: str, tail: int = 100, *, follow: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a unit's output: pieces of text as they come, not cleaned."""
        target = f"/v1/logs/{quote(unit_id, safe='')}"
        query = f"?tail={tail}&follow={1 if follow else 0}"
        silence_s = _FOLLOW_S if follow else _QUICK_S
        try:
            async with open_stream(self._http, target + query, silence_s) as pieces:
                yield pieces
        except UpstreamError as error:
            if error.kind != "status":
                raise self._unreachable(error) from error
            answer = await self._http.fetch("GET", f"{target}?tail=0")
            raise _refused(answer.status, answer.body) from error

    async def _call(
        self,
        method: str,
        target: str,
        kind: type[T],
        body: bytes = b"",
        *,
        timeout_s: float = _QUICK_S,
    ) -> T:
        headers = ((b"content-type", b"application/json"),) if body else ()
        try:
            answer = await self._http.fetch(
                method, target, headers, body, timeout_s, _MAX_ANSWER_BYTES
            )
        except UpstreamError as error:
            if method == "GET" or error.kind == "connect":
                raise self._unreachable(error) from error
            raise UnknownOutcomeError(
                f"the connection to the agent broke during {method} {target}: {error}",
                "run `dynctl status` to see what holds",
            ) from error
        if answer.status != 200:
            raise _refused(answer.status, answer.body)
        return decode(answer.body, kind)

    def _unreachable(self, error: Exception) -> ConnectError:
        # The socket here may stand for one on the host: its path says nothing to anybody.
        return ConnectError(
            f"no agent answers: {str(error).removeprefix(self._socket_path + ': ')}",
            "start it with `dynctl up`",
        )


def _refused(status: int, content: bytes) -> DeployError:
    try:
        said = decode(content, ApiError)
    except DynctlError:
        return DeployError(f"the agent answered {status}", "see the agent's log")
    message = "; ".join(clean(text, 500) for text in (said.message, *said.details))
    code = ExitCode.REFUSED if status == 409 else None
    return DeployError(message, said.hint and clean(said.hint), code=code)
