"""One client connection to an origin: writes one request, parses one answer, is reused or closed.

Not here: pooling, connecting, retries (`upstream`).
IO: sockets (through asyncio transports).
"""

import asyncio
import math
import re
from typing import TYPE_CHECKING, Final, cast

import httptools

from dynctl.http1.message import Header

if TYPE_CHECKING:
    from dynctl.http1.call import Call, ResponseSink
    from dynctl.http1.upstream import Upstream

MAX_INTERIM_RESPONSES: Final = 10
_MAX_JOINED_BYTES: Final = 64 * 1024
_MAX_LENGTH_DIGITS: Final = 15
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d{1,15})\r\n", re.IGNORECASE)


class KnownAnswer:
    """The head of an origin's last whole answer. The next one mostly differs in the digits of its length alone.

    Where such an answer is one read, it is not parsed again.
    """

    __slots__ = ("_before", "_behind", "_digits", "fields", "status")

    def __init__(self, head: bytes, status: int, fields: list[Header]) -> None:
        """`status` and `fields` are what `head` was read as; it has a length."""
        start, end = _LENGTH.search(head).span(1)  # type: ignore[union-attr] # the caller looked
        self._before, self._behind = head[:start], head[end:]
        self._digits = head[start:end]
        self.status = status
        self.fields = fields

    @staticmethod
    def has_length(head: bytes) -> bool:
        """Whether a head can be kept."""
        return _LENGTH.search(head) is not None

    def body_of(self, data: bytes) -> bytes:
        """The body, where `data` is such an answer and nothing more; else nothing. Look at `fields` afterwards."""
        before, behind = self._before, self._behind
        start = len(before)
        if not data.startswith(before):
            return b""
        end = data.find(b"\r", start, start + _MAX_LENGTH_DIGITS + 1)
        digits = data[start:end]
        if not data.startswith(behind, end) or not digits.isdigit():
            return b""
        body = data[end + len(behind) :]
        if len(body) != int(digits):
            return b""
        if digits != self._digits:
            self._digits = digits
            self.fields = [
                (name, digits if name == b"content-length" else value)
                for name, value in self.fields
            ]
        return body


class Connection(asyncio.Protocol):
    """A connection of a pool. Internal to the package."""

    __slots__ = (
        "_call",
        "_can_keep_alive",
        "_has_head",
        "_is_complete",
        "_is_interim",
        "_num_head_bytes",
        "_num_interim",
        "_num_pieces",
        "_pairs",
        "_parser",
        "_pieces",
        "_pool",
        "_surplus",
        "_transport",
        "heard_s",
        "idle_since_s",
        "is_fresh",
        "on_body",
    )

    def __init__(self, pool: "Upstream") -> None:
        self._pool = pool
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        """Called by the parser for each piece: no step of ours until the whole read is parsed."""
        self._num_pieces = 0
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._pairs: list[Header] = []
        self._has_head = False
        self._is_interim = False
        self._is_complete = False
        self._can_keep_alive = False
        self._surplus = False
        self._num_head_bytes = 0
        self._num_interim = 0
        self.heard_s = -math.inf
        """When a call that gathers was read last, or read on."""
        self.idle_since_s = 0.0
        self.is_fresh = True
        """Has not served a call yet."""

    # The pool tells…

    @property
    def is_usable(self) -> bool:
        """Whether an idle connection may carry another call."""
        return not self._transport.is_closing()

    def carry(self, call: "Call", head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to the call."""
        self._call = call
        self._has_head = self._is_complete = self._surplus = False
        self._pieces.clear()
        self._num_head_bytes = self._num_interim = 0
        transport = self._transport
        if not body:
            transport.write(head)
        elif len(body) <= _MAX_JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def drop(self) -> None:
        """Forget the call and close at once, so that the origin stops working on it."""
        self._call = None
        self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        self._transport.close()

    def pause(self) -> None:
        """Stop reading the answer."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # The transport tells…

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; the pool gives the first call."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse answer bytes; hand body pieces on as they are."""
        call = self._call
        if call is None:
            # An origin that speaks unasked is not to be trusted with another request.
            self._transport.abort()
            return
        call.has_received = True
        call.heard_tick = self._pool.tick
        if not self._has_head:
            known = self._pool.known_answer
            if known is not None and not self._num_head_bytes and (body := known.body_of(data)):
                self._take_whole(call, known, body)
                return
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_complete:
                self._hand_on(call)
                self._fail("protocol", f"malformed answer: {error}")
                return
            self._surplus = True
        if self._pieces:
            self._hand_on(call)
        if self._call is None:
            return
        if self._is_complete:
            if len(data) == self._num_head_bytes:
                self._learn_head(data)
            self._release()
        elif not self._has_head and self._num_head_bytes > self._pool.limits.max_head_bytes:
            self._fail("protocol", "the head of the answer is too large")
        elif call.gathers:
            self._pool.gatherer.heard(self)

    def read_on(self) -> None:
        """End a pause for gathering; one that the receiver asked for goes on."""
        if self._call is None or not self._call.is_paused:
            self.resume()

    def _take_whole(self, call: "Call", known: KnownAnswer, body: bytes) -> None:
        """Do what the parser and `_hand_on` do, for an answer that came in one read."""
        self._has_head = self._is_complete = self._can_keep_alive = True
        sink = call.sink
        try:
            sink.on_head(known.status, known.fields)
            sink = call.sink  # nobody, where that ended the call
            sink.on_data(body)
        except Exception as error:  # noqa: BLE001 - one broken receiver must not harm the pool
            self._receiver_failed(call, sink, error)
            return
        if self._call is not None:
            self._release()

    def _learn_head(self, data: bytes) -> None:
        """Keep the head of a whole answer that has a length and leaves the connection open."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        is_plain = not (self._num_interim or self._surplus)
        names = {name for name, _ in self._pairs}
        if is_plain and self._can_keep_alive and b"transfer-encoding" not in names:
            self._pool.learn_answer(head, self._parser.get_status_code(), self._pairs)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the call that was under way."""
        call = self._call
        self._pool.forget(self)
        # It holds our methods: a cycle for the collector otherwise.
        self._parser = cast("httptools.HttpResponseParser", None)
        if call is None:
            return
        if self._has_head and exc is None and self._ends_at_close:
            self._call = None
            call.end()
            return
        self._fail("closed", f"the connection was closed{f' ({exc})' if exc else ''}")

    # The parser tells…

    def on_message_begin(self) -> None:
        """Notice a second answer to one request."""
        if self._is_complete:
            self._surplus = True
        self._pairs = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a field; those of trailers are dropped."""
        if not self._has_head:
            self._pairs.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Pass the head on, unless it is an interim answer."""
        call = self._call
        if call is None or self._surplus:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._is_interim = True
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM_RESPONSES or status == 101:
                self._fail("protocol", "too many interim answers, or a switch of protocols")
            return
        if self._is_head_too_large():
            self._fail("protocol", "the head of the answer is too large")
        elif status in (301, 302, 303, 307, 308):
            self._fail("protocol", f"the origin answered with a redirect ({status})")
        else:
            self._has_head = True
            sink = call.sink
            try:
                sink.on_head(status, self._pairs)
            except Exception as error:  # noqa: BLE001 - one broken receiver must not harm the pool
                self._receiver_failed(call, sink, error)

    def on_message_complete(self) -> None:
        """Note the end; the connection is given back once the parser has returned."""
        if self._is_interim:
            self._is_interim = False
        elif not self._surplus:
            self._is_complete = True
            self._num_pieces = len(self._pieces)
            self._can_keep_alive = self._parser.should_keep_alive()

    # Ends…

    def _hand_on(self, call: "Call") -> None:
        """Give the sink what one read brought of the body, in one piece."""
        pieces = self._pieces
        if self._is_complete:
            # What lies behind the end belongs to no call.
            del pieces[self._num_pieces :]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if not data or self._call is None:
            return
        sink = call.sink
        try:
            sink.on_data(data)
        except Exception as error:  # noqa: BLE001 - one broken receiver must not harm the pool
            self._receiver_failed(call, sink, error)

    def _receiver_failed(self, call: "Call", sink: "ResponseSink", error: Exception) -> None:
        """Close, and tell the receiver, even one that has cancelled the call itself before it raised."""
        call.cancel()
        self._pool.receiver_failed(sink, error)

    def _is_head_too_large(self) -> bool:
        limit = self._pool.limits.max_head_bytes
        if self._num_head_bytes <= limit:
            return False
        # The bytes counted may include body: count the fields themselves.
        return sum(len(name) + len(value) + 4 for name, value in self._pairs) > limit

    @property
    def _ends_at_close(self) -> bool:
        """Without a length or chunks the end of the connection is the end of the body."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self._pairs)

    def _release(self) -> None:
        """Give the connection back first, so that `on_end` may use it for the next call."""
        call = self._call
        assert call is not None
        self._call = None
        transport = self._transport
        is_clean = (
            not self._surplus
            and not transport.is_closing()
            and self._can_keep_alive
            and not transport.get_write_buffer_size()
        )
        if is_clean:
            if call.is_paused:
                transport.resume_reading()
            self.is_fresh = False
            self._pool.give_back(self)
        else:
            self._transport.abort()
            self._pool.forget(self)
        call.end()

    def _fail(self, kind: str, message: str) -> None:
        call = self._call
        self._call = None
        self._transport.abort()
        self._pool.forget(self)
        if call is not None:
            call.fail(kind, message, self)
