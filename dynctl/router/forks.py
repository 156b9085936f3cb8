"""Where known prompts part: tells a new conversation on a shared prefix from the next turn of an old one. Pure.

A block at which one prompt's cached prefix ended is remembered. Where another prompt's ends at the same block, that block
is the end of something shared (a system prompt), and what follows is a start; a next turn ends at a block of its own.
"""

_MAX_BLOCKS = 65_536
"""Of a generation: 10 MiB in all."""

_MAX_STARTS = 512
"""Of a generation: what is popular changes."""

_PRIOR_STARTS = 4
"""Starts on a prefix of average popularity that are taken to have been before the first."""


class Forks:
    """Ends of cached prefixes and how many prompts ended there, in two generations."""

    __slots__ = ("_num_old", "_num_young", "_old", "_young")

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._num_young = self._num_old = 0

    def popularity(self, block: int, num_engines: int) -> float:
        """Say how many engines' fair shares of all starts are on the prefix that ends here; count one more.

        0: no other prompt's ended here, so this is a conversation under way.
        """
        young = self._young
        here = young.get(block, 0)
        young[block] = here + 1
        here += self._old.get(block, 0)
        if here:
            self._num_young += 1
        starts = self._num_young + self._num_old
        if len(young) > _MAX_BLOCKS or self._num_young > _MAX_STARTS:
            self._old, self._young = young, {}
            self._num_old, self._num_young = self._num_young, 0
        return (here * num_engines + _PRIOR_STARTS) / (starts + _PRIOR_STARTS) if here else 0.0
