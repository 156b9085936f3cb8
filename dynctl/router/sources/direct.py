"""An engine without a relay: asked for its health, its model and its cache layout; KV events straight from it.

A start is not stamped by anybody here, so an engine that was away counts as a new incarnation, and the reader of its
events notices when their sequence begins anew. IO: sockets, zmq.
"""

import asyncio
import itertools
import logging
from dataclasses import replace

import msgspec
import zmq

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import device_block_size
from dynctl.core.text import clean
from dynctl.errors import DynctlError, ProbeError
from dynctl.http1.upstream import Upstream, UpstreamError
from dynctl.kv.emptied import CacheWatch, read_figures
from dynctl.kv.events import EventBatch
from dynctl.kv.reader import KvEventReader, ReplaySlots, trust_text
from dynctl.kv.tracker import BlockTracker
from dynctl.kv.tracker import Delta as TrackedDelta
from dynctl.kv.wire import SourceHealth
from dynctl.router.config import EngineTarget, Settings
from dynctl.router.prefix_index import Source
from dynctl.router.prompt import Hashers
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.layout import ask_layout
from dynctl.router.sources.parity import check_parity
from dynctl.router.sources.route import Route, limits, parse_url
from dynctl.router.tokens import ModelTokenizer

log = logging.getLogger("dynctl.router")

_RETRY_EVENTS_S = 30.0
"""After which events that were given up are read anew."""
_LOOK_EVERY = 3
"""Health questions to one look at the figures of the engine's cache."""
_MISSES = 2
"""Health questions without an answer in a row before an engine counts as away; a refused connection does at once."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class DirectSource:
    """One engine; `run` until cancelled."""

    def __init__(
        self,
        target: EngineTarget,
        fleet: Fleet,
        hashers: Hashers,
        tokenizer: ModelTokenizer | None,
        settings: Settings,
        context: "zmq.Context[zmq.Socket[bytes]]",
        slots: ReplaySlots | None = None,
    ) -> None:
        """`slots`: of all engines of this router."""
        address, prefix = parse_url(target.url)
        self._target = target
        self._fleet = fleet
        self._hashers = hashers
        self._tokenizer = tokenizer
        self._poll_s = settings.engine_poll_s
        self._context = context
        self._slots = slots
        self._upstream = Upstream(address, limits(settings.connect_timeout_s))
        self._route = Route(self._upstream, prefix)
        self._starts = itertools.count(1)
        self._info: EngineInfo | None = None
        """None: not there, or not seen yet."""
        self._is_caching: bool | None = None
        self._reader: KvEventReader | None = None
        self._sink: _EventSink | None = None
        self._watch = CacheWatch()
        self._num_looks = 0
        self._parity: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Watch the engine for ever."""
        misses = 0
        self._announce(self._unknown(EngineState.STARTING))
        self._fleet.unreachable(self._target.id)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        await self._look(group)
                        misses = 0
                    except (UpstreamError, ProbeError, msgspec.MsgspecError) as error:
                        misses += 1
                        is_refused = isinstance(error, UpstreamError) and error.kind == "connect"
                        if self._info is not None and (is_refused or misses >= _MISSES):
                            self._away(str(error))
                    await asyncio.sleep(self._poll_s)
        finally:
            self._stop_reading()
            await self._upstream.close()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Ask for its health, and for all the rest when it is new.

        Raises:
            UpstreamError: when it does not answer well.
        """
        health = await self._route.fetch("GET", "/health", timeout_s=self._poll_s + 1.0)
        if health.status != 200:
            raise UpstreamError("status", f"/health {health.status}")
        if self._reader is not None and self._sink is not None and self._info is not None:
            self._fleet.heard(
                self._info.id, self._info.incarnation, self._sink.health(self._reader)
            )
            if self._sink.is_to_be_read_anew():
                self._stop_reading()
                self._start_reading(self._info)
            self._num_looks += 1
            if self._num_looks % _LOOK_EVERY == 0:
                await self._look_at_cache(self._sink, self._info)
        if self._info is None:
            self._info = await self._introduce()
            self._announce(self._info)
            notes = self._fleet.notes_of(self._target.id)
            if self._target.kv_events is None:
                self._fleet.untold(self._info.id, self._info.incarnation)
            notes.is_caching = self._is_caching
            self._start_reading(self._info)
            engine = (self._info.id, self._info.incarnation, self._info.model)
            self._parity = group.create_task(
                check_parity(self._fleet, self._route, engine, self._tokenizer),
                name=f"parity:{self._info.id}",
            )

    async def _look_at_cache(self, sink: "_EventSink", info: EngineInfo) -> None:
        """Forget what the engine has dropped without a word; one that does not show its figures says nothing."""
        try:
            answer = await self._route.fetch("GET", "/metrics", timeout_s=self._poll_s + 1.0)
            if answer.status != 200:
                return
            figures = read_figures(answer.body.decode("utf-8", "replace"))
        except (UpstreamError, ProbeError) as error:
            log.debug("the figures of %s: %s", clean(info.id), clean(str(error)))
            return
        # At every look as long as it lasts: events of before may still have been under way.
        now_s = asyncio.get_running_loop().time()
        if self._watch.is_empty(figures, now_s) and sink.empty():
            log.warning("engine %s has dropped its cache and does not say so", clean(info.id))

    async def _introduce(self) -> EngineInfo:
        """Learn model, length and cache layout.

        Raises:
            UpstreamError: when it does not answer well.
        """
        answer = await self._route.fetch("GET", "/v1/models")
        if answer.status != 200:
            raise UpstreamError("status", f"/v1/models {answer.status}")
        models = msgspec.json.decode(answer.body, type=_Models).data
        if not models:
            raise UpstreamError("protocol", "/v1/models is empty")
        info = replace(
            self._unknown(EngineState.READY),
            incarnation=f"{self._target.id}.{next(self._starts)}",
            model=models[0].id,
            max_model_len_tokens=models[0].max_model_len or 0,
        )
        layout = await ask_layout(self._route)
        self._is_caching = layout.is_caching
        return replace(
            info,
            block_size_tokens=layout.block_size_tokens,
            kv_capacity_tokens=layout.capacity_tokens,
        )

    def _unknown(self, state: EngineState) -> EngineInfo:
        return EngineInfo(
            id=self._target.id,
            incarnation=f"{self._target.id}.0",
            state=state,
            role=self._target.role,
            deployment="",
            kind="external",
            model="",
        )

    def _announce(self, info: EngineInfo) -> None:
        self._fleet.saw(self._target.id, info, self._route)

    def _away(self, reason: str) -> None:
        log.warning("engine %s is away: %s", clean(self._target.id), clean(reason))
        self._info = None
        self._stop_reading()
        if self._parity is not None:
            self._parity.cancel()
        self._fleet.unreachable(self._target.id)

    def _start_reading(self, info: EngineInfo) -> None:
        if self._target.kv_events is None:
            return
        self._sink = _EventSink(self._fleet, self._hashers, info)
        self._watch = CacheWatch()
        self._reader = KvEventReader(
            self._target.kv_events,
            self._target.kv_replay,
            self._target.topic,
            self._sink,
            context=self._context,
            slots=self._slots,
        )
        try:
            self._reader.start()
        except DynctlError as error:
            self._reader = None
            log.warning(
                "engine %s is routed by load only: %s", clean(info.id), clean(error.message)
            )

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _EventSink:
    """Hashes one engine's events into the index: those read together in one go."""

    def __init__(self, fleet: Fleet, hashers: Hashers, info: EngineInfo) -> None:
        self._fleet = fleet
        self._hashers = hashers
        self._info = info
        self._trackers: dict[int, BlockTracker] = {}
        self._noted: set[int] = set()
        """Ranks whose last batches are not in the index yet."""
        self._loop = asyncio.get_running_loop()
        self._failed_s: float | None = None

    def health(self, reader: KvEventReader) -> SourceHealth:
        """How well the engine's cache is known."""
        num_keyed = sum(t.counts.num_keyed_roots for t in self._trackers.values())
        trust = 1.0 if self._failed_s is None else 0.0
        health = reader.health
        return msgspec.structs.replace(health, num_keyed=num_keyed, trust=min(trust, health.trust))

    def is_to_be_read_anew(self) -> bool:
        """Tell whether the events were given up long enough ago."""
        failed_s = self._failed_s
        return failed_s is not None and self._loop.time() - failed_s >= _RETRY_EVENTS_S

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Take note of one engine step's events."""
        del seq
        rank = batch.dp_rank
        tracker = self._trackers.get(rank)
        if tracker is None:
            size = self._info.block_size_tokens or device_block_size(batch.events)
            if size == 0:
                return
            self._fleet.learn_block_size(self._info.id, self._info.incarnation, size)
            tracker = self._trackers[rank] = BlockTracker(self._hashers.of(size))
            self._fleet.index.begin(self._source(rank))
        tracker.note(batch.events, self._loop.time())
        self._noted.add(rank)

    def on_end_of_read(self) -> None:
        """Put what the batches noted have changed into the index."""
        index = self._fleet.index
        for rank in self._noted:
            source, tracker = self._source(rank), self._trackers[rank]
            self._apply(source, tracker.take())
            for delta in tracker.take_slower():
                slower = source._replace(medium=delta.medium)
                if not index.holds(slower):
                    index.begin(slower)
                self._apply(slower, delta)
        self._noted.clear()

    def on_trust(self, trust: float) -> None:
        """Believe what is known of the engine only so far from here on."""
        log.warning("KV events of %s: %s", clean(self._info.id), trust_text(trust))
        self._fleet.index.believe(self._info.id, trust)

    def on_reset(self) -> None:
        """Forget the engine's blocks: it started anew, or events are lost for good."""
        self._fleet.metrics.kv_frames.add("lost")
        self._trackers.clear()
        self._noted.clear()
        self._fleet.index.drop(self._info.id)

    def empty(self) -> bool:
        """Forget what the engine has dropped without a word; False when nothing was known of it."""
        if all(tracker.is_empty for tracker in self._trackers.values()):
            return False
        self.on_reset()
        return True

    def on_failed(self, reason: str) -> None:
        """Route by load only from here on."""
        log.warning("KV events of %s are given up: %s", clean(self._info.id), clean(reason))
        self._failed_s = self._loop.time()
        self.on_reset()

    def _source(self, rank: int) -> Source:
        return Source(self._info.id, self._info.incarnation, rank)

    def _apply(self, source: Source, delta: TrackedDelta) -> None:
        if delta.is_empty:
            return
        self._fleet.metrics.kv_frames.add("delta")
        index = self._fleet.index
        if delta.cleared:
            index.clear(source)
        index.remove(source, delta.removed)
        index.store(source, delta.stored)
