"""Blocks that were stored below a block nobody has heard of: they wait for it a few seconds (K11).

Not here: what blocks are held (`tracker`). Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from dynctl.core.kv import BlockStored

ORPHAN_AGE_S = 5.0
MAX_ORPHANS = 1024


@dataclass(slots=True, eq=False)
class Orphan:
    """An event that waits, since when, and which of its blocks were removed meanwhile."""

    event: BlockStored
    since_s: float
    removed: set[int]


class Orphans:
    """Events by the handle of the parent they wait for."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, list[Orphan]] = OrderedDict()
        """In order of each parent's first orphan."""
        self._naming: dict[int, list[Orphan]] = {}
        """The same by the handle of each block in them: most removals of what nobody knows are of none."""
        self._number = 0
        self.num_dropped = 0
        """Given up because their parent did not come, or too many waited."""

    def __len__(self) -> int:
        return self._number

    def keep(self, parent: int, orphan: Orphan) -> None:
        """Let an event wait; the oldest give way."""
        self._waiting.setdefault(parent, []).append(orphan)
        for handle in set(orphan.event.block_hashes):
            self._naming.setdefault(handle, []).append(orphan)
        self._number += 1
        if self._number > MAX_ORPHANS:
            self._drop(next(iter(self._waiting)))

    def adopt(self, parents: Iterable[int]) -> list[Orphan]:
        """Take the events out that waited for one of these blocks."""
        adopted: list[Orphan] = []
        for parent in parents:
            adopted += self._waiting.pop(parent, ())
        for orphan in adopted:
            for handle in set(orphan.event.block_hashes):
                naming = self._naming[handle]
                naming.remove(orphan)
                if not naming:
                    del self._naming[handle]
        self._number -= len(adopted)
        return adopted

    def remove(self, handle: int) -> bool:
        """Take a block out of the events that wait; False when it is in none."""
        naming = self._naming.get(handle, ())
        for orphan in naming:
            orphan.removed.add(handle)
        return bool(naming)

    def drop_old(self, now_s: float) -> None:
        """Give up those that have waited long enough."""
        while self._waiting:
            parent, orphans = next(iter(self._waiting.items()))
            if now_s - orphans[0].since_s <= ORPHAN_AGE_S:
                return
            self._drop(parent)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._naming.clear()
        self._number = 0

    def _drop(self, parent: int) -> None:
        self.num_dropped += len(self.adopt([parent]))
