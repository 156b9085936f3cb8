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
from dynctl.core.text import clean
from dynctl.errors import DynctlError, ProbeError
from dynctl.http1.upstream import Upstream, UpstreamError
from dynctl.kv.emptied import CacheWatch, read_figures
from dynctl.kv.intake import Intake
from dynctl.kv.ranks import rank_headers
from dynctl.router.config import EngineTarget, Settings
from dynctl.router.prompt import Hashers
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.layout import ask_layout, read_layout
from dynctl.router.sources.parity import check_parity
from dynctl.router.sources.ranks import EngineEvents
from dynctl.router.sources.route import Route, limits, parse_url
from dynctl.router.sources.split import worker_ids, workers_of
from dynctl.router.tokens import ModelTokenizer

log = logging.getLogger("dynctl.router")

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
        intake: Intake | None = None,
    ) -> None:
        """`intake`: of all engines of this router."""
        address, prefix = parse_url(target.url)
        self._target = target
        self._fleet = fleet
        self._hashers = hashers
        self._tokenizer = tokenizer
        self._poll_s = settings.engine_poll_s
        self._context = context
        self._intake = intake
        self._upstream = Upstream(address, limits(settings.connect_timeout_s))
        self._names = worker_ids(target.id, target.ranks)
        self._routes = [
            Route(self._upstream, prefix, rank_headers(rank, target.ranks))
            for rank in range(target.ranks)
        ]
        """By worker."""
        self._route = self._routes[0]
        """For questions to the server itself."""
        self._starts = itertools.count(1)
        self._info: EngineInfo | None = None
        """None: not there, or not seen yet."""
        self._is_caching: bool | None = None
        self._num_ranks = 0
        """It says it has; 0: it does not say."""
        self._events: EngineEvents | None = None
        self._watch = CacheWatch()
        self._num_looks = 0
        self._parity: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Watch the engine for ever."""
        misses = 0
        self._announce(self._unknown(EngineState.STARTING))
        self._unreachable()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        await self._look(group)
                        misses = 0
                        self._fleet.silent.pop(self._target.id, None)
                    except (
                        UpstreamError,
                        ProbeError,
                        msgspec.MsgspecError,
                        RecursionError,
                    ) as error:
                        misses += 1
                        is_refused = isinstance(error, UpstreamError) and error.kind == "connect"
                        if self._info is not None and (is_refused or misses >= _MISSES):
                            self._away(str(error))
                        if self._info is None:
                            self._fleet.silent[self._target.id] = str(error)
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
        if self._events is not None and self._info is not None:
            for name, health_of in self._events.healths().items():
                self._fleet.heard(name, self._info.incarnation, health_of)
            self._events.start_again()
            self._num_looks += 1
            if self._num_looks % _LOOK_EVERY == 0:
                await self._look_at_cache(self._events, self._info)
        if self._info is None:
            info = self._info = await self._introduce()
            self._announce(info)
            for name in self._names:
                if self._target.kv_events is None:
                    self._fleet.untold(name, info.incarnation)
                self._fleet.notes_of(name).is_caching = self._is_caching
            places = self._target.event_places
            for name, (events_at, _) in zip(self._names, places, strict=False):
                self._fleet.notes_of(name).events_at = events_at
            notes = self._fleet.notes_of(self._names[0])
            notes.num_ranks = self._num_ranks
            notes.num_ranks_read = len(places)
            self._start_reading(info)
            self._parity = [
                group.create_task(
                    check_parity(
                        self._fleet, route, (name, info.incarnation, info.model), self._tokenizer
                    ),
                    name=f"parity:{name}",
                )
                for name, route in zip(self._names, self._routes, strict=True)
            ]

    async def _look_at_cache(self, events: EngineEvents, info: EngineInfo) -> None:
        """Forget what the engine has dropped without a word; one that does not show its figures says nothing."""
        try:
            answer = await self._route.fetch("GET", "/metrics", timeout_s=self._poll_s + 1.0)
            if answer.status != 200:
                return
            text = answer.body.decode("utf-8", "replace")
            figures = read_figures(text)
            num_ranks = read_layout(text).num_ranks
        except (UpstreamError, ProbeError) as error:
            log.debug("the figures of %s: %s", clean(info.id), clean(str(error)))
            return
        if num_ranks != self._num_ranks:
            # They may be added to a running engine, and taken away.
            self._fleet.notes_of(self._names[0]).num_ranks = self._num_ranks = num_ranks
            self._announce(info)
        # At every look as long as it lasts: events of before may still have been under way.
        now_s = asyncio.get_running_loop().time()
        if self._watch.is_empty(figures, now_s) and events.empty():
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
        self._num_ranks = layout.num_ranks
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
            ranks=self._target.ranks,
        )

    def _announce(self, info: EngineInfo) -> None:
        """Those of its ranks that it does not have would refuse what they are asked, as if that were wrong."""
        for worker, route in zip(workers_of(info), self._routes, strict=True):
            self._fleet.saw(self._target.id, worker, route)
        for name in self._names[self._num_ranks :] if self._num_ranks else ():
            self._fleet.unreachable(name)

    def _unreachable(self) -> None:
        for name in self._names:
            self._fleet.unreachable(name)

    def _away(self, reason: str) -> None:
        log.warning("engine %s is away: %s", clean(self._target.id), clean(reason))
        self._info = None
        self._stop_reading()
        for task in self._parity:
            task.cancel()
        self._unreachable()

    def _start_reading(self, info: EngineInfo) -> None:
        if self._target.kv_events is None:
            return
        self._watch = CacheWatch()
        self._events = EngineEvents(
            self._target, self._fleet, self._hashers, info, self._context, self._intake
        )
        try:
            self._events.start()
        except DynctlError as error:
            self._stop_reading()
            log.warning(
                "engine %s is routed by load only: %s", clean(info.id), clean(error.message)
            )

    def _stop_reading(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
