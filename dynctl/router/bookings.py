"""A request's entry in one engine's books, released exactly once. Pure."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynctl.router.workers import Worker


class Booking:
    """One request's entry in one engine's books."""

    __slots__ = (
        "_prefill_ms",
        "_prefill_tokens",
        "_worker",
        "begins_s",
        "is_released",
        "num_seen",
        "output_tokens",
        "prefill_ahead_tokens",
        "prompt_tokens",
    )

    def __init__(
        self, worker: "Worker", prompt_tokens: int, output_tokens: int, now_s: float
    ) -> None:
        self._worker = worker
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Expected."""
        self.begins_s = now_s
        """When its first token came, or is expected."""
        self.num_seen = 0
        """Tokens of its answer that have come one by one."""
        self._prefill_tokens = 0
        self._prefill_ms = 0.0
        self.is_released = False
        self.prefill_ahead_tokens = worker.pending_prefill_tokens
        """Tokens the engine had to prefill when this was booked, its own included."""

    @property
    def worker(self) -> "Worker":
        """Whose books these are."""
        return self._worker

    @property
    def tokens(self) -> int:
        """Of KV memory, at its end."""
        return self.prompt_tokens + self.output_tokens

    def said_tokens(self, now_s: float, gap_s: float) -> float:
        """How far its answer has come; where that is not seen, should have."""
        return self.num_seen or max(now_s - self.begins_s, 0.0) / gap_s

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill of this request still counts here."""
        return self._prefill_tokens > 0

    def prefill_here(self, tokens: int, now_s: float) -> None:
        """Take on a prefill."""
        worker = self._worker
        self._prefill_ms += worker.prefill.at(tokens)
        self._prefill_tokens += tokens
        worker.pending_prefill_tokens += tokens
        worker.pending_prefills += 1
        worker.free_at_s = max(worker.free_at_s, now_s) + self._prefill_ms / 1e3
        self.begins_s = worker.free_at_s
        worker.cached_load = None
        self.prefill_ahead_tokens = worker.pending_prefill_tokens

    def prefill_ended(self, now_s: float | None = None) -> None:
        """Note that nothing of this request waits for prefill any more; with a time: since its first token came then."""
        if now_s is not None:
            self.begins_s = now_s
        if not self._prefill_tokens:
            return
        worker = self._worker
        worker.pending_prefill_tokens -= self._prefill_tokens
        worker.pending_prefills -= 1
        if now_s is None:
            worker.free_at_s -= self._prefill_ms / 1e3
        else:
            # What is left is counted from here, so that a wrong guess does not last.
            base, slope = worker.prefill.base, worker.prefill.slope
            left_ms = worker.pending_prefills * base + worker.pending_prefill_tokens * slope
            worker.free_at_s = now_s + left_ms / 1e3
            worker.prefill_ended_s = now_s
        self._prefill_tokens = 0
        self._prefill_ms = 0.0
        worker.cached_load = None

    def release(self) -> None:
        """Take the request out of the books."""
        assert not self.is_released, "a booking is released once"
        self.is_released = True
        self.prefill_ended()
        self._worker.room.leave(self)
        self._worker.released(self.tokens)
