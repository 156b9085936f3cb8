"""What one engine incarnation (and rank) has cached, in our hashes: engine events in, deltas of numbers out.

Engine hashes are handles inside this tracker only. Only blocks whose whole prefix is held are published: when an engine
evicts a block in the middle, what hangs below it cannot be found by any request, until the block is stored again. So
the router may look at few depths of a prompt and trust the rest. Applying an event twice changes nothing (K3), a removal of an
unknown block is counted (K11), a block whose parent is unknown waits for it a few seconds, then is dropped (K11).
Slower media (the host's memory, storage) are kept apart and told apart.
Not here: what a slower medium holds (`slower`), order of batches (`sequence`), sockets, the router's index. Pure.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from dynctl.core.kv import (
    DEVICE,
    NO_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    is_of_prefix,
    medium_of,
)
from dynctl.kv.block_table import BlockTable, add
from dynctl.kv.hashing import BlockHasher, PrefixState, namespace, own_keys, pack_tokens
from dynctl.kv.orphans import Orphan, Orphans
from dynctl.kv.runs import Run, cut
from dynctl.kv.slower import SlowerBlocks


@dataclass(frozen=True, slots=True)
class Delta:
    """Net change; apply `cleared` first, then `removed`, then `stored` (parents before children)."""

    stored: list[int]
    removed: list[int]
    cleared: bool = False
    medium: int = DEVICE

    @property
    def is_empty(self) -> bool:
        """Tell whether applying it would change nothing."""
        return not (self.stored or self.removed or self.cleared)


@dataclass(slots=True)
class TrackerCounts:
    """Oddities seen so far; none of them is an error."""

    num_unknown_removed: int = 0
    num_keyed_roots: int = 0
    """First blocks with a LoRA, a cache salt or other extra keys: only requests with the same find them."""
    num_other_group: int = 0
    """Events of other groups of layers, left out."""


class BlockTracker:
    """Blocks of one incarnation and rank.

    The hasher's block size is the engine's; events that carry another are hashed at their own, since a hash does
    not depend on it.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._runs: BlockTable[Run] = BlockTable()
        """By the handle of each block held."""
        self._children: dict[int, int | set[int]] = {}
        """Handles of runs' first blocks by their parent's: a set only where there are more. May name removed ones."""
        self._cut_off: set[int] = set()
        """Held, but not published: a block above them is missing."""
        self._below_gap: dict[int, list[int]] = {}
        """By a missing block's handle: the cut-off ones just below it."""
        self.orphans = Orphans()
        self._fresh: list[Run] = []
        """Runs with blocks that are not told of yet: `take` finds them there. What is rarer than blocks stored at the end
        of a prompt, or evicted from there, is kept block by block in the next two."""
        self._num_fresh = 0
        """Blocks not told of in them."""
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._has_cleared = False
        self._slower: dict[int, SlowerBlocks] = {}
        """By medium; only those the engine has told of."""
        self._group = -2
        """The group of layers whose blocks are held here; -2: none of the device has come yet, 0 is taken of slower media."""
        self.counts = TrackerCounts()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def num_changes(self) -> int:
        """Count the blocks that `take` and `take_slower` would tell of."""
        slower = sum([blocks.num_changes for blocks in self._slower.values()])
        return self._num_fresh + len(self._stored) + len(self._removed) + slower

    @property
    def slower_media(self) -> tuple[int, ...]:
        """The media beside the device that the engine has told of."""
        return tuple(self._slower)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is held anywhere."""
        return not (self._runs or any(map(len, self._slower.values())))

    def apply(self, events: Iterable[KvEvent], now_s: float) -> Delta:
        """Take one batch's events, in order; `now_s` is a monotonic clock's."""
        self.note(events, now_s)
        return self.take()

    def note(self, events: Iterable[KvEvent], now_s: float) -> None:
        """Take one batch's events without telling of them yet: several batches' change is told as one."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event, now_s)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()
        self.orphans.drop_old(now_s)

    def take(self) -> Delta:
        """Tell what has changed on the device since this was last asked."""
        stored, removed = list(self._stored), list(self._removed)
        for run in self._fresh:
            stored += run.blocks[run.num_told :]
            run.num_told = len(run.blocks)
        if removed and (again := self._removed.keys() & stored):
            # Evicted and stored again meanwhile.
            stored = [block for block in stored if block not in again]
            removed = [block for block in removed if block not in again]
        delta = Delta(stored, removed, self._has_cleared)
        self._fresh, self._num_fresh = [], 0
        self._stored, self._removed, self._has_cleared = {}, {}, False
        return delta

    def take_slower(self) -> list[Delta]:
        """Tell what has changed in slower media since this was last asked."""
        deltas = [Delta(*blocks.take(), medium) for medium, blocks in self._slower.items()]
        return [delta for delta in deltas if not delta.is_empty]

    def reset(self) -> Delta:
        """Forget everything: a restart, or a gap nobody can fill."""
        self._clear()
        return self.take()

    def snapshot(self, medium: int = DEVICE) -> list[int]:
        """List the hashes of all blocks published of one medium."""
        if medium != DEVICE:
            return self._slower[medium].snapshot()
        cut_off = self._cut_off
        runs = {id(run): run for run in self._runs.values()}
        return [
            block
            for run in runs.values()
            for handle, block in zip(run.handles, run.blocks, strict=True)
            if handle is not None and handle not in cut_off
        ]

    def _store(self, event: BlockStored, now_s: float) -> None:
        if event.group_idx != self._group and not self._takes_group(event):
            self.counts.num_other_group += 1
            return
        # Nearly all are of the device: to call what is not compiled costs as much as the rest of a small event.
        medium = DEVICE if event.medium == "GPU" else medium_of(event.medium)
        if medium != DEVICE:
            self._medium(medium).store(event)
            return
        for part in cut(event):
            if not self._append(part):
                self._store_any(part, now_s)
            elif self.orphans:
                for orphan in self.orphans.adopt(part.block_hashes):
                    self._store_any(orphan.event, now_s, orphan.removed)

    def _takes_group(self, event: BlockStored) -> bool:
        """Decide, with the device's first event of layers that keep a whole prefix, that theirs is the group to follow."""
        group, is_known = event.group_idx, self._group >= 0
        is_on_device = medium_of(event.medium) == DEVICE
        if not is_of_prefix(event) or (is_on_device and is_known):
            return False
        if not is_on_device:
            return group == NO_GROUP or (group == 0 and not is_known)
        self._group = group
        if group:
            # What was taken in was of other layers, and its removal would not be heard.
            for slower in self._slower.values():
                slower.clear()
        return True

    def _append(self, event: BlockStored) -> bool:
        """Do what `_store_any` does, for the plain event nearly all are; False where it is none: nothing was done then.

        Plain is what is new and without keys of its own, while nothing is cut off anywhere. The whole cost of intake is here.
        """
        parent: int | None = event.parent_block_hash
        handles, runs = event.block_hashes, self._runs
        if self._cut_off or self._below_gap or not handles or any(event.extra_keys or ()):
            return False
        words = pack_tokens(event.token_ids)
        run = self._run_below(parent, event.lora_name, len(handles), len(words) // len(handles))
        if run is None:
            return False
        if add([runs], handles, run, sys.maxsize):
            # One of them is held already, or named twice.
            for handle in handles:
                if runs.get(handle) is run and handle not in run.handles:
                    del runs[handle]
            return False
        num_before = len(run.blocks)
        if run.num_told == num_before:
            self._fresh.append(run)
        self._num_fresh += len(handles)
        run.grow(handles, words)
        if parent is None:
            self.counts.num_keyed_roots += event.lora_name is not None
        elif num_before == 0:
            self._link(parent, handles[0])
        return True

    def _run_below(
        self, parent: int | None, lora_name: str | None, num_blocks: int, stride: int
    ) -> Run | None:
        """Say into which run blocks below a parent go: into its own where they continue it. None where it is not held."""
        if parent is None:
            return Run(self._hasher.start(namespace(lora_name)), None, stride)
        above = self._runs.get(parent)
        if above is None:
            return None
        if above.can_grow(parent, num_blocks, stride) and parent not in self._children:
            return above
        return Run(above.state_at(parent), parent, stride)

    def _store_any(self, event: BlockStored, now_s: float, removed: Iterable[int] = ()) -> None:
        """Add an event's blocks but those removed meanwhile, and what waited for them; or let it wait for its parent."""
        self._settle()  # parents are told of before their children
        waiting = [Orphan(event, now_s, set(removed))]
        while waiting:
            orphan = waiting.pop()
            parent = orphan.event.parent_block_hash
            if parent is not None and parent not in self._runs:
                self.orphans.keep(parent, orphan)
                continue
            waiting += self.orphans.adopt(self._extend(orphan.event, orphan.removed))

    def _extend(self, event: BlockStored, removed: set[int]) -> list[int]:
        """Add the event's blocks to their parent; returns the handles added."""
        parent = event.parent_block_hash
        keys_of = event.extra_keys or (None,) * len(event.block_hashes)
        first_keys = own_keys(keys_of[0], event.lora_name) if keys_of else ()
        if parent is None:
            name = namespace(event.lora_name, first_keys)
            self.counts.num_keyed_roots += name != b""
            state = self._hasher.start(name)
        else:
            state = self._runs[parent].state_at(parent)
        words = memoryview(pack_tokens(event.token_ids))
        stride = event.block_size * 4
        added = []
        for i, handle in enumerate(event.block_hashes):
            is_root = parent is None and i == 0
            keys = () if is_root else own_keys(keys_of[i], event.lora_name)
            state = self._hasher.extend(state, words[i * stride : (i + 1) * stride], keys)
            if handle not in removed:
                self._put(handle, state, parent if i == 0 else event.block_hashes[i - 1])
                added.append(int(handle))
        return added

    def _put(self, handle: int, state: PrefixState, parent: int | None) -> None:
        block = state.intdigest()
        before = self._runs.get(handle)
        if before is not None:
            if before.block_of(handle) == block:
                return
            # The handle was given to another prefix: the last writer wins, and what hung below it stays cut off.
            self._drop(handle)
            self._below_gap.pop(handle, None)
        self._runs[handle] = Run.of_one(state, handle, parent)
        below = self._close_gap(handle)
        if parent is not None:
            if parent not in self._runs:
                self._open_gap(parent, [handle])
                self._cut_off.add(handle)
                return
            self._link(parent, handle)
            if parent in self._cut_off:
                self._cut_off.add(handle)
                return
        self._publish(block)
        for child in self._subtree(below):
            self._cut_off.discard(child)
            self._publish(self._runs[child].block_of(child))

    def _publish(self, block: int) -> None:
        if block in self._removed:
            del self._removed[block]
        else:
            self._stored[block] = None

    def _withdraw(self, block: int) -> None:
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def _settle(self) -> None:
        """Keep block by block what is not told of yet."""
        for run in self._fresh:
            for block in run.blocks[run.num_told :]:
                self._publish(block)
            run.num_told = len(run.blocks)
        self._fresh, self._num_fresh = [], 0

    def _drop(self, handle: int) -> None:
        self._settle()
        below = [child for child in self._living(handle) if child != handle]
        self._children.pop(handle, None)
        block = self._runs.pop(handle).remove(handle)
        was_cut_off = handle in self._cut_off
        if was_cut_off:
            self._cut_off.discard(handle)
        else:
            self._withdraw(block)
        if below:
            self._open_gap(handle, below)
            if was_cut_off:
                # And with it, all below: a prompt evicted from its beginning is walked once, not at every block.
                return
            for child in self._subtree(below):
                if child not in self._cut_off:
                    self._cut_off.add(child)
                    self._withdraw(self._runs[child].block_of(child))

    def _link(self, parent: int, handle: int) -> None:
        known = self._children.get(parent)
        if known is None or known == handle:
            self._children[parent] = handle
        elif isinstance(known, set):
            known.add(handle)
            if len(known) >= 16 and len(known) & (len(known) - 1) == 0:
                # Removed ones are cleared away now and then, so that a system prompt's children do not pile up.
                self._children[parent] = {child for child in known if child in self._runs}
        else:
            self._children[parent] = {known, handle}

    def _living(self, handle: int) -> list[int]:
        """List what is held just below a block."""
        child = self._runs[handle].child_of(handle)
        found = [] if child is None else [child]
        known = self._children.get(handle)
        if known is not None:
            linked = known if isinstance(known, set) else (known,)
            found += [child for child in linked if self._hangs_below(handle, child)]
        return found

    def _hangs_below(self, handle: int, child: int) -> bool:
        """Tell whether a block is held, and not under another parent since it was linked to this one."""
        run = self._runs.get(child)
        return run is not None and run.parent_of(child) == handle

    def _subtree(self, handles: Iterable[int]) -> list[int]:
        """List blocks and all that is held below them, parents first; each once, whatever parents events have named."""
        found = dict.fromkeys(handles)
        todo = list(found)
        for handle in todo:  # grows on the way
            below = [child for child in self._living(handle) if child not in found]
            found.update(dict.fromkeys(below))
            todo += below
        return todo

    def _open_gap(self, handle: int, below: list[int]) -> None:
        gaps = self._below_gap
        gaps.setdefault(handle, []).extend(below)
        if len(gaps) >= 1024 and len(gaps) & (len(gaps) - 1) == 0:
            # Gaps with nothing left below them are never closed.
            living = self._runs
            self._below_gap = {gap: b for gap, b in gaps.items() if any(c in living for c in b)}

    def _close_gap(self, handle: int) -> list[int]:
        """Hang what a gap had cut off below its block again; return it."""
        cut_off = self._below_gap.pop(handle, ())
        below = [child for child in cut_off if self._hangs_below(handle, child)]
        for child in below:
            self._link(handle, child)
        return below

    def _remove(self, event: BlockRemoved) -> None:
        group = event.group_idx
        medium = DEVICE if event.medium == "GPU" else medium_of(event.medium)
        is_named = medium == DEVICE or group != NO_GROUP
        if is_named and group != self._group and (group or self._group > 0):
            self.counts.num_other_group += 1
            return
        if medium != DEVICE:
            self._medium(medium).remove(event)
            return
        runs, children = self._runs, self._children
        for handle in event.block_hashes:
            run = runs.pop(handle, None)
            if run is None:
                if not self.orphans.remove(handle):
                    self.counts.num_unknown_removed += 1
            elif (
                run.handles[-1] != handle
                or self._cut_off
                or (handle in children and not self._is_leaf(handle))
            ):
                runs[handle] = run
                self._drop(handle)
            else:
                # Engines evict from the tail.
                is_told = run.num_told == len(run.blocks)
                block = run.pop()
                if is_told:
                    self._withdraw(block)
                else:
                    self._num_fresh -= 1

    def _is_leaf(self, handle: int) -> bool:
        """Tell whether nothing is held any more of what hung below the last block of a run."""
        linked = self._children[handle]
        children = linked if isinstance(linked, set) else (linked,)
        if any(self._hangs_below(handle, child) for child in children):
            return False
        del self._children[handle]
        return True

    def _medium(self, medium: int) -> SlowerBlocks:
        if medium not in self._slower:
            self._slower[medium] = SlowerBlocks(self._hasher, self._runs)
        return self._slower[medium]

    def _clear(self) -> None:
        for slower in self._slower.values():
            slower.clear()
        self._runs.clear()
        self._children.clear()
        self._cut_off.clear()
        self._below_gap.clear()
        self.orphans.clear()
        self._fresh.clear()
        self._num_fresh = 0
        self._stored.clear()
        self._removed.clear()
        self._has_cleared = True
