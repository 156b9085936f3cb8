"""Where known prompts part: tells a new conversation on a shared prefix from the next turn of an old one. Pure.

A block at which one prompt's cached prefix ended is remembered. Where another prompt's ends at the same block, that block
is the end of something shared (a system prompt), and what follows is a start; a next turn ends at a block of its own.
"""

_MAX_BLOCKS = 65_536
"""Of a generation: 10 MiB in all."""


class Forks:
    """Ends of cached prefixes, in two generations."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()

    def is_fork(self, block: int) -> bool:
        """Tell whether another prompt's cached prefix ended here before, and remember that one's does now."""
        is_known = block in self._young or block in self._old
        self._young.add(block)
        if len(self._young) > _MAX_BLOCKS:
            self._old, self._young = self._young, set()
        return is_known
