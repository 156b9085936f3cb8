"""Which engine holds which block of which prefix: hash → set of engines, kept as bits of an integer.

A match jumps: it looks at depths that are sums of falling powers of two and so finds each engine's depth after about
log2(blocks) look-ups. That is right as long as an engine's blocks are closed towards the root, which the tracker
sees to (`kv.tracker`: a block whose parent is gone is not published). Blocks forgotten here to keep the byte budget
may lie in between without harm. Clearing or dropping an engine is O(1): its bit is retired and swept out later.

Under the byte budget each shard keeps two generations; a block confirmed again, by its engine or by a match, moves to
the young one, and the old one is dropped when the young one is half the budget. Eviction costs hits, never correctness.

What an engine can load from a slower medium stands beside what its device holds, under a bit of its own: the same
entry of the same table, and nothing at all where engines have no such medium.

Not here: hashing, scoring, where events come from. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynctl.core.kv import DEVICE
from dynctl.kv.block_table import BlockTable, add, most_blocks, remove
from dynctl.kv.hashing import PrefixState, PromptBlocks
from dynctl.router.expected import ExpectedBlocks

_NUM_SHARDS = 512
_SHARD_BITS = _NUM_SHARDS - 1
_MAX_MASKS = 65_536

_WINDOW_BLOCKS = 256
_WINDOW_WEIGHT = 0.5
"""Turnover is known after about 500 blocks; a cache that is emptied at once counts as one window."""


class Source(NamedTuple):
    """Whose cache an update speaks of: one medium of one data-parallel rank of one incarnation of an engine."""

    engine_id: str
    incarnation: str
    rank: int = 0
    medium: int = DEVICE


class Tier(NamedTuple):
    """Sources, of whatever medium, that hold a prompt down to the same depth."""

    depth: int
    """Blocks."""
    bits: int
    block: int
    """Hash of the last block held."""


@dataclass(slots=True)
class _Slot:
    """A source's place in the masks."""

    bit: int
    mask: Any
    """The bit as the object that all masks of it alone share."""
    num_blocks: int = 0
    num_stored: int = 0
    """Ever; does not shrink, nor is it lost when the source begins anew with an empty cache."""
    num_fresh: int = 0
    """Stored in the present window."""
    num_gone: int = 0
    """Removed in it."""
    turnover: float = 0.0

    def stored(self, number: int) -> None:
        self.num_blocks += number
        self.num_stored += number
        self.num_fresh += number
        if self.num_fresh >= _WINDOW_BLOCKS:
            share = min(self.num_gone / self.num_fresh, 1.0)
            self.turnover += _WINDOW_WEIGHT * (share - self.turnover)
            self.num_fresh = self.num_gone = 0

    def removed(self, number: int) -> None:
        self.num_blocks -= number
        self.num_gone += number


class PrefixIndex:
    """Engines by block hash. An engine's blocks belong to one incarnation; updates of another one are refused."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        # Any: as an int, a compiled module would make each mask anew when it puts it in.
        self._young: list[BlockTable[Any]] = [BlockTable() for _ in range(_NUM_SHARDS)]
        self._old: list[BlockTable[Any]] = [BlockTable() for _ in range(_NUM_SHARDS)]
        self._has_old = False
        self._half = max(1, most_blocks(max_bytes // _NUM_SHARDS // 2))
        self._slots: dict[Source, _Slot] = {}
        self._engine_ids: dict[int, str] = {}
        """By bit, live ones only."""
        self._one_bit: dict[str, int] = {}
        """By engine, of its device: what is expected of it is not known by rank."""
        self._live = 0
        self.slower: dict[int, int] = {}
        """Bits of the sources of each slower medium; only of media that engines have."""
        self.slower_bits = 0
        """All of them."""
        self._free: list[int] = []
        self._next_bit = 1
        self._masks: dict[int, Any] = {}
        """One shared object per mask value: beyond small integers each would cost 32 bytes an entry."""
        self._retired: list[tuple[int, int]] = []
        self._sweep_at = 0
        self._expected = ExpectedBlocks()
        self.layout = 0
        """Changes whenever a bit changes its meaning."""
        self.doubts: dict[str, float] = {}
        """By engine whose cache is not well known just now: the share of it to be believed."""

    def begin(self, source: Source) -> None:
        """Start a source with no blocks; what it held before, and its rank in an older incarnation, is gone at once."""
        engine_id, incarnation, rank, medium = source
        before = self._slots.get(source)
        for other in tuple(self._slots):
            is_over = other.medium == medium or other.incarnation != incarnation
            if is_over and (other.engine_id, other.rank) == (engine_id, rank):
                self._retire(other)
        if self._free:
            bit = self._free.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        mask = self._masks.setdefault(bit, bit)
        num_stored = before.num_stored if before is not None else 0
        self._slots[source] = _Slot(bit, mask, num_stored=num_stored)
        self._engine_ids[bit] = engine_id
        if medium == DEVICE:
            self._one_bit[engine_id] = bit
        else:
            self.slower[medium] = self.slower.get(medium, 0) | bit
            self.slower_bits |= bit
        self._live |= bit
        self.layout += 1

    def believe(self, engine_id: str, trust: float) -> None:
        """Take note how far what is known of an engine is to be believed, 0 to 1."""
        if trust < 1.0:
            self.doubts[engine_id] = trust
        else:
            self.doubts.pop(engine_id, None)

    def drop(self, engine_id: str) -> None:
        """Forget an engine with all its ranks; unknown ones are no error."""
        self.doubts.pop(engine_id, None)
        for source in [s for s in self._slots if s.engine_id == engine_id]:
            self._retire(source)

    def end(self, source: Source) -> None:
        """Forget one source; an unknown one is no error."""
        if source in self._slots:
            self._retire(source)

    def _retire(self, source: Source) -> None:
        slot = self._slots.pop(source)
        self._live &= ~slot.bit
        del self._engine_ids[slot.bit]
        if source.medium != DEVICE:
            self.slower_bits &= ~slot.bit
            self.slower[source.medium] &= ~slot.bit
            if not self.slower[source.medium]:
                del self.slower[source.medium]
        elif self._one_bit.get(source.engine_id) == slot.bit:
            others = [slot.bit for slot in self._on_device(source.engine_id)]
            self._one_bit.pop(source.engine_id)
            if others:
                self._one_bit[source.engine_id] = others[0]
        # The bit is reused only after every shard was swept once from here on.
        self._retired.append((slot.bit, _NUM_SHARDS))
        self.layout += 1

    def holds(self, source: Source) -> bool:
        """Tell whether updates of this source are taken."""
        return source in self._slots

    def store(self, source: Source, hashes: Sequence[int]) -> bool:
        """Add blocks; False when the source was not begun or is over."""
        slot = self._slots.get(source)
        if slot is None:
            return False
        bit, own, live, masks = slot.bit, slot.mask, self._live, self._masks
        young, old, half = self._young, self._old, self._half
        # Nobody holds them, usually, and nothing had to be forgotten yet.
        left = hashes if self._has_old else add(young, hashes, own, half)
        added = len(hashes) - len(left)
        for block in left:
            at = block & _SHARD_BITS
            shard = young[at]
            mask = shard.get(block, 0)
            if mask is own:
                continue
            if not mask:
                if len(shard) >= half:
                    shard = self._begin_generation(at)
                mask = old[at].pop(block, 0)
            if not mask & bit:
                added += 1
            mask = (mask & live) | bit
            shard[block] = own if mask == bit else masks.setdefault(mask, mask)
        slot.stored(added)
        if len(masks) > _MAX_MASKS:
            self._masks = {}
        return True

    def remove(self, source: Source, hashes: Sequence[int]) -> bool:
        """Take blocks away from this source only; False when it was not begun or is over."""
        slot = self._slots.get(source)
        if slot is None:
            return False
        bit, keep = slot.bit, self._live & ~slot.bit
        young, old, masks = self._young, self._old, self._masks
        if len(self._expected):
            for block in hashes:
                self._expected.remove(block, bit)
        left = remove(young, hashes, slot.mask)
        num_removed = len(hashes) - len(left)
        for block in left:
            at = block & _SHARD_BITS
            shard = young[at]
            mask = shard.pop(block, 0)
            if not mask:
                shard = old[at]
                mask = shard.pop(block, 0)
            if mask & bit:
                num_removed += 1
                mask &= keep
            if mask:
                shard[block] = masks.setdefault(mask, mask)
        slot.removed(num_removed)
        return True

    def clear(self, source: Source) -> bool:
        """Empty one source's cache; False when it was not begun or is over."""
        if source not in self._slots:
            return False
        self.begin(source)
        return True

    def expect(self, engine_id: str, blocks: PromptBlocks, num_blocks: int, num_held: int) -> None:
        """Count a prompt just sent to an engine as held there until its events come, or a few seconds pass.

        So the next request with the same prefix follows it. Only every n-th depth is noted, in steps that a match
        of any other prompt looks at too. An engine without events of its own has no place here.
        """
        bit = self._one_bit.get(engine_id)
        if bit is not None and num_blocks > num_held:
            self._expected.add(bit, blocks, num_blocks, num_held)

    def unexpect(
        self, engine_id: str, blocks: PromptBlocks, num_blocks: int, num_held: int
    ) -> None:
        """Take back what `expect` noted: the engine did not take the prompt."""
        bit = self._one_bit.get(engine_id)
        if bit is not None and num_blocks > num_held:
            self._expected.withdraw(bit, blocks, num_blocks, num_held)

    def tiers(self, blocks: PromptBlocks, num_blocks: int) -> list[Tier]:
        """Group the sources by how many of a prompt's first `num_blocks` they hold without a gap; none at 0."""
        out: list[Tier] = []
        if num_blocks < 1:
            return out
        young, data, stride = self._young, blocks.data, blocks.stride_bytes
        expected = self._expected.sides() if len(self._expected) else None
        first = blocks.start(1)
        block = first.intdigest()
        bits = (self._held(block) | self._expected.mask_of(block)) & self._live
        if not bits:
            return out
        # (depth held, next step, by whom, hash state at that depth); depth 0 stands for the sure depth 1.
        todo: list[tuple[int, int, int, PrefixState | None]] = [
            (0, 1 << (num_blocks.bit_length() - 1), bits, None)
        ]
        while todo:
            depth, step, bits, state = todo.pop()
            while step:
                further = depth + step
                if further <= num_blocks:
                    if state is None:
                        known = blocks.start(further)
                    else:
                        known = state.copy()
                        known.update(data[depth * stride : further * stride])
                    block = known.intdigest()
                    mask: int | None = young[block & _SHARD_BITS].get(block)
                    if mask is None:
                        mask = self._held(block)
                    if expected is not None:
                        mask |= expected[0].get(block, 0) | expected[1].get(block, 0)
                    if deep := bits & mask:
                        if shallow := bits ^ deep:
                            todo.append((depth, step >> 1, shallow, state))
                        depth, bits, state = further, deep, known
                step >>= 1
            # Depth 1 was seen, unless the blocks there are forgotten here while deeper ones are not.
            out.append(Tier(max(depth, 1), bits, (state or first).intdigest()))
        return out

    def _held(self, block: int) -> int:
        at = block & _SHARD_BITS
        mask: Any = self._young[at].get(block)
        if mask is None:
            mask = self._old[at].pop(block, 0)
            if mask:
                # A prefix in use is worth keeping under the budget.
                young = self._young[at]
                if len(young) >= self._half:
                    young = self._begin_generation(at)
                young[block] = mask
        return int(mask)

    def _begin_generation(self, at: int) -> BlockTable[Any]:
        """Let a shard's young one grow old; what was old is forgotten."""
        self._old[at] = self._young[at]
        young: BlockTable[Any] = BlockTable()
        self._young[at] = young
        self._has_old = True
        return young

    def match(self, blocks: PromptBlocks, num_blocks: int | None = None) -> dict[str, int]:
        """Return each device's longest unbroken prefix in blocks, the best of its ranks; engines with none are left out."""
        depths: dict[str, int] = {}
        slower = self.slower_bits
        for depth, bits, _ in self.tiers(
            blocks, blocks.num_blocks if num_blocks is None else num_blocks
        ):
            for engine_id in self.engines_of(bits & ~slower):
                depths[engine_id] = max(depth, depths.get(engine_id, 0))
        return depths

    def engines_of(self, bits: int) -> list[str]:
        """Name the engines whose sources these bits are; an engine with several ranks can be there twice."""
        found = []
        while bits:
            bit = bits & -bits
            found.append(self._engine_ids[bit])
            bits ^= bit
        return found

    def sweep(self, now_s: float) -> bool:
        """Take retired bits out of one shard; True while another call is worth while. Call it from a timer."""
        self._expected.age(now_s)
        if not self._retired:
            return False
        at, live, masks = self._sweep_at, self._live, self._masks
        for side in (self._young, self._old):
            swept: BlockTable[Any] = BlockTable()
            for block, mask in side[at].items():
                if kept := mask & live:
                    swept[block] = masks.setdefault(kept, kept)
            side[at] = swept
        self._sweep_at = (at + 1) % _NUM_SHARDS
        left = [(bit, shards - 1) for bit, shards in self._retired]
        if freed := [bit for bit, shards in left if shards == 0]:
            self._expected.forget(sum(freed))
            self._free += freed
        self._retired = [(bit, shards) for bit, shards in left if shards]
        return bool(self._retired)

    def num_blocks(self, engine_id: str) -> int:
        """Blocks an engine's device was said to hold, over all its ranks (before eviction under the budget)."""
        return sum([slot.num_blocks for slot in self._on_device(engine_id)])

    def num_slower_blocks(self, engine_id: str) -> int:
        """Blocks an engine was said to be able to load from slower media."""
        own = [s for source, s in self._slots.items() if source.engine_id == engine_id]
        return sum([slot.num_blocks for slot in own]) - self.num_blocks(engine_id)

    def turnover(self, engine_id: str) -> float:
        """How much of what an engine's device stores pushes something else out: 0 while it has room, 1 once it is full."""
        found = [slot.turnover for slot in self._on_device(engine_id)]
        return sum(found) / len(found) if found else 0.0

    def num_stored(self, engine_id: str) -> int:
        """Blocks an engine itself was ever said to hold since it began or was dropped; what is only believed of it does not count."""
        told = [slot for source, slot in self._slots.items() if _is_told_by(source, engine_id)]
        return sum([slot.num_stored for slot in told])

    def is_told_of(self, engine_id: str) -> bool:
        """Tell whether anything was said of an engine's cache, if only that it is empty."""
        return any(_is_told_by(source, engine_id) for source in self._slots)

    def _on_device(self, engine_id: str) -> list[_Slot]:
        return [
            slot
            for source, slot in self._slots.items()
            if source.engine_id == engine_id and source.medium == DEVICE
        ]

    def is_published(self, engine_id: str, block: int) -> bool:
        """Tell whether the engine itself was said to hold a block; what is only expected or believed does not count."""
        at = block & _SHARD_BITS
        mask: Any = self._young[at].get(block) or self._old[at].get(block, 0)
        told = [slot for source, slot in self._slots.items() if _is_told_by(source, engine_id)]
        return any(mask & slot.bit for slot in told)

    def publishers(self, block: int) -> set[str]:
        """Name all engines of which that is so."""
        at = block & _SHARD_BITS
        mask: Any = self._young[at].get(block) or self._old[at].get(block, 0)
        if not mask:
            return set()
        slots = self._slots.items()
        return {source.engine_id for source, slot in slots if mask & slot.bit and source.rank >= 0}

    def __len__(self) -> int:
        """Distinct hashes held, including ones whose engines are retired and not yet swept."""
        return sum(map(len, self._young)) + sum(map(len, self._old))


def _is_told_by(source: Source, engine_id: str) -> bool:
    """Ranks below 0 are not the engine's own: what was sent there stands for what nobody tells."""
    return source.engine_id == engine_id and source.rank >= 0
