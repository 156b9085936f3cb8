"""A paged prefix cache as vLLM keeps it: reference counts, least-recently-used eviction, one event per change.

Block 0 is never used, as in vLLM, so `num_blocks` blocks hold `num_blocks - 1` blocks of tokens. A block is free
(nobody uses it) or in use; a free block keeps its content until it is needed for another. Each holds the chain's
state after its last token, which stands for the KV itself.
Not here: requests, time. Pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored, EngineBlockHash, KvEvent

ROOT_HASH = xxhash.xxh3_64_intdigest(b"dynctl-sim-none-hash")
"""Parent of first blocks; a constant, so that engines give equal hashes to equal content, as vLLM's sha256 does."""

MEDIUM = "GPU"
"""What vLLM says for the device's own cache on every platform."""


def block_hash(parent: int, token_ids: Sequence[int], extra_keys: Sequence[object] | None) -> int:
    """Name a block by its content and everything before it; unsigned 64 bits."""
    data = parent.to_bytes(8, "big") + array("I", token_ids).tobytes()
    if extra_keys:
        data += msgspec.msgpack.encode(list(extra_keys))
    return xxhash.xxh3_64_intdigest(data)


@dataclass(slots=True)
class _Block:
    num_users: int = 0
    hash: int | None = None
    state: int = 0


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block whose tokens are all computed, ready to be found by others."""

    id: int
    hash: int
    state: int
    """The chain after its last token."""
    token_ids: tuple[int, ...]
    extra_keys: tuple[object, ...] | None = None


class PagedCache:
    """Blocks of `block_size` tokens. `events` collects what happened, in order, until taken."""

    def __init__(self, num_blocks: int, block_size: int, *, is_caching: bool = True) -> None:
        """Without caching no block is ever found again, and no event is made."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = is_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._by_hash: dict[int, int] = {}
        self._events: list[KvEvent] = []

    @property
    def num_free(self) -> int:
        """Count the blocks nobody uses now; their contents may still be found."""
        return len(self._free)

    @property
    def usage_ratio(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / (self.num_blocks - 1)

    @property
    def num_cached(self) -> int:
        """Count the blocks that can be found by their hash."""
        return len(self._by_hash)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return the block ids of the longest cached prefix of these hashes; changes nothing."""
        found = []
        for name in hashes:
            block_id = self._by_hash.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def state_of(self, block_id: int) -> int:
        """Return the chain's state after a block's last token."""
        return self._blocks[block_id].state

    def can_take(self, found: Sequence[int], num_new: int) -> bool:
        """Tell whether `take` would succeed: found blocks that are free now count against the free ones."""
        num_free_found = sum(1 for block_id in found if block_id in self._free)
        return num_new <= len(self._free) - num_free_found

    def take(self, found: Sequence[int], num_new: int) -> list[int]:
        """Use found blocks and `num_new` empty ones, evicting least recently used contents; returns all ids."""
        assert self.can_take(found, num_new)
        for block_id in found:
            self._blocks[block_id].num_users += 1
            self._free.pop(block_id, None)
        return [*found, *(self._take_empty() for _ in range(num_new))]

    def release(self, block_ids: Sequence[int]) -> None:
        """Stop using a sequence's blocks; its tail is evicted before its beginning."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.num_users > 0
            block.num_users -= 1
            if block.num_users == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(
                        block_id, last=False
                    )  # nothing to keep: used again first

    def commit(
        self, full: Sequence[FullBlock], parent: int | None, lora_name: str | None = None
    ) -> None:
        """Let full blocks of one sequence be found; consecutive new ones make one event."""
        if not self._is_caching:
            return
        run: list[FullBlock] = []
        run_parent = parent
        for block in full:
            if block.hash in self._by_hash:
                self._note_stored(run, run_parent, lora_name)
                run, run_parent = [], block.hash
                continue
            held = self._blocks[block.id]
            held.hash, held.state = block.hash, block.state
            self._by_hash[block.hash] = block.id
            run.append(block)
        self._note_stored(run, run_parent, lora_name)

    def clear(self, *, is_told: bool = True) -> bool:
        """Forget all contents if no block is in use, with or without an event; tells whether it did."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for block_id in self._by_hash.values():
            self._blocks[block_id].hash = None
        self._by_hash.clear()
        if is_told:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the events since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def _take_empty(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.hash is not None:
            del self._by_hash[block.hash]
            self._events.append(BlockRemoved((EngineBlockHash(block.hash),), MEDIUM))
        block.num_users, block.hash = 1, None
        return block_id

    def _note_stored(
        self, run: Sequence[FullBlock], parent: int | None, lora_name: str | None
    ) -> None:
        if not run:
            return
        self._events.append(
            BlockStored(
                tuple(EngineBlockHash(block.hash) for block in run),
                None if parent is None else EngineBlockHash(parent),
                tuple(token for block in run for token in block.token_ids),
                self.block_size,
                lora_name,
                tuple(None if b.extra_keys is None else list(b.extra_keys) for b in run),
                MEDIUM,
                spec_kind="full_attention",
            )
        )
