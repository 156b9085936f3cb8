"""Which engine holds which block of which prefix: hash → set of engines, kept as bits of an integer.

Clearing or dropping an engine is O(1): its bit is retired and swept out later, shard by shard. Under the byte budget
each shard keeps two generations; a block confirmed again moves to the young one, and the old one is dropped when
the young one is half the budget. Eviction costs hits, never correctness.

Not here: hashing, scoring, where events come from. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ENTRY_BYTES = 104
"""Of one hash: slot of the dictionary at its mean load plus the key's integer object; masks are shared.
Measured on CPython 3.11 with 10 M entries."""

_NUM_SHARDS = 64
_SHARD_BITS = _NUM_SHARDS - 1
_MAX_MASKS = 65_536


class Source(NamedTuple):
    """Whose cache an update speaks of: one data-parallel rank of one incarnation of an engine."""

    engine_id: str
    incarnation: str
    rank: int = 0


@dataclass(slots=True)
class _Slot:
    """A source's place in the masks."""

    bit: int
    num_blocks: int = 0


class PrefixIndex:
    """Engines by block hash. An engine's blocks belong to one incarnation; updates of another one are refused."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._young: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._old: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._half = max(1, max_bytes // ENTRY_BYTES // _NUM_SHARDS // 2)
        self._slots: dict[Source, _Slot] = {}
        self._engine_ids: dict[int, str] = {}
        """By bit, live ones only."""
        self._live = 0
        self._free: list[int] = []
        self._next_bit = 1
        self._masks: dict[int, int] = {}
        """One shared object per mask value: beyond small integers each would cost 32 bytes an entry."""
        self._retired: list[tuple[int, int]] = []
        self._sweep_at = 0

    def begin(self, source: Source) -> None:
        """Start a source with no blocks; what its rank held before, of whatever incarnation, is gone at once."""
        for other in [s for s in self._slots if s[::2] == source[::2]]:
            self._retire(other)
        if self._free:
            bit = self._free.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        self._slots[source] = _Slot(bit)
        self._engine_ids[bit] = source.engine_id
        self._live |= bit

    def drop(self, engine_id: str) -> None:
        """Forget an engine with all its ranks; unknown ones are no error."""
        for source in [s for s in self._slots if s.engine_id == engine_id]:
            self._retire(source)

    def _retire(self, source: Source) -> None:
        slot = self._slots.pop(source)
        self._live &= ~slot.bit
        del self._engine_ids[slot.bit]
        # The bit is reused only after every shard was swept once from here on.
        self._retired.append((slot.bit, _NUM_SHARDS))

    def holds(self, source: Source) -> bool:
        """Tell whether updates of this source are taken."""
        return source in self._slots

    def store(self, source: Source, hashes: Iterable[int]) -> bool:
        """Add blocks; False when the source was not begun or is over."""
        slot = self._slots.get(source)
        if slot is None:
            return False
        bit, live, masks = slot.bit, self._live, self._masks
        young, old, half, added = self._young, self._old, self._half, 0
        for block in hashes:
            at = block & _SHARD_BITS
            shard = young[at]
            mask = shard.get(block)
            if mask is None:
                mask = old[at].pop(block, 0)
                if len(shard) >= half:
                    old[at], shard = shard, {}
                    young[at] = shard
            if not mask & bit:
                added += 1
            mask = (mask & live) | bit
            shard[block] = masks.setdefault(mask, mask)
        slot.num_blocks += added
        if len(masks) > _MAX_MASKS:
            self._masks = {}
        return True

    def remove(self, source: Source, hashes: Iterable[int]) -> bool:
        """Take blocks away from this source only; False when it was not begun or is over."""
        slot = self._slots.get(source)
        if slot is None:
            return False
        for block in hashes:
            at = block & _SHARD_BITS
            shard = self._young[at]
            mask = shard.get(block)
            if mask is None:
                shard = self._old[at]
                mask = shard.get(block, 0)
            if not mask & slot.bit:
                continue
            slot.num_blocks -= 1
            mask &= self._live & ~slot.bit
            if mask:
                shard[block] = self._masks.setdefault(mask, mask)
            else:
                del shard[block]
        return True

    def clear(self, source: Source) -> bool:
        """Empty one source's cache; False when it was not begun or is over."""
        if source not in self._slots:
            return False
        self.begin(source)
        return True

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return each engine's longest unbroken prefix in blocks, the best of its ranks; engines with none are left out."""
        alive = self._live
        depths: dict[str, int] = {}
        young, old = self._young, self._old
        depth = 0
        for block in hashes:
            at = block & _SHARD_BITS
            mask = young[at].get(block)
            if mask is None:
                mask = old[at].get(block, 0)
            kept = alive & mask
            if kept != alive:
                if depth:
                    self._note(alive & ~kept, depth, depths)
                alive = kept
                if not alive:
                    return depths
            depth += 1
        if depth:
            self._note(alive, depth, depths)
        return depths

    def _note(self, bits: int, depth: int, depths: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            # Depths only grow during a match, so the last one noted is the best rank's.
            depths[self._engine_ids[bit]] = depth
            bits ^= bit

    def sweep(self) -> bool:
        """Take retired bits out of one shard; True while another call is worth while. Call it from a timer."""
        if not self._retired:
            return False
        at, live, masks = self._sweep_at, self._live, self._masks
        for side in (self._young, self._old):
            side[at] = {
                block: masks.setdefault(kept, kept)
                for block, mask in side[at].items()
                if (kept := mask & live)
            }
        self._sweep_at = (at + 1) % _NUM_SHARDS
        left = [(bit, shards - 1) for bit, shards in self._retired]
        self._free += [bit for bit, shards in left if shards == 0]
        self._retired = [(bit, shards) for bit, shards in left if shards]
        return bool(self._retired)

    def num_blocks(self, engine_id: str) -> int:
        """Blocks an engine was said to hold, over all its ranks (before eviction under the budget)."""
        return sum(
            s.num_blocks for source, s in self._slots.items() if source.engine_id == engine_id
        )

    def __len__(self) -> int:
        """Distinct hashes held, including ones whose engines are retired and not yet swept."""
        return sum(map(len, self._young)) + sum(map(len, self._old))
