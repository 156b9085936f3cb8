"""Listens on TCP, TLS or a Unix socket and hands complete requests to one synchronous handler.

Handlers that wait own their tasks. Deadlines of all connections are swept by one timer, so a
request costs no timer of its own. Not here: routes, authentication (callers give `admit`).
IO: sockets.
"""

import asyncio
import resource
import socket
import ssl as tls
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dynctl.http1.exchange import Exchange
from dynctl.http1.message import Rejection
from dynctl.http1.request import Request
from dynctl.http1.server_connection import ServerConnection
from dynctl.http1.tls_reads import TlsReads

__all__ = [
    "Exchange",
    "Rejection",
    "Request",
    "Server",
    "ServerLimits",
    "raise_file_limit",
    "serve",
]

_BACKLOG = 1024
_MAX_SWEEP_S = 0.5
_ACCEPTING_TURNS = 3
"""Of the loop, until a connection it has accepted is made."""
_RESERVED_FILES = 32
"""For logs, listeners and libraries."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one client may cost: slow, silent, greedy or departed ones must not cost the others anything."""

    max_head_bytes: int = 32 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    max_connections: int = 10_000
    """And never more than half of the process's open files: each may need one towards an origin."""
    head_timeout_s: float = 10.0
    """For a complete head, counted from its first byte (or from the connection)."""
    body_timeout_s: float = 60.0
    body_gap_timeout_s: float = 10.0
    """Without any byte of the body."""
    idle_timeout_s: float = 60.0
    """Between requests on a connection."""
    write_timeout_s: float = 60.0
    """A client that takes nothing for so long is cut."""
    write_buffer_bytes: int = 256 * 1024
    """Unsent bytes at which producers are asked to pause."""
    linger_s: float = 2.0
    """For a refused client to read its answer."""
    is_half_close_gone: bool = True
    """A client that closes its sending side counts as gone; a departed one looks the same."""


class Server:
    """A listening server; `close` it."""

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: ServerLimits,
        admit: Callable[[Request], Rejection | None] | None,
    ) -> None:
        self.handler = handler
        self.admit = admit
        self.limits = limits
        self.port = 0
        """TCP port, 0 on a Unix socket."""
        self.max_connections = min(
            limits.max_connections,
            max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - _RESERVED_FILES),
        )
        self.num_requests = 0
        self.num_rejected: dict[str, int] = {}
        """Requests and connections turned away, by reason."""
        self.is_closing = False
        self.is_retiring = False
        """A successor listens: each answer from now on is the last of its connection."""
        self.idle_timeout_s = limits.idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self._listener: asyncio.Server | None = None
        self._unix_path: Path | None = None
        self._unix_inode = 0
        self._connections: set[ServerConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        shortest_s = min(
            limits.head_timeout_s,
            limits.body_gap_timeout_s,
            limits.idle_timeout_s,
            limits.write_timeout_s,
            limits.linger_s,
        )
        self._sweep_s = min(_MAX_SWEEP_S, shortest_s / 4)
        self._emptied: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        place = self._unix_path or f"port {self.port}"
        return f"<Server {place} connections={len(self._connections)}>"

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    @property
    def descriptors(self) -> list[int]:
        """Of the listening sockets."""
        return [one.fileno() for one in _sockets_of(self._listener)] if self._listener else []

    async def stop_listening(self) -> None:
        """Accept no more connections; those there are go on, each told with its next answer to connect anew.

        Once it has returned, whoever connects finds nobody here, or the successor.
        """
        self.is_retiring = True
        await self._close_listener()

    async def retire(self, idle_s: float, limit_s: float) -> None:
        """Stop listening and wait until nobody is left, at most `limit_s`.

        Who asks nothing for `idle_s` is let go before.
        """
        await self.stop_listening()
        self.idle_timeout_s = min(self.idle_timeout_s, idle_s)
        for connection in self._connections:
            connection.hurry(self.now_s() + idle_s)
        await self._wait_until_empty(limit_s)

    async def close(self, grace_s: float) -> None:
        """Stop listening, let answers under way end within `grace_s`, then cut what is left."""
        self.is_closing = True
        await self._close_listener()
        for connection in tuple(self._connections):
            if connection.is_idle:
                connection.close_idle()
        try:
            await self._wait_until_empty(grace_s)
        finally:
            for connection in tuple(self._connections):
                connection.cut()
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
            self._unlink()
        # `cut` takes effect in the next turns of the loop.
        await self._wait_until_empty(_MAX_SWEEP_S)

    # For connections

    def admit_connection(self, connection: ServerConnection) -> bool:
        """Keep book of a new connection; tell whether it may be served. One that comes in while closing is closed, too."""
        self._connections.add(connection)
        if self.is_closing:
            # Not at once: the loop is still about to make it.
            self._loop.call_soon(connection.close_idle)
            return True
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)
        return len(self._connections) <= self.max_connections

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back once what runs now has ended."""
        self._loop.call_soon(callback)

    def forget(self, connection: ServerConnection) -> None:
        """Note that a connection has ended."""
        self._connections.discard(connection)
        if self._emptied is not None and not self._connections and not self._emptied.done():
            self._emptied.set_result(None)

    def count(self, reason: str) -> None:
        """Count one request or connection turned away."""
        self.num_rejected[reason] = self.num_rejected.get(reason, 0) + 1

    def report(self, message: str, error: Exception) -> None:
        """Pass a fault of our own to the loop's exception handler."""
        self._loop.call_exception_handler({"message": message, "exception": error})

    # Own affairs

    def listening(self, listener: asyncio.Server, unix_path: Path | None) -> None:
        """Note where the server listens; called once by `serve`."""
        self._listener = listener
        self._unix_path = unix_path
        if unix_path is not None:
            self._unix_inode = unix_path.stat().st_ino
        else:
            self.port = _sockets_of(listener)[0].getsockname()[1]

    async def _close_listener(self) -> None:
        """Accept nobody from now on; who was accepted already is let in."""
        if self._listener is not None:
            for descriptor in self.descriptors:
                self._loop.remove_reader(descriptor)
            # A connection that is accepted and not made yet would be lost with its listener: it comes first.
            self._loop.call_soon(self._listener.close)
        for _ in range(_ACCEPTING_TURNS):
            await asyncio.sleep(0)

    def _sweep(self) -> None:
        self._sweep_timer = None
        now_s = self.now_s()
        late = [one for one in self._connections if one.deadline_s <= now_s]
        for connection in late:
            try:
                connection.expire()
            except Exception as error:  # noqa: BLE001 - whoever is told of it must not end the watch over all
                self.report("the end of a slow client could not be told", error)
        if self._connections:
            self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def _wait_until_empty(self, timeout_s: float) -> None:
        if not self._connections:
            return
        self._emptied = self._loop.create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied

    def _unlink(self) -> None:
        """Remove our socket file, unless another server has put its own there."""
        path = self._unix_path
        if path is not None:
            with suppress(FileNotFoundError):
                if path.stat().st_ino == self._unix_inode:
                    path.unlink()


def raise_file_limit() -> int:
    """Let this process open as many files as its hard limit allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _sockets_of(listener: asyncio.Server) -> Sequence[socket.socket]:
    """Of any event loop: asyncio gives a tuple, uvloop a list."""
    found: Sequence[socket.socket] = cast("Any", listener).sockets
    return found


async def serve(
    handler: Callable[[Exchange], None],
    *,
    host: str | None = None,
    port: int | None = None,
    path: str | Path | None = None,
    sock: socket.socket | None = None,
    ssl: tls.SSLContext | None = None,
    limits: ServerLimits | None = None,
    admit: Callable[[Request], Rejection | None] | None = None,
) -> Server:
    """Listen on `host` and `port`, on the Unix socket `path` (mode 0600), or on a bound `sock`.

    `handler` is called once per complete request and must not block. `admit` sees each request
    before its body is read; one whose head repeats the last of its connection is admitted as that was. The port is bound when this returns.

    Raises: OSError when the place cannot be bound.
    """
    limits = limits or ServerLimits()
    server = Server(handler, limits, admit)
    loop = asyncio.get_running_loop()

    def connection() -> asyncio.BaseProtocol:
        taken = ServerConnection(server)
        return taken if ssl is None else TlsReads(taken)

    handshake_s = limits.head_timeout_s if ssl is not None else None
    if path is not None or (sock is not None and sock.family == socket.AF_UNIX):
        bound = sock or _bind_unix(Path(str(path)))
        place = Path(bound.getsockname())
        listener = await loop.create_unix_server(
            connection, sock=bound, ssl=ssl, backlog=_BACKLOG, ssl_handshake_timeout=handshake_s
        )
        server.listening(listener, place)
        return server
    where = {"sock": sock} if sock is not None else {"host": host, "port": port}
    listener = await loop.create_server(
        connection, **where, ssl=ssl, backlog=_BACKLOG, ssl_handshake_timeout=handshake_s
    )
    server.listening(listener, None)
    return server


def _bind_unix(path: Path) -> socket.socket:
    """Bind with mode 0600 before anybody can connect; a dead server's file is replaced."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.setblocking(False)
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound
