"""The client's side of one request: whole answers, errors, streams and their end. IO: through the exchange."""

from typing import Final

from dynctl.http1.message import Header, field_lines
from dynctl.http1.server import Exchange
from dynctl.router.api.answers import Failure

_STREAM_LINES: Final = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\n"
)


class Reply:
    """Writes one answer; calls after the client left do nothing."""

    __slots__ = ("_exchange", "_is_ended", "_shown_id", "code", "extra")

    def __init__(self, exchange: Exchange, shown_id: bytes) -> None:
        self._exchange = exchange
        self._shown_id = shown_id
        self.extra: tuple[Header, ...] = ()
        """Fields for an answer that is well."""
        self.code = 499
        """The status the client got; 499: it left before one."""
        self._is_ended = False

    def stream(self) -> None:
        """Begin a stream of events, unless it has begun; the head leaves with the first of them."""
        if self.code == 200:
            return
        self._exchange.start(200, (), lines=_STREAM_LINES + self._own_lines(), is_held=True)
        self.code = 200

    def write(self, events: bytes) -> None:
        """Send events."""
        self._exchange.write(events)

    def end_stream(self, last: bytes) -> None:
        """End a stream properly, after its last events, unless it has ended."""
        if not self._is_ended:
            self._is_ended = True
            self._exchange.finish(last)

    def break_stream(self, failure: Failure) -> None:
        """End a stream with one error event, and no `[DONE]`."""
        self._exchange.finish(failure.event())

    def whole(self, body: bytes) -> None:
        """Give a whole answer."""
        self._exchange.respond(200, body, lines=self._own_lines())
        self.code = 200

    def _own_lines(self) -> bytes:
        own = b"x-request-id: %b\r\n" % self._shown_id
        return own + field_lines(self.extra) if self.extra else own

    def fail(self, failure: Failure) -> None:
        """Answer with an error."""
        self.code = failure.status
        headers = (*failure.headers(), (b"x-request-id", self._shown_id))
        self._exchange.respond(failure.status, failure.body(), headers=headers)

    def give_up(self, failure: Failure) -> bool:
        """End the answer by an error, whatever there is of it; False where the client has it all, or is gone."""
        exchange = self._exchange
        if exchange.is_finished or exchange.is_gone:
            return False
        try:
            if self.code == 200:
                self.break_stream(failure)
            elif not exchange.is_started:
                self.fail(failure)
        finally:
            # Of what is in no state to be ended the client sees that it is not whole.
            exchange.abort()
        return True
