"""Pooled keep-alive connections to one origin; answers arrive as callbacks on a sink.

A call costs no task: only opening a connection does. A call ends exactly once, by `on_end` or
`on_error`, or silently by `cancel`. Not here: choice of origin, retry budgets (the router's).
IO: sockets.
"""

import asyncio
import ssl as tls
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

from dynctl.files import reason
from dynctl.http1.call import Call, ReceiverError, ResponseSink, UpstreamError
from dynctl.http1.connection import Connection, KnownAnswer
from dynctl.http1.gathering import Gatherer
from dynctl.http1.message import Header, field_lines
from dynctl.http1.tls_reads import TlsReads

__all__ = [
    "Address",
    "Call",
    "ReceiverError",
    "Response",
    "ResponseSink",
    "Upstream",
    "UpstreamError",
    "UpstreamLimits",
]

_SWEEP_S: Final = 0.5
_SAFE_METHODS: Final = frozenset(("GET", "OPTIONS"))
"""May be sent again when a pooled connection turns out to be closed. Source: RFC 9110 9.2.2."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an origin listens: `host` and `port`, or a Unix socket `path`."""

    host: str = ""
    port: int = 0
    path: str = ""
    ssl: tls.SSLContext | None = None
    server_hostname: str | None = None
    """The name its certificate must carry."""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds of one pool."""

    max_connections: int = 1024
    """Calls beyond it wait for a free one, at most `connect_timeout_s`."""
    max_idle_connections: int = 64
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 4.0
    """Below the 5 s after which uvicorn closes: so a pooled connection is never used while the
    origin closes it. Source: uvicorn `--timeout-keep-alive` default."""
    silence_timeout_s: float = 600.0
    """Without a byte of the answer while it is not paused. Callers with a deadline cancel sooner."""
    end_timeout_s: float = 2.0
    """For the end of an answer whose receiver has all it wants."""
    max_head_bytes: int = 64 * 1024
    gather_s: float = 0.001
    """Of calls that gather: what comes within it goes on as one piece."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer, from `fetch`."""

    status: int
    headers: tuple[Header, ...]
    body: bytes


class Upstream:
    """The pool of one origin; `close` it."""

    def __init__(self, address: Address, limits: UpstreamLimits | None = None) -> None:
        self.address = address
        self.limits = limits or UpstreamLimits()
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time
        self.gatherer = Gatherer(self._loop, self.limits.gather_s)
        self.tick = 0
        """Counts sweeps: a clock that costs a call nothing."""
        self._max_silent_ticks = int(self.limits.silence_timeout_s / _SWEEP_S) + 1
        self.num_end_ticks = int(self.limits.end_timeout_s / _SWEEP_S) + 1
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._host = f"{host}:{address.port}".encode() if not address.path else b"localhost"
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._calls: set[Call] = set()
        self._waiting: deque[tuple[float, Call]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.known_answer: KnownAnswer | None = None
        """What the last whole answer began with."""

    def __repr__(self) -> str:
        return f"<Upstream {self.address} calls={self.num_active} idle={len(self._idle)}>"

    @property
    def num_active(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    @property
    def num_connections(self) -> int:
        """Open connections and those being opened."""
        return len(self._open) + len(self._opening)

    def send(
        self,
        method: str,
        target: str,
        headers: Iterable[Header],
        body: bytes,
        sink: ResponseSink,
        *,
        on_new_connection: bool = False,
    ) -> Call:
        """Send a request; never raises for network reasons, everything goes to `sink`.

        `headers` carry neither host nor framing fields. No callback comes before this returns.
        `on_new_connection`: reach whoever listens now, not one who served before.
        Raises: ValueError when a header or the target contains a line end or space, or for HEAD.
        """
        start = self.prepare(method, target, headers)
        is_safe = method in _SAFE_METHODS
        return self._send(start, b"", body, sink, is_safe, is_new=on_new_connection)

    def prepare(self, method: str, target: str, headers: Iterable[Header]) -> bytes:
        """Write the part of a head that many requests share, once; `send_prepared` sends it.

        Raises: ValueError as for `send`.
        """
        path = target.encode("ascii")
        if method == "HEAD":
            raise ValueError("HEAD is not spoken to origins")
        if b" " in path or b"\r" in path or b"\n" in path:
            raise ValueError("a request target contains a space or line end")
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (
            method.encode("ascii"),
            path,
            self._host,
            field_lines(headers),
        )

    def send_prepared(
        self,
        start: bytes,
        request_id: bytes,
        body: bytes,
        sink: ResponseSink,
        *,
        is_safe: bool = False,
    ) -> Call:
        """Send what was prepared, with an X-Request-Id of its own unless that is empty; as `send`.

        The id hides no line end. `is_safe`: the prepared method is GET or OPTIONS.
        """
        return self._send(start, request_id, body, sink, is_safe)

    def _send(
        self,
        start: bytes,
        request_id: bytes,
        body: bytes,
        sink: ResponseSink,
        is_safe: bool,
        is_new: bool = False,
    ) -> Call:
        if request_id:
            start = b"%bx-request-id: %b\r\n" % (start, request_id)
        if body or not is_safe:
            head = b"%bcontent-length: %d\r\n\r\n" % (start, len(body))
        else:
            head = start + b"\r\n"
        call = Call(self, head, body, sink, is_safe)
        self._calls.add(call)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        connection = None if is_new else self._take_idle()
        if connection is not None:
            call.ride(connection)
        else:
            self.open_for(call)
        return call

    async def fetch(
        self,
        method: str,
        target: str,
        headers: Iterable[Header] = (),
        body: bytes = b"",
        timeout_s: float = 10.0,
        max_body_bytes: int = 16 * 1024 * 1024,
    ) -> Response:
        """Send a request and wait for the whole answer; for control requests, not for streams.

        Raises: UpstreamError when there is no proper answer in time or it is too large.
        """
        whole = _Whole(self._loop.create_future(), max_body_bytes)
        call = self.send(method, target, headers, body, whole)
        try:
            async with asyncio.timeout(timeout_s):
                return await whole.future
        except TimeoutError as error:
            text = f"{self.address}: no complete answer within {timeout_s:g} s"
            raise UpstreamError("timeout", text) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close all connections; calls under way fail with kind `closed`."""
        self._is_closed = True
        self.gatherer.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in tuple(self._open):
            connection.drop()
        for call in tuple(self._calls):
            call.fail("closed", "the pool was closed")
        opening = tuple(self._opening)
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)
        self._idle.clear()
        # `drop` takes effect in the next turns of the loop.
        for _ in range(100):
            if not self._open:
                break
            await asyncio.sleep(0)
        self._open.clear()

    # For calls and connections

    def settle(self, call: Call) -> None:
        """Note that a call has ended."""
        self._calls.discard(call)

    def learn_answer(self, head: bytes, status: int, fields: list[Header]) -> None:
        """Keep the head of a whole answer, if it has a length."""
        if KnownAnswer.has_length(head):
            self.known_answer = KnownAnswer(head, status, fields)

    def give_back(self, connection: Connection) -> None:
        """Take a connection whose answer is complete; the longest waiting call gets it."""
        while self._waiting:
            _, call = self._waiting.popleft()
            if not call.is_over:
                call.ride(connection)
                return
        if self._is_closed or len(self._idle) >= self.limits.max_idle_connections:
            self._open.discard(connection)
            connection.close()
            return
        connection.idle_since_s = self._now_s()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Note that a connection has ended; its slot goes to the longest waiting call."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._serve_waiting()

    def open_for(self, call: Call) -> None:
        """Open a connection for a call, or let it wait for a slot."""
        if self._is_closed:
            self._loop.call_soon(call.fail, "closed", "the pool was closed")
            return
        if self.num_connections >= self.limits.max_connections:
            self._waiting.append((self._now_s() + self.limits.connect_timeout_s, call))
            return
        task = self._loop.create_task(self._connect(call), name=f"connect:{self.address}")
        call.wait_for(task)
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def receiver_failed(self, sink: ResponseSink, error: Exception) -> None:
        """Report that a receiver raised, and tell it: whatever it has begun for others it can still end."""
        self._report(error)
        text = f"{self.address}: the receiver of the answer failed"
        try:
            sink.on_error(ReceiverError(text))
        except Exception as further:  # noqa: BLE001 - it has been told
            self._report(further)

    def _report(self, error: Exception) -> None:
        """Pass a fault of our own to the loop's exception handler."""
        context = {"message": "the receiver of an answer failed", "exception": error}
        self._loop.call_exception_handler(context)

    # Own affairs

    def _take_idle(self) -> Connection | None:
        # The youngest first: the others may grow old and be closed.
        oldest_s = self._now_s() - self.limits.idle_timeout_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since_s >= oldest_s:
                return connection
            self._open.discard(connection)
            connection.close()
        return None

    def _serve_waiting(self) -> None:
        while self._waiting and self.num_connections < self.limits.max_connections:
            _, call = self._waiting.popleft()
            if not call.is_over:
                self.open_for(call)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not self._is_closed:
            self._serve_waiting()

    async def _connect(self, call: Call) -> None:
        address = self.address
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                if address.path:
                    _, made = await self._loop.create_unix_connection(
                        self._new_protocol,
                        address.path,
                        ssl=address.ssl,
                        server_hostname=address.server_hostname,
                    )
                else:
                    _, made = await self._loop.create_connection(
                        self._new_protocol,
                        address.host,
                        address.port,
                        ssl=address.ssl,
                        server_hostname=address.server_hostname,
                    )
        except TimeoutError:
            call.fail("connect", f"no connection within {self.limits.connect_timeout_s:g} s")
            return
        except OSError as error:
            call.fail("connect", f"cannot connect: {reason(error)}")
            return
        except ValueError as error:  # a name that can be none
            call.fail("connect", f"cannot connect: {error}")
            return
        connection = cast("Connection", made.protocol if isinstance(made, TlsReads) else made)
        if not connection.is_usable:
            call.fail("connect", "the connection was closed at once")
            return
        self._open.add(connection)
        if call.is_over:
            self.give_back(connection)
        else:
            call.ride(connection)

    def _new_protocol(self) -> Connection | TlsReads:
        connection = Connection(self)
        return connection if self.address.ssl is None else TlsReads(connection)

    def _sweep(self) -> None:
        # Before all else: whoever is told of an error may send again, and would set it, too.
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        self.tick += 1
        now_s = self._now_s()
        oldest_tick = self.tick - self._max_silent_ticks
        for call in [call for call in self._calls if call.is_late(self.tick, oldest_tick)]:
            call.expire()
        while self._waiting and (self._waiting[0][0] <= now_s or self._waiting[0][1].is_over):
            _, call = self._waiting.popleft()
            call.fail("connect", "all connections to the origin are in use")
        oldest_s = now_s - self.limits.idle_timeout_s
        for connection in [one for one in self._idle if one.idle_since_s < oldest_s]:
            self.forget(connection)
            connection.close()
        if not (self._calls or self._idle):
            self._sweep_timer.cancel()
            self._sweep_timer = None


class _Whole:
    """Collects an answer into a future."""

    def __init__(self, future: asyncio.Future[Response], max_body_bytes: int) -> None:
        self.future = future
        self._max_body_bytes = max_body_bytes
        self._status = 0
        self._headers: tuple[Header, ...] = ()
        self._body = bytearray()

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._headers = tuple(headers)

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._max_body_bytes and not self.future.done():
            text = f"the answer is larger than {self._max_body_bytes} bytes"
            self.future.set_exception(UpstreamError("protocol", text))

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result(Response(self._status, self._headers, bytes(self._body)))

    def on_error(self, error: UpstreamError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
