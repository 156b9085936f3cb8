"""Where known prompts part: tells a new conversation on a shared prefix from the next turn of an old one. Pure.

A block at which one prompt's cached prefix ended is remembered. Where another prompt's ends at the same block, that block
is the end of something shared (a system prompt), and what follows is a start; a next turn ends at a block of its own.
"""

import math

_MAX_BLOCKS = 65_536
"""Of a generation: 12 MiB in all."""

_RECENT_S = 10.0
"""Age at which a start counts 1/e: what is popular changes. Tuned: benchmarks/balance.py."""

_PRIOR_STARTS = 4.0
"""Starts on a prefix of average popularity that are taken to have been just before the first."""

_NEVER = -math.inf


class Forks:
    """Ends of cached prefixes and how many prompts ended there lately, in two generations.

    A count is kept as the logarithm of a sum of weights that grow with time, so that nothing has to be aged.
    """

    __slots__ = ("_old", "_starts", "_young")

    def __init__(self) -> None:
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        self._starts = _NEVER

    def popularity(self, block: int, num_engines: int, now_s: float) -> float:
        """Say how many engines' fair shares of all starts are on the prefix that ends here; count one more.

        0: no other prompt's ended here, so this is a conversation under way.
        """
        now, young = now_s / _RECENT_S, self._young
        count = young.get(block)
        if count is None:
            count = self._old.get(block)
        if count is None:
            young[block] = now
            if len(young) > _MAX_BLOCKS:
                self._old, self._young = young, {}
            return 0.0
        here, starts = math.exp(count - now), math.exp(self._starts - now)
        young[block] = now + math.log1p(here)
        self._starts = now + math.log1p(starts)
        return (here * num_engines + _PRIOR_STARTS) / (starts + _PRIOR_STARTS)
