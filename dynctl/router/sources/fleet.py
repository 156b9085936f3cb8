"""Keeps table, index and routes in step as engines come, change and go.

Not here: how that is learned. IO: none of its own; routes hold connection pools.
"""

import logging
from collections.abc import Callable

from dynctl.core.deployment import EngineInfo
from dynctl.core.text import clean
from dynctl.kv.wire import SourceHealth
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.probes import EngineNotes
from dynctl.router.sources.route import Route
from dynctl.router.worker_table import WorkerTable

log = logging.getLogger("dynctl.router")


class Fleet:
    """All engines the sources know of."""

    def __init__(
        self,
        workers: WorkerTable,
        index: PrefixIndex,
        metrics: Metrics,
        on_change: Callable[[], None],
        notes: dict[str, EngineNotes] | None = None,
    ) -> None:
        """`notes` is where sources leave what they notice about an engine."""
        self._notes = {} if notes is None else notes
        self.workers = workers
        self.index = index
        self.metrics = metrics
        self.routes: dict[str, Route] = {}
        self.reading: set[str] = set()
        """Engines whose snapshot is not whole yet."""
        self.silent: dict[str, str] = {}
        """Sources that do not answer, with why."""
        self._on_change = on_change
        self._owners: dict[str, str] = {}

    def saw(self, source: str, info: EngineInfo, route: Route) -> bool:
        """Take an engine's facts; True when this incarnation is new. An id belongs to the source that named it first."""
        owner = self._owners.setdefault(info.id, source)
        if owner != source:
            log.warning(
                "engine %s: named by %s and by %s; the second is ignored",
                clean(info.id),
                clean(owner),
                clean(source),
            )
            return False
        is_new = self.workers.put(info)
        if is_new:
            # Blocks of an older start are void before anything can be routed by them.
            self.index.drop(info.id)
            self._notes.pop(info.id, None)
            log.info(
                "engine %s (%s): %s, %s, block size %d",
                clean(info.id),
                clean(info.incarnation),
                clean(info.role),
                info.state,
                info.block_size_tokens,
            )
        self.routes[info.id] = route
        self.workers.set_reachable(info.id, is_reachable=True)
        self._on_change()
        return is_new

    def owns(self, source: str, engine_id: str) -> bool:
        """Tell whether an engine is this source's: what others say of it counts for nothing (K12)."""
        return self._owners.get(engine_id) == source

    def heard(self, engine_id: str, incarnation: str, health: SourceHealth) -> None:
        """Note how well the cache of one incarnation is known."""
        worker = self.workers.get(engine_id)
        if worker is None or worker.incarnation != incarnation:
            return
        self.index.believe(engine_id, health.trust)
        notes = self.notes_of(engine_id)
        notes.has_events_source = True
        worker.is_told = not notes.is_silent
        notes.was_connected = health.was_connected
        notes.num_undecodable = health.num_unreadable
        notes.num_keyed = health.num_keyed
        notes.other_topic = health.other_topic
        notes.num_other_ranks = health.num_other_ranks
        notes.num_other_groups = health.num_other_groups
        if notes.lost_before is None:
            notes.lost_before = health.num_lost
        elif health.num_lost < notes.lost_before:
            notes.lost_before = 0  # who reads them anew counts anew
        notes.num_lost = health.num_lost - notes.lost_before
        notes.num_orphans = health.num_orphans

    def untold(self, engine_id: str, incarnation: str) -> None:
        """Note that nobody tells what one incarnation caches: what it is sent has to stand for that."""
        worker = self.workers.get(engine_id)
        if worker is not None and worker.incarnation == incarnation:
            worker.is_told = False
            self.notes_of(engine_id).has_events_source = False

    def notes_of(self, engine_id: str) -> EngineNotes:
        """What was noticed about an engine so far; to be written to."""
        return self._notes.setdefault(engine_id, EngineNotes())

    def lost(self, source: str, engine_id: str) -> None:
        """Forget an engine that its source no longer names."""
        if self._owners.get(engine_id) != source:
            return
        del self._owners[engine_id]
        self.workers.remove(engine_id)
        self.index.drop(engine_id)
        self.routes.pop(engine_id, None)
        self._notes.pop(engine_id, None)
        self.reading.discard(engine_id)
        log.info("engine %s is gone", clean(engine_id))
        self._on_change()

    def unreachable(self, engine_id: str) -> None:
        """Note that the way to an engine does not work; its blocks and books stay."""
        self.workers.set_reachable(engine_id, is_reachable=False)
        self._on_change()

    def learn_block_size(self, engine_id: str, incarnation: str, block_size: int) -> None:
        """Take the block size from an engine's events where nobody else has said it."""
        worker = self.workers.get(engine_id)
        if worker is not None and worker.incarnation == incarnation and not worker.block_size:
            worker.block_size = block_size

    def set_parity(self, engine_id: str, incarnation: str, parity: str, detail: str = "") -> None:
        """Note how the tokenizer check of one incarnation ended, and where the two differ."""
        worker = self.workers.get(engine_id)
        if worker is not None and worker.incarnation == incarnation:
            worker.parity = parity
            self.notes_of(engine_id).parity_detail = detail
