"""How much of an engine's KV memory the requests under way there need, and whether one more fits beside them.

A request has its prompt and what it has said so far, and needs a token more with every step: so many steps are looked ahead.
What prompts have in common at their beginnings is stored once; cached blocks that nobody uses are free. Not here: what
follows from it (`worker_table`), the engine's own count, clocks. Pure.
"""

from typing import TYPE_CHECKING

from dynctl.router.prompt import Prompt

if TYPE_CHECKING:
    from dynctl.router.bookings import Booking

TIGHT = 0.4
"""Share of the limit: an engine with no more than that booked has room for any request that needs no more than that, with
something left for blocks that are not full. Only beyond it is anything looked at."""

_FRESH_S = 0.1
"""So long after a look answers have not come much further."""


class Room:
    """One engine's, as far as this process has sent requests there. Looked at only while memory is tight."""

    __slots__ = (
        "_block_size",
        "_counts",
        "_is_due",
        "_is_looking",
        "_lookahead",
        "_looked_s",
        "_needed_tokens",
        "_under_way",
        "booked_tokens",
        "limit_tokens",
        "shared_tokens",
    )

    def __init__(self) -> None:
        self.limit_tokens = 0
        """What requests under way may need; 0: the engine does not say what it has, or nobody asks for a limit."""
        self.booked_tokens = 0
        """Of all that this process has sent here."""
        self.shared_tokens = 0
        """What prompts under way have in common, beyond one copy; 0 while nobody looks."""
        self._lookahead = 0
        self._block_size = 0
        self._under_way: dict[Booking, Prompt | None] = {}
        self._needed_tokens = 0
        """By those under way, as last looked up; those that came since have all that was booked for them."""
        self._looked_s = 0.0
        self._is_due = True
        self._is_looking = False
        self._counts: dict[int, int] = {}
        """Prompts under way that begin alike, by the hash of that beginning, up to each of its `points`."""

    def resize(self, limit_tokens: int, block_size: int, lookahead: int) -> None:
        """Take what the engine has, and how many steps are looked ahead; 0: nobody asks."""
        self.limit_tokens = limit_tokens if block_size and lookahead else 0
        self._lookahead = lookahead
        if block_size != self._block_size:
            self._block_size = block_size
            self.relax()

    def enter(self, booking: "Booking", prompt: Prompt | None) -> None:
        """A request begins."""
        self._under_way[booking] = prompt
        self.booked_tokens += booking.tokens
        self._needed_tokens += booking.tokens
        if self._is_looking:
            self._count(prompt)
            self._is_due = True

    def leave(self, booking: "Booking") -> None:
        """A request has ended; no error when it never entered."""
        if booking not in self._under_way:
            return
        prompt = self._under_way.pop(booking)
        self.booked_tokens -= booking.tokens
        self._is_due = True
        if not self._under_way:
            self.relax()
        elif self._is_looking and prompt is not None:
            counts = self._counts
            for point, tokens in prompt.points(self._block_size):
                if left := counts[point] - 1:
                    counts[point] = left
                    self.shared_tokens -= tokens
                else:
                    del counts[point]

    def relax(self) -> None:
        """Nobody needs to know any more."""
        self._is_looking = False
        self._counts = {}
        self.shared_tokens = 0
        self._is_due = True

    def fits(
        self, prompt: Prompt | None, tokens: int, elsewhere_tokens: int, now_s: float, gap_s: float
    ) -> bool:
        """Whether so many tokens, a prompt among them, fit beside those under way.

        `elsewhere_tokens` are booked by other processes, `gap_s` is between two tokens of an answer.
        """
        prompt_tokens = tokens if prompt is None else prompt.num_tokens
        # Each request has a block that is not full.
        own_tokens = prompt_tokens + min(tokens - prompt_tokens, self._lookahead)
        own_tokens += self._block_size * (len(self._under_way) + 1)
        left_tokens = self.limit_tokens - elsewhere_tokens - own_tokens
        is_fresh = now_s - self._looked_s <= _FRESH_S
        if self._is_looking and is_fresh and self._needed_tokens <= left_tokens:
            return True
        if self._is_due or not is_fresh:
            self._look(now_s, gap_s)
        missing_tokens = self._needed_tokens - left_tokens
        if missing_tokens <= 0 or prompt is None or prompt_tokens < missing_tokens:
            return missing_tokens <= 0
        return self._shared_by(prompt) >= missing_tokens

    def _look(self, now_s: float, gap_s: float) -> None:
        """See what prompts have in common, and how far every answer has come."""
        if not self._is_looking:
            self._is_looking = True
            for prompt in self._under_way.values():
                self._count(prompt)
        needed_tokens, lookahead = -self.shared_tokens, self._lookahead
        for booking in self._under_way:
            needed_tokens += booking.prompt_tokens + int(booking.said_tokens(now_s, gap_s))
            left = booking.output_tokens - booking.num_seen
            # What is longer than expected goes on.
            needed_tokens += min(left, lookahead) if left > 0 else lookahead
        self._needed_tokens, self._looked_s, self._is_due = needed_tokens, now_s, False

    def _count(self, prompt: Prompt | None) -> None:
        if prompt is None:
            return
        counts = self._counts
        for point, tokens in prompt.points(self._block_size):
            if number := counts.get(point, 0):
                self.shared_tokens += tokens
            counts[point] = number + 1

    def _shared_by(self, prompt: Prompt) -> int:
        """What a prompt has in common with one under way."""
        points, counts = prompt.points(self._block_size), self._counts
        low, high = 0, len(points)
        while low < high:
            middle = (low + high) // 2
            if points[middle][0] in counts:
                low = middle + 1
            else:
                high = middle
        return sum([tokens for _, tokens in points[:low]])
