"""Blocks that one event stored behind each other, with what it takes to hash on from any of them.

Not here: which blocks can be found, events (`tracker`). Pure.
"""

import functools
from collections.abc import Iterable, Sequence

from dynctl.kv.hashing import PrefixState

NOBODY = -1
"""No block's handle."""


class Run:
    """Blocks that one event stored, each below the one before. States between the two ends are made again when asked for."""

    __slots__ = ("_end", "_last", "_parent", "_start", "_stride", "_words", "blocks", "handles")

    def __init__(
        self,
        start: PrefixState,
        handles: Iterable[int],
        blocks: list[int],
        words: bytes,
        end: PrefixState,
        parent: int | None = None,
    ) -> None:
        """`parent` is the block before the first."""
        self.handles: list[int | None] = list(handles)
        """None where a block was removed and one behind it was not."""
        self.blocks = blocks
        """Our hashes of the same."""
        self._start = start
        self._words = words
        self._stride = len(words) // len(blocks)
        self._end = end
        self._parent = parent
        self._last = 0

    @classmethod
    def hashed(
        cls, start: PrefixState, handles: Sequence[int], words: bytes, parent: int | None
    ) -> "Run":
        """Hash the blocks that `words` are the packed tokens of; `start` is the state before them."""
        end = start.copy()
        # The loops run in C: block by block, the running hash is fed and read.
        slices = _slices(len(handles), len(words) // len(handles))
        digest = end.intdigest
        blocks = [digest() for _ in map(end.update, map(words.__getitem__, slices))]
        return cls(start, handles, blocks, words, end, parent)

    def position(self, handle: int) -> int:
        """Where a block is; asked for one after the other, that is known at once."""
        handles = self.handles
        for near in (len(handles) - 1, self._last + 1):
            if near < len(handles) and handles[near] == handle:
                break
        else:
            near = handles.index(handle)
        self._last = near
        return near

    def block_of(self, handle: int) -> int:
        """Our hash of a block."""
        return self.blocks[self.position(handle)]

    def child_of(self, handle: int) -> int | None:
        """The block behind one, if it is still held."""
        behind = self.position(handle) + 1
        return self.handles[behind] if behind < len(self.handles) else None

    def parent_of(self, handle: int) -> int | None:
        """The block before one: None before a prompt's first, `NOBODY` where it is not held any more."""
        at = self.position(handle)
        if at == 0:
            return self._parent
        above = self.handles[at - 1]
        return NOBODY if above is None else above

    def state_at(self, handle: int) -> PrefixState:
        """The running hash up to and with a block; not to be fed."""
        length = (self.position(handle) + 1) * self._stride
        if length == len(self._words):
            return self._end
        state = self._start.copy()
        state.update(self._words[:length])
        return state

    def remove(self, handle: int) -> int:
        """Take a block out; return our hash of it."""
        at = self.position(handle)
        if at == len(self.handles) - 1:
            return self.pop()
        self.handles[at] = None
        return self.blocks[at]

    def pop(self) -> int:
        """Take the last block out; return our hash of it."""
        handles, blocks = self.handles, self.blocks
        del handles[-1]
        block = blocks.pop()
        while handles and handles[-1] is None:
            del handles[-1], blocks[-1]
        return block


@functools.lru_cache(maxsize=256)
def _slices(number: int, stride: int) -> tuple[slice, ...]:
    """Where each of so many blocks lies in their words."""
    return tuple(slice(start, start + stride) for start in range(0, number * stride, stride))
