"""KV events of one engine without a relay: a reader for each of its data-parallel ranks, and their way into the index.

Not here: when reading begins and ends, where a rank publishes (`kv.ranks`). IO: zmq.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from dynctl.core.deployment import EngineInfo
from dynctl.core.kv import device_block_size
from dynctl.core.text import clean
from dynctl.kv.events import EventBatch
from dynctl.kv.intake import Intake
from dynctl.kv.ranks import RankOrder
from dynctl.kv.reader import EventSink, KvEventReader, trust_text
from dynctl.kv.tracker import BlockTracker, Delta, TrackerCounts
from dynctl.kv.wire import SourceHealth
from dynctl.router.config import EngineTarget
from dynctl.router.prefix_index import Source
from dynctl.router.prompt import Hashers
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.split import worker_ids

log = logging.getLogger("dynctl.router")

_RETRY_EVENTS_S = 30.0
"""After which events that were given up are read anew."""


class EngineEvents:
    """The events of one incarnation, of all its ranks; `start` on a running loop, `close` when done."""

    def __init__(
        self,
        target: EngineTarget,
        fleet: Fleet,
        hashers: Hashers,
        info: EngineInfo,
        context: "zmq.Context[zmq.Socket[bytes]]",
        intake: Intake | None = None,
    ) -> None:
        self.fleet = fleet
        self.hashers = hashers
        self.info = info
        self.order = RankOrder()
        self.names = worker_ids(info.id, target.ranks)
        self._ranks = [
            _RankEvents(
                self,
                position,
                partial(KvEventReader, *places, target.topic, context=context, intake=intake),
            )
            for position, places in enumerate(target.event_places)
        ]

    def start(self) -> None:
        """Subscribe to all ranks.

        Raises:
            EngineError: when an endpoint makes no sense.
        """
        for rank in self._ranks:
            rank.start()

    def start_again(self) -> None:
        """Subscribe anew to ranks whose events were given up long enough ago.

        Raises:
            EngineError: when an endpoint makes no sense.
        """
        for rank in self._ranks:
            if rank.is_to_be_read_anew():
                rank.start()

    def close(self) -> None:
        """Stop reading; safe to call twice."""
        for rank in self._ranks:
            rank.close()

    def healths(self) -> dict[str, SourceHealth]:
        """How well each cache is known, by worker."""
        return {name: rank.health for name, rank in zip(self.names, self._ranks, strict=True)}

    def empty(self) -> bool:
        """Forget what the engine has dropped without a word; False when nothing was known of it."""
        if all(rank.is_empty for rank in self._ranks):
            return False
        for rank in self._ranks:
            rank.on_reset()
        return True


class _RankEvents:
    """Hashes one rank's events into the index: those read together in one go."""

    def __init__(
        self, engine: EngineEvents, position: int, reading: Callable[[EventSink], KvEventReader]
    ) -> None:
        self._engine = engine
        self._fleet = engine.fleet
        self._info = engine.info
        self._position = position
        self._name = engine.names[position]
        self._source = Source(self._name, engine.info.incarnation)
        self._reading = reading
        self._reader = reading(self)
        self._tracker: BlockTracker | None = None
        self._is_noted = False
        """Whether the last batches are not in the index yet."""
        self._loop = asyncio.get_running_loop()
        self._failed_s: float | None = None
        self._num_of_others = 0
        """Batches that named another rank."""

    def start(self) -> None:
        """Subscribe; anew, where the events were given up.

        Raises:
            EngineError: when the endpoint makes no sense.
        """
        if self._failed_s is not None:
            self._failed_s, self._reader = None, self._reading(self)
        self._reader.start()

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    @property
    def health(self) -> SourceHealth:
        """How well its cache is known, and what was odd so far; nothing is believed of events that were given up."""
        health = self._reader.health
        counts = TrackerCounts() if self._tracker is None else self._tracker.counts
        return msgspec.structs.replace(
            health,
            trust=health.trust if self._failed_s is None else 0.0,
            num_keyed=counts.num_keyed_roots,
            num_other_ranks=self._num_of_others,
            num_other_groups=counts.num_other_group,
            num_orphans=0 if self._tracker is None else self._tracker.orphans.num_dropped,
        )

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is known to be held."""
        return self._tracker is None or self._tracker.is_empty

    def is_to_be_read_anew(self) -> bool:
        """Tell whether the events were given up long enough ago."""
        failed_s = self._failed_s
        return failed_s is not None and self._loop.time() - failed_s >= _RETRY_EVENTS_S

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Take note of one engine step's events."""
        del seq
        if not self._engine.order.takes(self._position, batch.dp_rank):
            self._count_other(batch.dp_rank)
            return
        tracker = self._tracker
        if tracker is None:
            size = self._info.block_size_tokens or device_block_size(batch.events)
            if size == 0:
                return
            self._fleet.learn_block_size(self._name, self._info.incarnation, size)
            tracker = self._tracker = BlockTracker(self._engine.hashers.of(size))
            self._fleet.index.begin(self._source)
        tracker.note(batch.events, self._loop.time())
        self._is_noted = True

    def _count_other(self, rank: int) -> None:
        self._num_of_others += 1
        if self._num_of_others == 1:
            log.warning(
                "KV events of %s: a batch of data-parallel rank %d came where another's are read; ignored",
                clean(self._name),
                rank,
            )

    def on_end_of_read(self) -> None:
        """Put what the batches noted have changed into the index."""
        tracker = self._tracker
        if tracker is None or not self._is_noted:
            return
        self._is_noted = False
        index = self._fleet.index
        self._apply(self._source, tracker.take())
        for delta in tracker.take_slower():
            slower = self._source._replace(medium=delta.medium)
            if not index.holds(slower):
                index.begin(slower)
            self._apply(slower, delta)

    def on_trust(self, trust: float) -> None:
        """Believe what is known of the engine only so far from here on."""
        log.warning("KV events of %s: %s", clean(self._name), trust_text(trust))
        self._judge()

    def on_reset(self) -> None:
        """Forget the rank's blocks: it started anew, or events are lost for good. Others' stay until theirs tell that."""
        self._fleet.metrics.kv_frames.add("lost")
        media = () if self._tracker is None else self._tracker.slower_media
        self._tracker, self._is_noted = None, False
        for source in (self._source, *(self._source._replace(medium=medium) for medium in media)):
            self._fleet.index.end(source)

    def on_failed(self, reason: str) -> None:
        """Route by load only from here on."""
        log.warning("KV events of %s are given up: %s", clean(self._name), clean(reason))
        self._failed_s = self._loop.time()
        self.on_reset()
        self._judge()

    def _judge(self) -> None:
        self._fleet.index.believe(self._name, self.health.trust)

    def _apply(self, source: Source, delta: Delta) -> None:
        if delta.is_empty:
            return
        self._fleet.metrics.kv_frames.add("delta")
        index = self._fleet.index
        if delta.cleared:
            index.clear(source)
        index.remove(source, delta.removed)
        index.store(source, delta.stored)
