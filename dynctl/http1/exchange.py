"""One request at a server and the answer being given to it.

Not here: reading requests (`server_connection`), routes.
IO: sockets (through the connection).
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from dynctl.http1.message import Header, field_lines, status_line
from dynctl.http1.request import Request

if TYPE_CHECKING:
    from dynctl.http1.server_connection import ServerConnection

_MAX_JOINED_BYTES: Final = 64 * 1024
"""Bodies up to this size are joined with their head into one write."""


class Exchange:
    """One request and the answer being given; calls after the client left do nothing."""

    __slots__ = (
        "_connection",
        "_held",
        "_is_chunked",
        "_missing_bytes",
        "is_finished",
        "is_gone",
        "is_started",
        "must_close",
        "on_gone",
        "on_pause",
        "on_resume",
        "request",
    )

    def __init__(self, connection: "ServerConnection", request: Request) -> None:
        self._connection = connection
        self._held = b""
        self._is_chunked = False
        self._missing_bytes: int | None = None
        self.request = request
        self.must_close = not request.can_keep_alive
        """The connection ends with this answer."""
        self.is_started = False
        self.is_finished = False
        self.is_gone = False
        """The client left before the answer was complete."""
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        """The client reads too slowly: stop producing until `on_resume`."""
        self.on_resume: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = (
            "gone"
            if self.is_gone
            else "finished"
            if self.is_finished
            else "started"
            if self.is_started
            else "open"
        )
        return f"<Exchange {self.request.method} {self.request.path} {state}>"

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[Header] = (),
        lines: bytes = b"",
    ) -> None:
        """Give the whole answer at once; `lines` are header fields already written."""
        if self._begin():
            return
        if headers:
            lines += field_lines(headers)
        if self._closes():
            lines += b"connection: close\r\n"
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            status_line(status),
            content_type,
            len(body),
            lines,
        )
        connection = self._connection
        if self.request.method == "HEAD":
            connection.send(head)
        elif len(body) <= _MAX_JOINED_BYTES:
            connection.send(head + body)
        else:
            connection.send(head)
            connection.send(body)
        self._end()

    @property
    def kept(self) -> object | None:
        """What the handler remembers of this client, as long as the connection lasts."""
        return self._connection.kept

    @kept.setter
    def kept(self, value: object | None) -> None:
        self._connection.kept = value

    @property
    def unsent_bytes(self) -> int:
        """What the client has not taken yet, above the kernel's buffers."""
        return 0 if self.is_gone else self._connection.unsent_bytes

    def start(
        self,
        status: int,
        headers: Iterable[Header],
        length_bytes: int | None = None,
        *,
        lines: bytes = b"",
        is_held: bool = False,
    ) -> None:
        """Begin an answer in pieces; without a length it stays open until `finish`.

        `lines` are header fields already written. `is_held` keeps the head back until the first piece, so that both
        are one write.
        """
        if self._begin():
            return
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the body.
        self._is_chunked = length_bytes is None and not self.request.is_http10
        self._missing_bytes = length_bytes
        if length_bytes is not None:
            framing = b"content-length: %d\r\n" % length_bytes
        else:
            framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        if self._closes():
            framing += b"connection: close\r\n"
        if headers:
            lines += field_lines(headers)
        head = b"%b%b%b\r\n" % (status_line(status), lines, framing)
        if length_bytes is not None or is_held:
            # Nobody can use the head of a plain answer without its body: one write for both.
            self._held = head
        else:
            self._connection.send(head)

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if self.is_gone or not data:
            return
        if not self.is_started or self.is_finished:
            raise RuntimeError("write outside a streamed answer")
        if self.request.method == "HEAD":
            return
        if self._missing_bytes is not None:
            self._missing_bytes -= len(data)
            if self._missing_bytes < 0:
                # Bytes beyond the length would be read as another answer.
                self.abort()
                return
        if self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (self._held, len(data), data)
            self._held = b""
        elif self._held:
            data = self._held + data
            self._held = b""
        self._connection.send(data)

    def finish(self, last: bytes = b"") -> None:
        """End an answer in pieces properly, after a last piece; one shorter than its length is cut instead."""
        if self.is_gone:
            return
        if not self.is_started or self.is_finished:
            raise RuntimeError("finish outside a streamed answer")
        # Nobody who was paused now would ever be told to go on.
        self.on_pause = None
        if last and self._is_chunked and self.request.method != "HEAD":
            # One write for the last piece and the end.
            self._connection.send(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._held, len(last), last))
            self._end()
            return
        self.write(last)
        if self._missing_bytes and self.request.method != "HEAD":
            self.abort()
            return
        if self._held:
            self._connection.send(self._held)
        if self._is_chunked and self.request.method != "HEAD":
            self._connection.send(b"0\r\n\r\n")
        self._end()

    def abort(self) -> None:
        """Cut the connection, so that the client sees the answer is not whole."""
        if not self.is_gone and not self.is_finished:
            self.is_finished = True
            self._let_go()
            self._connection.cut()

    def _begin(self) -> bool:
        """Note that the answer starts; tell whether there is nobody to read it."""
        if self.is_gone:
            return True
        if self.is_started:
            raise RuntimeError("the answer has already begun")
        self.is_started = True
        return False

    def _closes(self) -> bool:
        server = self._connection.server
        if server.is_closing or server.is_retiring:
            self.must_close = True
        return self.must_close

    def left(self) -> None:
        """Note that the client is gone; called once by the connection."""
        on_gone = self.on_gone
        self._let_go()
        if not self.is_finished:
            self.is_gone = True
            if on_gone is not None:
                on_gone()

    def _let_go(self) -> None:
        # Callbacks lead back here through the call they belong to: without this every request would
        # leave a cycle to the garbage collector.
        self.on_gone = self.on_pause = self.on_resume = None

    def _end(self) -> None:
        self.is_finished = True
        self._let_go()
        self._connection.exchange_finished(self.must_close)
