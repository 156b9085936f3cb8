"""Receives one leg's answer: a stream followed event by event, anything else collected whole. IO: none of its own."""

from typing import TYPE_CHECKING, Final

from dynctl.http1.message import Header
from dynctl.http1.upstream import UpstreamError
from dynctl.router.api.streams import StreamFollower
from dynctl.router.handoff import Fault, Leg
from dynctl.router.verdicts import judge

if TYPE_CHECKING:
    from dynctl.router.flight import Flight

MAX_ANSWER_BYTES: Final = 64 * 1024**2
_MAX_ERROR_BYTES: Final = 64 * 1024


class LegSink:
    """Reports to its flight until the leg is over."""

    __slots__ = (
        "_follower",
        "_headers",
        "_held",
        "_is_relayed",
        "_leg",
        "_num_bytes",
        "_parts",
        "_status",
        "flight",
    )

    def __init__(self, flight: "Flight", leg: Leg, *, is_relayed: bool) -> None:
        self.flight = flight
        self._leg = leg
        self._is_relayed = is_relayed
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._follower: StreamFollower | None = None
        self._held = b""
        """Events before the first token: kept back, so that until then the engine can be replaced."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Decide by the status whether events follow."""
        self._status = status
        self._headers = headers
        request = self.flight.request
        if status == 200 and self._leg is Leg.MAIN and request.is_stream:
            self._follower = StreamFollower(hides_usage=not request.has_usage_asked)

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body."""
        follower = self._follower
        if follower is not None:
            self._follow(follower, data)
            return
        self._num_bytes += len(data)
        limit = MAX_ANSWER_BYTES if self._status == 200 else _MAX_ERROR_BYTES
        if self._num_bytes <= limit:
            self._parts.append(data)
        elif self._status == 200:
            self.flight.on_broken("an answer beyond all bounds", self._leg)

    def on_end(self) -> None:
        """The body is complete."""
        follower = self._follower
        if follower is None:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._judge(body)
        elif why := follower.ended():
            self.flight.on_broken(why, self._leg)

    def on_error(self, error: UpstreamError) -> None:
        """The connection failed."""
        self.flight.on_failed(self._leg, error)

    def _judge(self, body: bytes) -> None:
        verdict = judge(self._status, self._headers, body, is_relayed=self._is_relayed)
        if verdict is None:
            self.flight.on_answer(self._leg, body)
        elif isinstance(verdict, Fault):
            self.flight.on_fault(self._leg, verdict)
        else:
            self.flight.on_refused(self._leg, verdict)

    def _follow(self, follower: StreamFollower, data: bytes) -> None:
        self.followed(follower, follower.feed(data))

    def follow(self, follower: StreamFollower, held: bytes) -> None:
        """Go on with a stream, a 200, from where somebody else has followed it to."""
        self._status = 200
        self._follower = follower
        self._held = held

    def followed(self, follower: StreamFollower, out: bytes) -> None:
        """Report what a stream's follower has found; `out` is what it let through."""
        num_tokens = follower.num_token_events
        if follower.is_done:
            self.flight.on_stream_done(self._held + out, num_tokens, follower.usage)
            return
        if num_tokens == 0:
            self._held += out
        else:
            # What was sound before a break in the same piece still goes out.
            if self._held:
                out, self._held = self._held + out, b""
            self.flight.on_events(out, num_tokens)
        if follower.broken:
            self.flight.on_broken(follower.broken, self._leg)
