"""What one engine incarnation (and rank) has cached, in our hashes: engine events in, deltas of numbers out.

Engine hashes are handles inside this tracker only. Applying an event twice changes nothing (K3), a removal of an
unknown block is counted (K11), a block whose parent is unknown waits for it a few seconds, then is dropped (K11).
Not here: order of batches (`sequence`), sockets, the router's index. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from dynctl.kv.hashing import BlockHasher, PrefixState, namespace, pack_tokens

ORPHAN_AGE_S = 5.0
MAX_ORPHANS = 1024
_DEVICE = ("GPU", None)
"""vLLM says GPU for the device's cache, also on a CPU machine; CPU, STORAGE and others are slower tiers."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Net change; apply `cleared` first, then `removed`, then `stored` (parents before children)."""

    stored: list[int]
    removed: list[int]
    cleared: bool = False

    @property
    def is_empty(self) -> bool:
        """Tell whether applying it would change nothing."""
        return not (self.stored or self.removed or self.cleared)


@dataclass(slots=True)
class TrackerCounts:
    """Oddities seen so far; none of them is an error."""

    num_unknown_removed: int = 0
    num_orphans_dropped: int = 0
    num_other_tier: int = 0
    """Events of slower tiers or of other groups of layers, left out."""


@dataclass(slots=True)
class _Orphan:
    event: BlockStored
    since_s: float
    removed: set[int] = field(default_factory=set)


class BlockTracker:
    """Blocks of one incarnation and rank.

    The hasher's block size is the engine's; events that carry another are hashed at their own, since a hash does
    not depend on it.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._states: dict[int, PrefixState] = {}
        self._orphans: OrderedDict[int, list[_Orphan]] = OrderedDict()
        self._num_orphans = 0
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._has_cleared = False
        self.counts = TrackerCounts()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_orphans(self) -> int:
        """Count the events that wait for their parent."""
        return self._num_orphans

    def apply(self, events: Iterable[KvEvent], now_s: float) -> Delta:
        """Take one batch's events, in order; `now_s` is a monotonic clock's."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event, now_s)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()
        self._drop_old_orphans(now_s)
        return self._take_delta()

    def reset(self) -> Delta:
        """Forget everything: a restart, or a gap nobody can fill."""
        self._clear()
        return self._take_delta()

    def snapshot(self) -> list[int]:
        """List the hashes of all blocks held, parents before children as they were stored."""
        return [state.intdigest() for state in self._states.values()]

    def _store(self, event: BlockStored, now_s: float) -> None:
        if event.medium not in _DEVICE or event.group_idx != 0:
            self.counts.num_other_tier += 1
            return
        waiting = [_Orphan(event, now_s)]
        while waiting:
            orphan = waiting.pop()
            parent = orphan.event.parent_block_hash
            if parent is not None and parent not in self._states:
                self._keep_orphan(parent, orphan)
                continue
            for handle in self._extend(orphan.event, orphan.removed):
                waiting += self._adopt(handle)

    def _extend(self, event: BlockStored, removed: set[int]) -> list[int]:
        """Add the event's blocks to their parent; returns the handles added."""
        parent = event.parent_block_hash
        keys_of = event.extra_keys or (None,) * len(event.block_hashes)
        first_keys = _own_keys(keys_of[0], event.lora_name) if keys_of else ()
        if parent is None:
            state = self._hasher.start(namespace(event.lora_name, first_keys))
        else:
            state = self._states[parent]
        words = memoryview(pack_tokens(event.token_ids))
        stride = event.block_size * 4
        added = []
        for i, handle in enumerate(event.block_hashes):
            is_root = parent is None and i == 0
            keys = () if is_root else _own_keys(keys_of[i], event.lora_name)
            state = self._hasher.extend(state, words[i * stride : (i + 1) * stride], keys)
            if handle not in removed:
                self._put(handle, state)
                added.append(int(handle))
        return added

    def _put(self, handle: int, state: PrefixState) -> None:
        block = state.intdigest()
        before = self._states.get(handle)
        if before is not None:
            if before.intdigest() == block:
                return
            self._drop(handle)  # the handle was given to another prefix: the last writer wins
        self._states[handle] = state
        if block in self._removed:
            del self._removed[block]
        else:
            self._stored[block] = None

    def _drop(self, handle: int) -> None:
        block = self._states.pop(handle).intdigest()
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _DEVICE or event.group_idx != 0:
            self.counts.num_other_tier += 1
            return
        for handle in event.block_hashes:
            if handle in self._states:
                self._drop(handle)
            elif not self._remove_from_orphans(handle):
                self.counts.num_unknown_removed += 1

    def _clear(self) -> None:
        self._states.clear()
        self._orphans.clear()
        self._num_orphans = 0
        self._stored.clear()
        self._removed.clear()
        self._has_cleared = True

    def _keep_orphan(self, parent: int, orphan: _Orphan) -> None:
        self._orphans.setdefault(parent, []).append(orphan)
        self._num_orphans += 1
        if self._num_orphans > MAX_ORPHANS:
            self._drop_orphans(next(iter(self._orphans)))

    def _adopt(self, parent: int) -> list[_Orphan]:
        orphans = self._orphans.pop(parent, [])
        self._num_orphans -= len(orphans)
        return orphans

    def _remove_from_orphans(self, handle: int) -> bool:
        found = False
        for orphans in self._orphans.values():
            for orphan in orphans:
                if handle in orphan.event.block_hashes:
                    orphan.removed.add(handle)
                    found = True
        return found

    def _drop_old_orphans(self, now_s: float) -> None:
        # Parents are in order of their first orphan, so the oldest are in front.
        while self._orphans:
            parent, orphans = next(iter(self._orphans.items()))
            if now_s - orphans[0].since_s <= ORPHAN_AGE_S:
                return
            self._drop_orphans(parent)

    def _drop_orphans(self, parent: int) -> None:
        self.counts.num_orphans_dropped += len(self._adopt(parent))

    def _take_delta(self) -> Delta:
        delta = Delta(list(self._stored), list(self._removed), self._has_cleared)
        self._stored, self._removed, self._has_cleared = {}, {}, False
        return delta


def _own_keys(keys: object, lora_name: str | None) -> tuple[object, ...]:
    """Take a block's extra keys without the LoRA's name, which the namespace holds already."""
    if not isinstance(keys, list | tuple):
        return ()
    return tuple(key for key in keys if lora_name is None or key != lora_name)
