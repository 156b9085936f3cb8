"""Replies under way: tokens from the engine, bytes to one client; cancel on disconnect, merge when it reads slowly.

Not here: routes, shapes of answers (`answers`). IO: writes to an http1 exchange.
"""

from collections.abc import Iterator

from dynctl.http1.server import Exchange
from dynctl.sim.api.answers import (
    DONE,
    StopText,
    StreamWriter,
    error_body,
    error_event,
    whole_body,
)
from dynctl.sim.api.intake import Job
from dynctl.sim.engine import SimEngine
from dynctl.sim.faults import Fault
from dynctl.sim.scheduler import Output
from dynctl.sim.sequence import SimSequence

_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
_INTERNAL = ("Internal server error", "InternalServerError", 500)


class Reply:
    """Base of both kinds: follows one sequence and cuts stop texts."""

    def __init__(self, job: Job, exchange: Exchange, engine: SimEngine) -> None:
        self._job = job
        self._exchange = exchange
        self._engine = engine
        self._stop = StopText(job.stop, include=job.include_stop_text)
        self._sequence: SimSequence | None = None

    def begin(self, faults: tuple[Fault, ...]) -> None:
        """Hand the request to the engine."""
        self._exchange.on_gone = self._on_gone
        self._sequence = self._engine.submit(self._job.wish, self, faults)

    def on_output(self, output: Output) -> None:
        """Take a token: its text, and whether the answer ends with it."""
        text = self._stop.feed(self._engine.text.piece(output.token))
        reason: str | None = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        if self._stop.stopped_by is not None:
            reason, stop_reason = "stop", self._stop.stopped_by
            self._engine.stop(output.sequence, "stop")
        elif reason is not None:
            text += self._stop.rest()
        self.take(output, text, reason, stop_reason)

    def take(
        self, output: Output, text: str, reason: str | None, stop_reason: int | str | None
    ) -> None:
        """Pass settled text on to the client."""
        raise NotImplementedError

    def on_error(self, message: str) -> None:  # noqa: ARG002 - the cause is for logs, clients see what vLLM says
        """Answer that the engine failed."""
        self._exchange.respond(500, error_body(*_INTERNAL))

    def on_cut(self) -> None:
        """Close the connection without a proper end."""
        if self._sequence is not None:
            self._engine.stop(self._sequence, "abort")
        self._exchange.abort()

    def on_shutdown(self) -> None:
        """End the answer, since the engine stops."""
        self._exchange.respond(500, error_body(*_INTERNAL))

    def num_cached(self, sequence: SimSequence) -> int:
        """Say how much of the prompt was cached; on a decode engine what prefill had, as vLLM says."""
        told = self._job.prefill_cached_tokens
        return told if isinstance(told, int) else sequence.num_cached_tokens

    def _on_gone(self) -> None:
        if self._sequence is not None:
            self._engine.stop(self._sequence, "abort")


class WholeReply(Reply):
    """An answer in one piece."""

    def __init__(self, job: Job, exchange: Exchange, engine: SimEngine) -> None:
        super().__init__(job, exchange, engine)
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def take(
        self, output: Output, text: str, reason: str | None, stop_reason: int | str | None
    ) -> None:
        """Collect; answer at the end."""
        self._texts.append(text)
        self._token_ids.append(output.token)
        if reason is None:
            return
        sequence = output.sequence
        body = whole_body(
            self._job,
            "".join(self._texts),
            self._token_ids,
            reason,
            stop_reason,
            self.num_cached(sequence),
            self._engine.transfer_params(sequence),
        )
        self._exchange.respond(200, body)


class StreamReply(Reply):
    """An answer as server-sent events. The head goes out at once, before the first token, as with vLLM."""

    def __init__(self, job: Job, exchange: Exchange, engine: SimEngine, *, is_split: bool) -> None:
        super().__init__(job, exchange, engine)
        self._writer = StreamWriter(job)
        self._is_split = is_split
        self._is_paused = False
        self._text = ""
        self._token_ids: list[int] = []
        self._ending: tuple[str | None, int | str | None] = (None, None)

    def begin(self, faults: tuple[Fault, ...]) -> None:
        """Send the head, then hand the request to the engine."""
        self._exchange.on_pause = self._on_pause
        self._exchange.on_resume = self._on_resume
        self._exchange.start(200, _STREAM_HEADERS)
        super().begin(faults)

    def take(
        self, output: Output, text: str, reason: str | None, stop_reason: int | str | None
    ) -> None:
        """Send an event, or add to the next one while the client reads too slowly."""
        self._text += text
        self._token_ids.append(output.token)
        self._ending = (reason, stop_reason)
        if not self._is_paused:
            self._flush(output.sequence)

    def on_error(self, message: str) -> None:  # noqa: ARG002 - as above
        """Break the stream off with one error event."""
        self._send(error_event(*_INTERNAL) + DONE)
        self._exchange.finish()

    def on_shutdown(self) -> None:
        """End the stream: vLLM 0.32 closes a cut stream with the end mark all the same."""
        self._send(DONE)
        self._exchange.finish()

    def _flush(self, sequence: SimSequence) -> None:
        counts = (sequence.num_prompt, sequence.num_output, self.num_cached(sequence))
        reason, stop_reason = self._ending
        # Text held back for a stop string makes no event of its own, unless ids are wanted.
        if self._text or reason is not None or self._job.return_token_ids:
            data = self._writer.tokens(self._text, self._token_ids, reason, stop_reason, counts)
            self._text, self._token_ids = "", []
            self._send(data if reason is None else data + self._writer.last(counts))
        if reason is not None:
            self._exchange.finish()

    def _send(self, data: bytes) -> None:
        if not self._is_split:
            self._exchange.write(data)
            return
        for piece in _odd_pieces(data):
            self._exchange.write(piece)

    def _on_pause(self) -> None:
        self._is_paused = True

    def _on_resume(self) -> None:
        self._is_paused = False
        if self._token_ids and self._sequence is not None:
            self._flush(self._sequence)


def _odd_pieces(data: bytes) -> Iterator[bytes]:
    """Cut bytes into pieces of 1 to 7, the same way every time."""
    start, size = 0, 1
    while start < len(data):
        yield data[start : start + size]
        start += size
        size = size % 7 + 1
