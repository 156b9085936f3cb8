"""Values by block: a dictionary whose keys are 64-bit numbers, and steps for many blocks at once.

A compiled wheel has the same in C beside this (`block_table.c`): a third of the memory, and half the time where there are
millions of blocks. Not here: what blocks and values are. Pure.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

V = TypeVar("V")
D = TypeVar("D")

_KEY_BYTES = 48
"""Of a block's number; values are shared."""


def most_blocks(num_bytes: int) -> int:
    """How many blocks a table may hold within so many bytes, whatever was put in and taken out before.

    A dictionary that is full of what was taken out gets the power of two of places that is at least three times what it
    holds: 24 bytes for two thirds of them, and 1, 2 or 4 for each.
    """
    most, places = 0, 8
    while (left := num_bytes - 32 - places * 2 // 3 * 24 - places * _index_bytes(places)) > 0:
        most = max(most, min(places // 3, left // _KEY_BYTES))
        places *= 2
    return most


def _index_bytes(places: int) -> int:
    return 1 if places < 1 << 8 else 2 if places < 1 << 16 else 4


class BlockTable(Generic[V]):
    """Values by block. A value must not refer to the table, which the collector does not see where it is compiled."""

    # Not a dictionary itself: compiled modules would take it for one.
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: dict[int, V] = {}

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, block: int) -> bool:
        return block in self.held

    def __getitem__(self, block: int) -> V:
        return self.held[block]

    def __setitem__(self, block: int, value: V) -> None:
        self.held[block] = value

    def __delitem__(self, block: int) -> None:
        del self.held[block]

    def get(self, block: int, default: D | None = None) -> V | D | None:
        """The value of a block, or a default."""
        return self.held.get(block, default)

    def pop(self, block: int, *default: D) -> V | D:
        """Take a block out; its value, or a default.

        Raises:
            KeyError: when it is not there and there is no default.
        """
        return self.held.pop(block, *default)

    def values(self) -> list[V]:
        """All values."""
        return list(self.held.values())

    def items(self) -> list[tuple[int, V]]:
        """All blocks and their values."""
        return list(self.held.items())

    def clear(self) -> None:
        """Take everything out."""
        self.held.clear()


def add(shards: list[BlockTable[V]], blocks: Sequence[int], value: V, max_blocks: int) -> list[int]:
    """Give blocks that have none a value, each in the table that its last bits name; there are 2 ** n.

    Returns those left out: they have one, or their table holds `max_blocks`.
    """
    left, last = [], len(shards) - 1
    for block in blocks:
        held = shards[block & last].held
        number = len(held)
        if number >= max_blocks:
            left.append(block)
            continue
        # One look where nobody holds the block, which is the usual case.
        held.setdefault(block, value)
        if len(held) == number:
            left.append(block)
    return left


def remove(shards: list[BlockTable[V]], blocks: Sequence[int], value: V) -> list[int]:
    """Take blocks out that have this very value; return those left out."""
    left, last = [], len(shards) - 1
    for block in blocks:
        held = shards[block & last].held
        found = held.pop(block, None)
        if found is value:
            continue
        left.append(block)
        if found is not None:
            held[block] = found
    return left
