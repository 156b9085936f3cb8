"""Which engine holds which block of which prefix: hash → set of engines, kept as bits of an integer.

Clearing or dropping an engine is O(1): its bit is retired and swept out later, shard by shard. Under the byte budget
each shard keeps two generations; a block confirmed again moves to the young one, and the old one is dropped when
the young one is half the budget. Eviction costs hits, never correctness.

Not here: hashing, scoring, where events come from. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ENTRY_BYTES = 104
"""Of one hash: slot of the dictionary at its mean load plus the key's integer object; masks are shared.
Measured on CPython 3.11 with 10 M entries."""

_NUM_SHARDS = 64
_SHARD_BITS = _NUM_SHARDS - 1


@dataclass(slots=True)
class _Slot:
    """An engine's place in the masks."""

    incarnation: str
    bit: int
    num_blocks: int = 0


class PrefixIndex:
    """Engines by block hash. An engine's blocks belong to one incarnation; updates of another one are refused."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._young: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._old: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._half = max(1, max_bytes // ENTRY_BYTES // _NUM_SHARDS // 2)
        self._slots: dict[str, _Slot] = {}
        self._ids: dict[int, str] = {}
        self._live = 0
        self._free: list[int] = []
        self._next_bit = 1
        self._masks: dict[int, int] = {}
        self._retired: list[tuple[int, int]] = []
        self._sweep_at = 0

    def begin(self, engine_id: str, incarnation: str) -> None:
        """Start an engine's incarnation with no blocks; whatever it held before is gone at once."""
        self.drop(engine_id)
        bit = self._free.pop() if self._free else self._next_bit
        if bit == self._next_bit:
            self._next_bit <<= 1
        self._slots[engine_id] = _Slot(incarnation, bit)
        self._ids[bit] = engine_id
        self._live |= bit

    def drop(self, engine_id: str) -> None:
        """Forget an engine; unknown ones are no error."""
        slot = self._slots.pop(engine_id, None)
        if slot is None:
            return
        self._live &= ~slot.bit
        del self._ids[slot.bit]
        # The bit is reused only after every shard was swept once from here on.
        self._retired.append((slot.bit, _NUM_SHARDS))

    def holds(self, engine_id: str, incarnation: str) -> bool:
        """Tell whether updates of this incarnation are taken."""
        slot = self._slots.get(engine_id)
        return slot is not None and slot.incarnation == incarnation

    def store(self, engine_id: str, incarnation: str, hashes: Iterable[int]) -> bool:
        """Add blocks; False when the incarnation is not the present one."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.incarnation != incarnation:
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
        if len(masks) > 65_536:
            self._masks = {}
        return True

    def remove(self, engine_id: str, incarnation: str, hashes: Iterable[int]) -> bool:
        """Take blocks away from one engine only; False when the incarnation is not the present one."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.incarnation != incarnation:
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

    def clear(self, engine_id: str, incarnation: str) -> bool:
        """Empty one engine's cache; False when the incarnation is not the present one."""
        if not self.holds(engine_id, incarnation):
            return False
        self.begin(engine_id, incarnation)
        return True

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return each engine's longest unbroken prefix in blocks; engines with none are left out."""
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
            depths[self._ids[bit]] = depth
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
        """Blocks an engine was said to hold (before eviction under the budget)."""
        slot = self._slots.get(engine_id)
        return 0 if slot is None else slot.num_blocks

    def __len__(self) -> int:
        """Distinct hashes held, including ones whose engines are retired and not yet swept."""
        return sum(map(len, self._young)) + sum(map(len, self._old))
