"""What one slower medium of an engine (its host's memory, storage) holds, in our hashes: blocks that can be loaded.

vLLM's offloading connector names blocks by the handles they have on the device, without tokens unless it is told to
describe them (`self_describing_kv_events`); LMCache describes chunks of several blocks under handles of its own. So a
block's hash is taken from the device's blocks where they know its handle, and else made from the event's tokens. As
with the device, only blocks whose whole prefix is held here are published. A chunk names the blocks it begins with
again where another one holds them too, and takes them away one by one: they are counted. So are the chunks of other
lengths, under other handles, that a block is in. A medium of which nothing is ever removed is forgotten from its oldest
block on.
Not here: the device's blocks and the order of events (`tracker`). Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from dynctl.core.kv import BlockRemoved, BlockStored
from dynctl.kv.block_table import BlockTable
from dynctl.kv.hashing import BlockHasher, PrefixState, namespace, own_keys, pack_tokens
from dynctl.kv.runs import Run

MAX_BLOCKS = 524_288
"""Of one medium and rank: 1 TiB of host memory at 2 MiB a block, and about 240 MB here."""


@dataclass(slots=True)
class _Chunk:
    """What one handle stands for: a block, or several behind each other."""

    blocks: tuple[int, ...]
    """Our hashes."""
    parent: int | None
    state: PrefixState | None
    """The running hash behind it; None where the device knew the block."""
    num_tellers: int = 1
    """Events that named it and were not taken back."""
    is_published: bool = False

    @property
    def weight(self) -> int:
        """What it counts for in the bound: one that is shorter than a block takes room, too."""
        return len(self.blocks) or 1


class SlowerBlocks:
    """Blocks of one medium of one incarnation and rank."""

    def __init__(self, hasher: BlockHasher, device: BlockTable[Run]) -> None:
        """`device` holds the runs of the device's blocks by handle; it is only read."""
        self._hasher = hasher
        self._device = device
        self._chunks: dict[int, _Chunk] = {}
        """By handle, oldest first."""
        self._num_blocks = 0
        """In all chunks."""
        self._children: dict[int, int | dict[int, None]] = {}
        """Handles just below a handle, which itself may be missing: a dictionary, oldest first, only where there are
        more. Never does one hang below itself."""
        self._num_holders: dict[int, int] = {}
        """Published chunks that a block is in, by our hash."""
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._has_cleared = False
        self.num_unnamed = 0
        """Handles that nothing is known of: the device has lost the block already, and there were no tokens."""

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_changes(self) -> int:
        """Count the blocks that `take` would tell of."""
        return len(self._stored) + len(self._removed)

    def store(self, event: BlockStored) -> None:
        """Take blocks in that can be loaded from here."""
        handles = event.block_hashes
        if not handles:
            return
        # A chunk goes by its last block: is that known, the event is.
        is_news = handles[-1] not in self._chunks
        again: list[_Chunk] = []
        num_placed = self._place(event, again)
        self.num_unnamed += len(handles) - num_placed
        if is_news and num_placed == len(handles):
            # An event whose end is unknown would be news each time it comes, and taken back once.
            for chunk in again:
                chunk.num_tellers += 1
        if self._num_blocks > MAX_BLOCKS:
            self._forget_oldest()

    def remove(self, event: BlockRemoved) -> None:
        """Take blocks away; unknown ones are no error."""
        for handle in event.block_hashes:
            chunk = self._chunks.get(handle)
            if chunk is not None:
                chunk.num_tellers -= 1
                if chunk.num_tellers == 0:
                    self._drop(handle)

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._num_blocks = 0
        self._children.clear()
        self._num_holders.clear()
        self._stored.clear()
        self._removed.clear()
        self._has_cleared = True

    def take(self) -> tuple[list[int], list[int], bool]:
        """Say what has changed since this was last asked: stored, removed, and whether everything was cleared before."""
        changes = list(self._stored), list(self._removed), self._has_cleared
        self._stored, self._removed, self._has_cleared = {}, {}, False
        return changes

    def snapshot(self) -> list[int]:
        """List the hashes of all blocks published."""
        return list(self._num_holders)

    def _place(self, event: BlockStored, again: list[_Chunk]) -> int:
        """Add an event's blocks up to the first that nothing is known of; say how many, and which were here before."""
        parent: int | None = event.parent_block_hash
        handles = event.block_hashes
        words = memoryview(pack_tokens(event.token_ids))
        stride = len(words) // len(handles)
        state: PrefixState | None = None
        for i, handle in enumerate(handles):
            known = self._chunks.get(handle)
            if known is not None:
                again.append(known)
                parent, state = handle, known.state
                continue
            run = self._device.get(handle)
            if run is not None:
                above = parent if stride else run.parent_of(handle)
                chunk = _Chunk((run.block_of(handle),), above, None)
                state = None
            else:
                start = state or (self._start(event, parent) if stride else None)
                if start is None:
                    return i
                blocks, state = self._hashed(start, words[i * stride : (i + 1) * stride])
                chunk = _Chunk(blocks, parent, state)
            if self._is_above(handle, chunk.parent):
                return i
            self._add(handle, chunk)
            parent = handle
        return len(handles)

    def _is_above(self, handle: int, parent: int | None) -> bool:
        """Tell whether a block that is to be added would hang below itself: no engine means that, and walks would not end."""
        if parent != handle and handle not in self._children:
            return False
        while parent is not None and parent != handle:
            chunk = self._chunks.get(parent)
            if chunk is None or chunk.is_published:
                # Above a published one nothing is missing.
                return False
            parent = chunk.parent
        return parent is not None

    def _start(self, event: BlockStored, parent: int | None) -> PrefixState | None:
        """The running hash before a block of an event with tokens; None where it cannot be known any more."""
        if parent is None:
            keys = own_keys((event.extra_keys or (None,))[0], event.lora_name)
            return self._hasher.start(namespace(event.lora_name, keys))
        known = self._chunks.get(parent)
        if known is not None and known.state is not None:
            return known.state
        run = self._device.get(parent)
        return None if run is None else run.state_at(parent)

    def _hashed(self, start: PrefixState, words: memoryview) -> tuple[tuple[int, ...], PrefixState]:
        """Hash a chunk's tokens at the engine's block size; what is left behind its last whole block counts for none."""
        state, size, blocks = start.copy(), self._hasher.block_size * 4, []
        for at in range(0, len(words), size):
            piece = words[at : at + size]
            state.update(piece)
            if len(piece) == size:
                blocks.append(state.intdigest())
        return tuple(blocks), state

    def _add(self, handle: int, chunk: _Chunk) -> None:
        self._chunks[handle] = chunk
        self._num_blocks += chunk.weight
        parent = chunk.parent
        if parent is not None:
            known = self._children.get(parent)
            if known is None:
                self._children[parent] = handle
            elif isinstance(known, dict):
                known[handle] = None
            else:
                self._children[parent] = {known: None, handle: None}
            above = self._chunks.get(parent)
            if above is None or not above.is_published:
                return
        self._publish(handle)

    def _forget_oldest(self) -> None:
        """Make some room, from the ends of the oldest prompts up: what many prompts begin with is old, too."""
        least = MAX_BLOCKS - MAX_BLOCKS // 64
        # No more than has to go is looked at of anything, and only once: each chunk counts for one block at least.
        excess = self._num_blocks - least
        for oldest in tuple(islice(self._chunks, excess)):
            path = [oldest] if oldest in self._chunks else []
            while path:
                if self._num_blocks <= least:
                    return
                below = tuple(islice(self._below(path[-1]), excess))
                if below:
                    path += reversed(below)
                else:
                    self._drop(path.pop())

    def _drop(self, handle: int) -> None:
        chunk = self._chunks.pop(handle)
        self._num_blocks -= chunk.weight
        if chunk.parent is not None:
            self._unlink(chunk.parent, handle)
        if chunk.is_published:
            self._withdraw(chunk, handle)

    def _unlink(self, parent: int, handle: int) -> None:
        known = self._children[parent]
        if isinstance(known, dict):
            known.pop(handle, None)
            if known:
                return
        del self._children[parent]

    def _publish(self, handle: int) -> None:
        """Tell of a block and of all that hang below it without a gap."""
        ready = [handle]
        for one in ready:  # grows on the way
            chunk = self._chunks[one]
            chunk.is_published = True
            for block in chunk.blocks:
                num_holders = self._num_holders.get(block, 0)
                self._num_holders[block] = num_holders + 1
                if num_holders:
                    continue
                if block in self._removed:
                    del self._removed[block]
                else:
                    self._stored[block] = None
            ready += self._below(one)

    def _withdraw(self, chunk: _Chunk, handle: int) -> None:
        """Tell that a block is gone, and with it all below."""
        gone = [(handle, chunk)]
        for one, lost in gone:  # grows on the way
            lost.is_published = False
            for block in lost.blocks:
                num_others = self._num_holders[block] - 1
                if num_others:
                    self._num_holders[block] = num_others
                    continue
                del self._num_holders[block]
                if block in self._stored:
                    del self._stored[block]
                else:
                    self._removed[block] = None
            gone += [(below, self._chunks[below]) for below in self._below(one)]

    def _below(self, handle: int) -> Iterable[int]:
        found = self._children.get(handle)
        if found is None:
            return ()
        return found if isinstance(found, dict) else (found,)
