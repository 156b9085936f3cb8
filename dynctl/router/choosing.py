"""What a policy sees and what it returns.

A policy is a pure function: frozen facts and one random draw in, a position out. So a choice can be repeated from what
was recorded of it, bit for bit. Booking and recording are the caller's. Not here: any policy. Pure.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

ROOM_PRICE: Final = 1.0
"""What the room costs that uncached tokens take in a full cache, in their own prefills, where as much is stored as in the
mean: what is pushed out may have been wanted again. Less where there is room yet. Tuned: benchmarks/balance.py."""

WATERMARK: Final = 0.7
"""Share of KV memory in use from which an engine gets dearer. Source: operating practice."""


class Load(NamedTuple):
    """What one engine is worth asking, at one moment; replaced as a whole when anything of it changes."""

    engine: str
    prefill_ms_per_token: float
    prefill_base_ms: float
    free_at_s: float
    """When its queued prefills are expected to be over, on the router's monotonic clock."""
    decode_ms_per_token: float
    """What the sequences running there add to the gap between two tokens."""
    recent: float
    """Requests sent there lately, each weighing less the older it is; in units of `Need.recent_unit`."""
    room_tokens: float
    """Of KV memory, up to the watermark; may be negative; infinite where the capacity is not known."""
    capacity_tokens: int
    """Of KV memory; 0: not known."""
    active_requests: int
    pending_prefill_tokens: int
    uncached_ms_per_token: float
    """What an uncached token costs in all: its prefill, and the room it takes, the dearer the fuller the cache."""
    move_base_ms: float = 0.0
    """Where another engine does the prefill: what its KV costs to come here before the first byte, the wait for others included, …"""
    move_ms_per_token: float = 0.0
    """… and for each token that is not here."""


class Need(NamedTuple):
    """What one leg of a request asks of an engine."""

    prompt_tokens: int
    output_tokens: int
    """Expected to be generated; 1 for a prefill leg."""
    ordinal: int
    """Counts the router's decisions for this side of a hand-over; gives round robin its turn."""
    now_s: float = 0.0
    recent_unit: float = 1.0
    """The weight of a request made now, in `Load.recent`."""
    ms_per_token: float = 0.1
    """Of prefill, on the engines' average."""
    is_moved: bool = False
    """Another engine does the prefill: what is not here costs its transfer."""
    popularity: float = 1.0
    """Fair shares of all new conversations that begin with this one's cached prefix: 1 is what keeps one engine busy;
    0 for a conversation under way, whose prefix is its own; infinite for a prompt nobody has cached."""
    least_prefill_ms: float = 0.0
    """No engine's prefill takes less than this …"""
    least_ms_per_token: float = 0.0
    """… and this for each uncached token."""
    near_ms: float = 1.0
    near_ratio: float = 0.02
    stickiness: float = 1.0
    """Below 1: what a cached token counts for; above 1: by how much less excess load counts."""


class Policy(Protocol):
    """Chooses among engines that may take the request; there is always at least one.

    `overlaps[i]` is how many prompt tokens the index expects cached on `loads[i]`, never all of them; `draw` is from
    [0, 1).
    """

    @property
    def uses_index(self) -> bool:
        """Whether prompts must be tokenised and matched for it."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """What `terms` returns; the unit is at the end of each name."""

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Return the position of the choice; the same inputs give the same."""
        ...

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say per candidate what the choice was made by."""
        ...


def drawn(positions: Sequence[int], draw: float) -> int:
    """Take one of several equally good positions."""
    return positions[0] if len(positions) == 1 else positions[int(draw * len(positions))]
