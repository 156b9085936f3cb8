"""What a policy sees and what it returns.

A policy is side-effect free: raw facts in, a choice with its terms out; booking and recording are the caller's.
Not here: any policy. Pure.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynctl.router.workers import Worker


@dataclass(frozen=True, slots=True)
class Need:
    """What one leg of a request asks of an engine."""

    prompt_tokens: int
    output_tokens: int
    """Expected to be generated; 1 for a prefill leg."""
    ordinal: int
    """Counts the router's decisions; gives round robin its turn."""
    transfer_ms_per_token: float | None = None
    """Set when another engine does the prefill: what the prompt's uncached tokens then cost here."""
    near_ms: float = 1.0
    near_ratio: float = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine taken, and why."""

    position: int
    """In the candidates."""
    names: tuple[str, ...] = ()
    """Of the terms; their unit is at the end of each."""
    terms: tuple[tuple[float, ...], ...] = ()
    """Per candidate, in their order: (num_candidates, num_terms)."""


class Policy(Protocol):
    """Chooses among engines that may take the request; there is always at least one.

    `overlaps[i]` is how many prompt tokens the index expects cached on `workers[i]`.
    """

    uses_index: bool
    """Whether prompts must be tokenised and matched for it."""

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose one; the same inputs and generator state give the same choice."""
        ...


def nearest(costs: Sequence[float], overlaps: Sequence[int], need: Need, rng: random.Random) -> int:
    """Position of the lowest cost; among those nearly as low the longest overlap, then at random.

    A cached prefix that costs nothing to keep using is kept, also where prefill looks almost free.
    """
    best = min(costs)
    limit = best + max(need.near_ms, need.near_ratio * abs(best))
    near = [position for position, cost in enumerate(costs) if cost <= limit]
    if len(near) > 1:
        most = max(overlaps[position] for position in near)
        near = [position for position in near if overlaps[position] == most]
    return near[0] if len(near) == 1 else near[int(rng.random() * len(near))]
