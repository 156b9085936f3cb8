"""Blocks stored behind each other, by one event or by a sequence that decodes, with what it takes to hash on from any of them.

Not here: which blocks can be found, events (`tracker`). Pure.
"""

from collections.abc import Sequence

from msgspec import structs

from dynctl.core.kv import BlockStored
from dynctl.kv.hashing import PrefixState
from dynctl.kv.running_hash import feed_blocks

MAX_GROWN_BLOCKS = 512
"""A longer run takes long to make a state between its ends again, or to find a block in that is asked for at random."""


def cut(event: BlockStored) -> list[BlockStored]:
    """Cut an event into parts that each go into one run."""
    handles, keys, size = event.block_hashes, event.extra_keys, event.block_size
    if len(handles) <= MAX_GROWN_BLOCKS:
        return [event]
    return [
        structs.replace(
            event,
            block_hashes=handles[at : at + MAX_GROWN_BLOCKS],
            parent_block_hash=handles[at - 1] if at else event.parent_block_hash,
            token_ids=event.token_ids[at * size : (at + MAX_GROWN_BLOCKS) * size],
            extra_keys=None if keys is None else keys[at : at + MAX_GROWN_BLOCKS],
        )
        for at in range(0, len(handles), MAX_GROWN_BLOCKS)
    ]


class Run:
    """Blocks each below the one before. States between the two ends are made again when asked for."""

    __slots__ = (
        "_end",
        "_holes",
        "_last",
        "_parent",
        "_start",
        "_stride",
        "_words",
        "blocks",
        "handles",
        "num_told",
    )

    def __init__(self, start: PrefixState, parent: int | None, stride: int) -> None:
        """`start` is the running hash behind `parent`, the block before the first; a block's tokens take `stride` bytes."""
        self.handles: list[int | None] = []
        """None where a block was removed and one behind it was not, …"""
        self._holes: dict[int, int] | None = None
        """… whose handles are here, by position."""
        self.blocks: list[int] = []
        """Our hashes of the same."""
        self.num_told = 0
        """So many from the first on are told of; the tracker's note."""
        self._start = start
        self._words: bytes | bytearray = b""
        self._stride = stride
        self._end = start
        self._parent = parent
        self._last = 0

    @classmethod
    def of_one(cls, state: PrefixState, handle: int, parent: int | None) -> "Run":
        """A run of one block that never grows, told of elsewhere; `state` is the running hash behind it."""
        run = cls(state, parent, 0)
        run.handles.append(handle)
        run.blocks.append(state.intdigest())
        run.num_told = 1
        return run

    def can_grow(self, handle: int, number: int, stride: int) -> bool:
        """Tell whether so many blocks of so many bytes may be put behind this one, which nothing hangs below."""
        handles = self.handles
        return (
            handles[-1] == handle
            and self._stride == stride
            and len(handles) + number <= MAX_GROWN_BLOCKS
        )

    def grow(self, handles: Sequence[int], words: bytes) -> None:
        """Put blocks behind the last one: their packed tokens."""
        length = len(self.handles) * self._stride
        end = self._state_of(length).copy()  # where others begin is not to be fed
        self.blocks += feed_blocks(end, words, self._stride)
        self.handles += handles
        self._end = end
        if length == 0:
            self._words = words
            return
        if isinstance(self._words, bytes):
            self._words = bytearray(self._words)
        self._words[length:] = words

    def position(self, handle: int) -> int:
        """Where a block is; asked for one after the other, that is known at once."""
        handles = self.handles
        for near in (len(handles) - 1, self._last, self._last + 1):
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
        """The block before one, held or not; None before a prompt's first."""
        at = self.position(handle)
        if at == 0:
            return self._parent
        above = self.handles[at - 1]
        return above if above is not None or self._holes is None else self._holes[at - 1]

    def state_at(self, handle: int) -> PrefixState:
        """The running hash up to and with a block; not to be fed."""
        return self._state_of((self.position(handle) + 1) * self._stride)

    def _state_of(self, length: int) -> PrefixState:
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
        if self._holes is None:
            self._holes = {}
        self._holes[at] = handle
        return self.blocks[at]

    def pop(self) -> int:
        """Take the last block out; return our hash of it."""
        handles, blocks = self.handles, self.blocks
        del handles[-1]
        block = blocks.pop()
        while handles and handles[-1] is None:
            del handles[-1], blocks[-1]
        self.num_told = min(self.num_told, len(blocks))
        return block
