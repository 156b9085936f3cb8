"""The controller's side of the agent's control API: httpx over a Unix socket (forwarded by SSH or local).

Not here: decisions, SSH. The only importer of httpx.
IO: sockets.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import httpx

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

_QUICK_S = 10.0
_SAMPLE_S = 15.0
# Draining may take 120 s and stopping 30 s for each of routers, engines and relay.
_SHUTDOWN_S = 600.0

T = TypeVar("T")


class AgentClient:
    """Calls one agent; use as `async with AgentClient(path) as agent`."""

    def __init__(self, socket_path: str | Path) -> None:
        self._socket_path = str(socket_path)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self._socket_path),
            base_url="http://agent",
            timeout=_QUICK_S,
            # The environment's proxies have no say in a Unix socket.
            trust_env=False,
        )

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
        await self._http.aclose()

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

    async def ask_router(self, unit_id: str, target: str) -> bytes:
        """GET a path of a router's admin socket, as `/decisions?limit=1`: its JSON."""
        path = f"/v1/router/{quote(unit_id, safe='')}{target}"
        try:
            answer = await self._http.get(path, timeout=_SAMPLE_S)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.content)
        return answer.content

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
        query = {"tail": str(tail), "follow": "1" if follow else "0"}
        timeout = httpx.Timeout(_QUICK_S, read=None if follow else _QUICK_S)
        try:
            async with self._http.stream("GET", target, params=query, timeout=timeout) as answer:
                if answer.status_code != 200:
                    raise _refused(answer.status_code, await answer.aread())
                yield answer.aiter_raw()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def _call(
        self,
        method: str,
        target: str,
        kind: type[T],
        body: bytes | None = None,
        *,
        timeout_s: float = _QUICK_S,
    ) -> T:
        timeout = httpx.Timeout(_QUICK_S, read=timeout_s)
        try:
            answer = await self._http.request(method, target, content=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._unreachable(error) from error
        except httpx.TransportError as error:
            if method == "GET":
                raise self._unreachable(error) from error
            raise UnknownOutcomeError(
                f"the connection to the agent broke during {method} {target}: {error!r}",
                "run `dynctl status` to see what holds",
            ) from error
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.content)
        return decode(answer.content, kind)

    def _unreachable(self, error: Exception) -> ConnectError:
        return ConnectError(
            f"no agent answers on {self._socket_path}: {error!s}",
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
