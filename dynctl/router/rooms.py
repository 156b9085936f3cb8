"""How much of an engine's KV memory the requests under way there need, and whether one more fits beside them.

A request has its prompt and what it has said so far, and needs a token more with every step: so many steps are looked ahead.
What prompts have in common at their beginnings is stored once; cached blocks that nobody uses are free. Not here: what
follows from it (`worker_table`), the engine's own count, clocks. Pure.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

from dynctl.router.prompt import Prompt

if TYPE_CHECKING:
    from dynctl.router.bookings import Booking

TIGHT = 0.4
"""Share of the limit: an engine with no more than that booked has room for any request that needs no more than that, with
something left for blocks that are not full. Only beyond it is anything looked at."""

_FRESH_S = 0.1
"""So long after a look answers have not come much further."""

_Place = tuple[bytes, int]
"""A prompt's blocks, and the number of its request."""


class Room:
    """One engine's, as far as this process has sent requests there. Looked at only while memory is tight."""

    __slots__ = (
        "_block_bytes",
        "_block_size",
        "_in_order",
        "_is_due",
        "_lookahead",
        "_looked_s",
        "_needed_tokens",
        "_num_entered",
        "_places",
        "_under_way",
        "_with_previous",
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
        self._block_size = self._block_bytes = 0
        self._num_entered = 0
        self._under_way: dict[Booking, Prompt | None] = {}
        self._needed_tokens = 0
        """By those under way, as last looked up; those that came since have all that was booked for them."""
        self._looked_s = 0.0
        self._is_due = True
        self._in_order: list[_Place] | None = None
        """Prompts in order: neighbours have the most in common, and each brings its own blocks less what it has in common with …"""
        self._with_previous: list[int] = []
        """… the one before it, in blocks."""
        self._places: dict[Booking, _Place] = {}

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
        if self._in_order is not None:
            self._put(self._in_order, booking, prompt)
            self._is_due = True

    def leave(self, booking: "Booking") -> None:
        """A request has ended; no error when it never entered."""
        if booking not in self._under_way:
            return
        del self._under_way[booking]
        self.booked_tokens -= booking.tokens
        self._is_due = True
        place = self._places.pop(booking, None)
        if place is not None and self._in_order is not None:
            at, with_previous = bisect_left(self._in_order, place), self._with_previous
            del self._in_order[at]
            gone = with_previous.pop(at)
            if at < len(with_previous):
                # What two have in common, the one that stood between them has too.
                with_previous[at] = min(with_previous[at], gone)
            self.shared_tokens = sum(with_previous) * self._block_size
        if not self._under_way:
            self.relax()

    def relax(self) -> None:
        """Nobody needs to know any more."""
        self._in_order = None
        self._with_previous, self._places = [], {}
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
        if self._in_order is not None and self._needed_tokens <= left_tokens:
            return True
        if self._is_due or now_s - self._looked_s > _FRESH_S:
            self._look(now_s, gap_s)
        missing_tokens = self._needed_tokens - left_tokens
        if missing_tokens <= 0 or prompt is None or prompt_tokens < missing_tokens:
            return missing_tokens <= 0
        return self._shared_tokens(prompt) >= missing_tokens

    def _look(self, now_s: float, gap_s: float) -> None:
        """See what prompts have in common, and how far every answer has come."""
        if self._in_order is None:
            self._in_order = []
            for booking, prompt in self._under_way.items():
                self._put(self._in_order, booking, prompt)
        needed_tokens, lookahead = -self.shared_tokens, self._lookahead
        for booking in self._under_way:
            needed_tokens += booking.prompt_tokens + int(booking.said_tokens(now_s, gap_s))
            left = booking.output_tokens - booking.num_seen
            # What is longer than expected goes on.
            needed_tokens += min(left, lookahead) if left > 0 else lookahead
        self._needed_tokens, self._looked_s, self._is_due = needed_tokens, now_s, False

    def _put(self, in_order: list[_Place], booking: "Booking", prompt: Prompt | None) -> None:
        data = b"" if prompt is None else self._data(prompt)
        if not data:
            return
        self._num_entered += 1
        place = self._places[booking] = data, self._num_entered
        at = bisect_left(in_order, place)
        in_order.insert(at, place)
        self._with_previous.insert(at, self._common(in_order, at))
        if at + 1 < len(in_order):
            self._with_previous[at + 1] = self._common(in_order, at + 1)
        self.shared_tokens = sum(self._with_previous) * self._block_size

    def _shared_tokens(self, prompt: Prompt) -> int:
        """What a prompt has in common with one under way."""
        in_order, data = self._in_order or [], self._data(prompt)
        at, stride = bisect_left(in_order, (data, 0)), self._block_bytes
        beside = [in_order[near][0] for near in (at - 1, at) if 0 <= near < len(in_order)]
        return (
            max([in_common(other, data, stride) for other in beside], default=0) * self._block_size
        )

    def _common(self, in_order: list[_Place], at: int) -> int:
        """Blocks the prompt at a place has in common with the one before."""
        return in_common(in_order[at - 1][0], in_order[at][0], self._block_bytes) if at else 0

    def _data(self, prompt: Prompt) -> bytes:
        blocks = prompt.blocks(self._block_size)
        if blocks is None:
            return b""
        self._block_bytes = blocks.stride_bytes
        return bytes(blocks.data[: blocks.num_blocks * blocks.stride_bytes])


def in_common(one: bytes, other: bytes, stride: int) -> int:
    """Count the whole strides two texts have in common at their beginnings."""
    if not stride:
        return 0
    low, high = 0, min(len(one), len(other)) // stride
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * stride : middle * stride] == other[low * stride : middle * stride]:
            low = middle
        else:
            high = middle - 1
    return low
