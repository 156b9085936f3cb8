"""One connection at a server: bytes in, one request at a time, bytes out.

Requests on a connection are answered strictly in order, so the next head is not even read before
the present answer is complete. Not here: listening, limits' defaults, routes.
IO: sockets (through asyncio transports).
"""

import asyncio
import math
from typing import TYPE_CHECKING, Final, cast

from dynctl.http1.body import ChunkedBody, LengthBody
from dynctl.http1.exchange import Exchange
from dynctl.http1.guard import KnownHead, Refused, check_partial_head, read_head
from dynctl.http1.message import (
    Header,
    Rejection,
    error_body,
    field_lines,
    status_line,
)
from dynctl.http1.request import Request

if TYPE_CHECKING:
    from dynctl.http1.server import Server

_HEAD: Final = 0
_BODY: Final = 1
_BUSY: Final = 2
_LINGER: Final = 3
_CLOSED: Final = 4
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_LINGER_BYTES: Final = 64 * 1024 * 1024


class ServerConnection(asyncio.Protocol):
    """Reads requests from one client. Internal to the package."""

    __slots__ = (
        "_body",
        "_body_deadline_s",
        "_exchange",
        "_is_paused",
        "_is_reading_paused",
        "_is_taking",
        "_known_head",
        "_num_lingered_bytes",
        "_num_served",
        "_peer_name",
        "_pending",
        "_phase",
        "_request",
        "_transport",
        "deadline_s",
        "kept",
        "server",
    )

    def __init__(self, server: "Server") -> None:
        self.server = server
        self.deadline_s = math.inf
        """Loop time at which the sweep calls `expire`."""
        self.kept: object | None = None
        """What the handler remembers of its client."""
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._phase = _HEAD
        self._pending = bytearray()
        """Bytes not yet taken: part of a head, or requests behind the present one."""
        self._request: Request | None = None
        self._exchange: Exchange | None = None
        self._num_lingered_bytes = 0
        self._num_served = 0
        self._body: ChunkedBody | LengthBody | None = None
        self._body_deadline_s = math.inf
        self._is_taking = False
        self._known_head: KnownHead | None = None
        self._is_paused = False
        self._is_reading_paused = False
        self._peer_name = ""

    # The transport tells…

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin waiting for a head, or turn the client away when there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        limits = self.server.limits
        self._transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self._peer_name = _peer_name(transport)
        self.deadline_s = self.server.now_s() + limits.head_timeout_s
        if not self.server.admit_connection(self):
            self._refuse(Refused(503, "connections", "too many connections"))

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        phase = self._phase
        if phase == _HEAD and not self._is_paused:
            if self._pending:
                self._continue_head(data)
            else:
                self._take(data)
        elif phase == _BODY:
            self._continue_body(data)
        elif phase in (_BUSY, _HEAD):
            # Under an answer, or while the last one is not taken yet.
            self._pending += data
            if len(self._pending) > self.server.limits.max_head_bytes:
                self._is_reading_paused = True
                self._transport.pause_reading()
        elif phase == _LINGER:
            self._num_lingered_bytes += len(data)
            if self._num_lingered_bytes > _MAX_LINGER_BYTES:
                self.cut()

    def eof_received(self) -> bool | None:
        """Treat a client that closed its side as gone, unless the limits say otherwise."""
        limits = self.server.limits
        if self._exchange is not None and not limits.is_half_close_gone:
            self._exchange.must_close = True
            return True
        self._phase = _CLOSED
        self.deadline_s = self.server.now_s() + limits.write_timeout_s
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Tell the exchange that nobody listens any more."""
        self._phase = _CLOSED
        self.deadline_s = math.inf
        self._pending.clear()
        self._request = self._body = None
        # First, so that whoever fails when told keeps no place.
        self.server.forget(self)
        self._leave()

    def pause_writing(self) -> None:
        """Ask the producer to stop and start the clock of a client that takes nothing."""
        self._is_paused = True
        if self._phase != _LINGER:
            self.deadline_s = self.server.now_s() + self.server.limits.write_timeout_s
        exchange = self._exchange
        if exchange is not None and exchange.on_pause is not None:
            exchange.on_pause()

    def resume_writing(self) -> None:
        """Let the producer go on, or take the next request that waited for the buffer to drain."""
        self._is_paused = False
        if self._phase == _BUSY:
            self.deadline_s = math.inf
            if self._exchange is not None and self._exchange.on_resume is not None:
                self._exchange.on_resume()
        elif self._phase == _HEAD:
            self._await_next()

    # The exchange tells…

    def send(self, data: bytes) -> None:
        """Write to the client."""
        self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        """What waits in the transport's buffer."""
        return self._transport.get_write_buffer_size()

    def cut(self) -> None:
        """Drop the connection without a proper end."""
        self._phase = _CLOSED
        self._transport.abort()

    def exchange_finished(self, must_close: bool) -> None:
        """Go on with the next request, or close."""
        self._exchange = None
        if must_close or self.server.is_closing or self._transport.is_closing():
            self._phase = _CLOSED
            self.deadline_s = self.server.now_s() + self.server.limits.write_timeout_s
            self._transport.close()
        elif self._pending and not self._is_taking:
            # Not inside whoever answers: it keeps its books first, and the next request finds its room free.
            self.server.soon(self._free)
        else:
            self._free()

    # The server tells…

    @property
    def is_idle(self) -> bool:
        """Nothing of a request has arrived and no answer is under way."""
        return self._phase == _HEAD and not self._pending and not self._is_paused

    def hurry(self, deadline_s: float) -> None:
        """Wait no longer than until then for a next request."""
        if self.is_idle:
            self.deadline_s = min(self.deadline_s, deadline_s)

    def close_idle(self) -> None:
        """Close politely; only for idle connections. One that has not taken its last answer has some time for it."""
        self._phase = _CLOSED
        self.deadline_s = self.server.now_s() + self.server.limits.write_timeout_s
        self._transport.close()

    def expire(self) -> None:
        """Act on a passed deadline."""
        self.deadline_s = math.inf
        if self._is_paused or self._phase in (_LINGER, _CLOSED):
            self.server.count("slow_reader" if self._is_paused else "linger")
            exchange = self._exchange
            self._transport.abort()
            if exchange is not None:
                self._leave()
        elif self._phase == _BODY:
            self._refuse(Refused(408, "timeout", "the request body did not arrive in time"))
        elif self._phase == _HEAD and (self._pending or not self._num_served):
            self._refuse(Refused(408, "timeout", "the request head did not arrive in time"))
        elif self._phase == _HEAD:
            self.close_idle()

    # Reading…

    def _free(self) -> None:
        """Take the next request, unless the connection has ended since the last answer."""
        if self._phase == _BUSY:
            self._phase = _HEAD
            if not self._is_paused:
                self._await_next()

    def _await_next(self) -> None:
        server = self.server
        self.deadline_s = server.now_s() + server.idle_timeout_s
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        # Inside `_take` its loop goes on by itself: no recursion however many are pipelined.
        if self._pending and not self._is_taking:
            data = bytes(self._pending)
            self._pending.clear()
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Serve all that is complete in `data` and keep the rest."""
        self._is_taking = True
        try:
            while True:
                known = self._known_head
                found = known.read(data, self.server.limits.max_body_bytes) if known else None
                if found is None:
                    found = self._read_head(data)
                    if found is None:
                        break
                rest = self._take_request(found[0], data, found[1])
                # Busy again, or closed: what follows waits or is dropped.
                if self._phase != _HEAD or self._is_paused:
                    if self._phase in (_BUSY, _HEAD):
                        self._pending += rest
                    break
                if not rest and self._pending:
                    # What followed a chunked body.
                    rest = bytes(self._pending)
                    self._pending.clear()
                if not rest:
                    break
                data = rest
        except Refused as refusal:
            self._refuse(refusal)
        finally:
            self._is_taking = False

    def _keep_partial_head(self, data: bytes) -> None:
        server = self.server
        self._pending += data
        self.deadline_s = server.now_s() + server.limits.head_timeout_s
        check_partial_head(self._pending, server.limits.max_head_bytes)

    def _continue_head(self, data: bytes) -> None:
        pending = self._pending
        scanned = max(0, len(pending) - 3)
        pending += data
        try:
            if pending.find(b"\r\n\r\n", scanned) < 0:
                check_partial_head(pending, self.server.limits.max_head_bytes)
                return
        except Refused as refusal:
            self._refuse(refusal)
            return
        whole = bytes(pending)
        pending.clear()
        self._take(whole)

    def _read_head(self, data: bytes) -> tuple[Request, int] | None:
        """Read the head `data` begins with, and say where it ends; None when it is not all there, or turned away."""
        server = self.server
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._keep_partial_head(data)
            return None
        if end > server.limits.max_head_bytes:
            raise Refused(431, "size", f"request head over {server.limits.max_head_bytes} bytes")
        head = data[:end]
        request = read_head(head, server.limits.max_body_bytes)
        request.peer_name = self._peer_name
        rejection = server.admit(request) if server.admit is not None else None
        if rejection is not None:
            self._reject(rejection)
            return None
        self._known_head = KnownHead(head, request)
        return request, end

    def _take_request(self, request: Request, data: bytes, start: int) -> bytes:
        """Serve a request whose body begins in `data`, or wait for the rest of it; return what lies behind the body."""
        end = start + request.content_length_bytes
        if request.is_chunked or end > len(data):
            self._expect_body(request, data[start:])
            return b""
        if end > start:
            request.body = data[start:end]
        self._dispatch(request)
        return data[end:]

    def _expect_body(self, request: Request, after: bytes) -> None:
        limits = self.server.limits
        self._phase = _BODY
        self._request = request
        self._body_deadline_s = self.server.now_s() + limits.body_timeout_s
        if request.is_chunked:
            self._body = ChunkedBody(limits.max_body_bytes)
        else:
            self._body = LengthBody(request.content_length_bytes)
        if request.expects_continue and not after:
            self._transport.write(_CONTINUE)
        self._continue_body(after)

    def _continue_body(self, data: bytes) -> None:
        request, body = self._request, self._body
        assert request is not None
        assert body is not None
        server = self.server
        gap_s = server.limits.body_gap_timeout_s
        self.deadline_s = min(self._body_deadline_s, server.now_s() + gap_s)
        try:
            body.feed(data)
        except Refused as refusal:
            self._refuse(refusal)
            return
        if not body.is_complete:
            return
        self._body = self._request = None
        request.body = body.body
        self._pending += body.rest
        self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        self._phase = _BUSY
        self.deadline_s = math.inf
        exchange = self._exchange = Exchange(self, request)
        self._num_served += 1
        server = self.server
        server.num_requests += 1
        try:
            server.handler(exchange)
        except Exception as error:  # noqa: BLE001 - one broken request must not end the server
            server.report("the request handler failed", error)
            if exchange.is_started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("internal error", "internal", "server_error"))

    # Turning away…

    def _reject(self, rejection: Rejection) -> None:
        self.server.count("admission")
        self._answer_and_linger(
            rejection.status, rejection.body, rejection.content_type, rejection.headers
        )

    def _refuse(self, refusal: Refused) -> None:
        self.server.count(refusal.reason)
        body = error_body(refusal.message, refusal.reason)
        self._answer_and_linger(refusal.status, body, b"application/json", ())

    def _answer_and_linger(
        self, status: int, body: bytes, content_type: bytes, headers: tuple[Header, ...]
    ) -> None:
        """Answer, then read and drop what still comes: closing at once would lose the answer."""
        self._phase = _LINGER
        self._pending.clear()
        self._request = self._body = None
        self._num_lingered_bytes = 0
        self.deadline_s = self.server.now_s() + self.server.limits.linger_s
        self._transport.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
            % (status_line(status), content_type, len(body), field_lines(headers), body)
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _leave(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._exchange = None
            exchange.left()


def _peer_name(transport: asyncio.BaseTransport) -> str:
    """Return the common name in the peer's certificate; empty without one."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return ""
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""
