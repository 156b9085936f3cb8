"""Blocks the engine keeps in its host's memory beside the device: written when they are computed, loaded when asked for.

As vLLM's offloading connector does it: what is full is copied at once, the least recently asked for go first, tails before
beginnings. Events name blocks only, or describe them whole where that is asked for (`self_describing_kv_events`).
Not here: the device's blocks (`cache`), how long a load takes (`scheduler`). Pure.
"""

from collections import OrderedDict
from collections.abc import Sequence

from dynctl.core.kv import BlockRemoved, BlockStored, EngineBlockHash, KvEvent
from dynctl.sim.cache import FullBlock
from dynctl.sim.options import SimOptions

MEDIUM = "CPU"


class HostCache:
    """At most `num_blocks` blocks of `block_size` tokens. `take_events` returns what happened, in order."""

    def __init__(self, num_blocks: int, block_size: int, *, is_self_describing: bool) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._is_self_describing = is_self_describing
        self._states: OrderedDict[int, int] = OrderedDict()
        """The chain behind each block, by its hash; the one asked for longest ago first."""
        self._events: list[KvEvent] = []

    @classmethod
    def of(cls, options: SimOptions) -> "HostCache | None":
        """Make the one an engine is to have, if any."""
        if not options.host_blocks:
            return None
        is_self_describing = options.self_describing_kv_events > 0
        return cls(options.host_blocks, options.block_size, is_self_describing=is_self_describing)

    def __len__(self) -> int:
        return len(self._states)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return the states of the longest prefix of these blocks that is here."""
        found = []
        for name in hashes:
            state = self._states.get(name)
            if state is None:
                break
            found.append(state)
        return found

    def touch(self, hashes: Sequence[int]) -> None:
        """Note that a prompt of these blocks was asked for."""
        for name in reversed(hashes):
            if name in self._states:
                self._states.move_to_end(name)

    def store(self, full: Sequence[FullBlock], parent: int | None, lora_name: str | None) -> None:
        """Copy blocks that one sequence has computed; those that are here already stay."""
        new = [block for block in full if block.hash not in self._states]
        gone = []
        while new and len(self._states) + len(new) > self._num_blocks and self._states:
            gone.append(self._states.popitem(last=False)[0])
        if gone:
            self._events.append(BlockRemoved(tuple(map(EngineBlockHash, gone)), MEDIUM))
        names = [block.hash for block in full]
        for block in new[: self._num_blocks]:
            self._states[block.hash] = block.state
            at = names.index(block.hash)
            self._events.append(self._stored(block, names[at - 1] if at else parent, lora_name))

    def clear(self) -> None:
        """Forget everything; the connector says nothing of that."""
        self._states.clear()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the events since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def _stored(self, block: FullBlock, parent: int | None, lora_name: str | None) -> BlockStored:
        handles = (EngineBlockHash(block.hash),)
        if not self._is_self_describing:
            return BlockStored(handles, None, (), 0, medium=MEDIUM)
        above = None if parent is None else EngineBlockHash(parent)
        return BlockStored(
            handles, above, block.token_ids, self._block_size, lora_name, medium=MEDIUM
        )
