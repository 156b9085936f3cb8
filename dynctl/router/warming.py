"""Lets an engine that joins others, or is idle, compute hot prefixes before clients ask for them there, one after another.

Clients come first: nothing is sent while a client's prefill waits there, and what is sent is booked like any request, so that
decisions see it. Not here: which prefixes are hot (`hot`), which an idle engine is to have (`spreading`), how many requests a
joining engine gets (`worker_table`). IO: upstream connections.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynctl.core.text import clean
from dynctl.http1.upstream import UpstreamError
from dynctl.kv.hashing import unpack_tokens
from dynctl.router.api.requests import COMPLETIONS
from dynctl.router.hot import HotPrefix
from dynctl.router.spreading import Copies
from dynctl.router.workers import Worker

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

log = logging.getLogger("dynctl.router")

_LOOK_S = 0.2
_TIMEOUT_S = 30.0
_ROLES = (frozenset(("aggregated",)), frozenset(("prefill",)))


class Warmer:
    """Watches for engines that join or are idle; `run` until cancelled."""

    def __init__(self, desk: "Desk") -> None:
        self._desk = desk
        self._limit = desk.settings.warm_prefixes
        self._per_minute = desk.settings.warm_idle
        self._begun: set[tuple[str, str]] = set()
        hot = desk.placement.overlaps.hot
        self._copies = Copies(desk.workers, desk.index, hot, self._per_minute)
        self._copying: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Warm every engine that joins, once per incarnation, and idle ones."""
        if self._limit <= 0 and self._per_minute <= 0:
            return
        async with asyncio.TaskGroup() as group:
            while True:
                table, now_s = self._desk.workers, self._desk.loop.time()
                self._begun &= {worker.key for worker in table.all()}
                # A look at who serves is what tells the table that one has joined.
                views = [table.view(roles, None, now_s).workers for roles in _ROLES]
                if self._limit > 0:
                    self._warm_joined(group, views)
                if self._per_minute > 0:
                    self._copy_to_idle(group, views, now_s)
                await asyncio.sleep(_LOOK_S)

    def _warm_joined(self, group: asyncio.TaskGroup, views: Sequence[Sequence[Worker]]) -> None:
        for worker in [worker for view in views for worker in view]:
            if worker.key not in self._begun and self._may_warm(worker):
                self._begun.add(worker.key)
                group.create_task(self._warm(worker), name=f"warm:{worker.id}")

    def _copy_to_idle(
        self, group: asyncio.TaskGroup, views: Sequence[Sequence[Worker]], now_s: float
    ) -> None:
        """Begin one copy, unless one is under way."""
        if self._copying is not None and not self._copying.done():
            return
        # Asked each time: that is what tells how long an engine has been idle.
        found = self._copies.next(views, now_s)
        if found is None or not self._may_copy():
            return
        self._copies.begun(*found, now_s)
        self._copying = group.create_task(self._copy(*found), name=f"copy:{found[0].id}")

    def _may_copy(self) -> bool:
        """Nobody waits in the queue, and caches decide."""
        desk = self._desk
        return not (desk.is_draining or len(desk.line)) and desk.placement.policy.uses_index

    async def _copy(self, worker: Worker, prefix: HotPrefix) -> None:
        if worker.active_requests:
            return
        try:
            num_tokens = await self._compute(worker, prefix)
        except UpstreamError as error:
            log.info("idle engine %s got no hot prefix: %s", clean(worker.id), error.message)
            return
        except Exception:  # it only saves time, and must not end the watch over engines
            log.exception("idle engine %s got no hot prefix", clean(worker.id))
            return
        if num_tokens:
            self._desk.metrics.warmed_tokens.add("idle", by=num_tokens)

    def _may_warm(self, worker: Worker) -> bool:
        desk = self._desk
        return (
            worker.joined is not None
            and worker.parity != "mismatch"
            and worker.is_serving()
            and desk.placement.policy.uses_index
            and desk.workers.get(worker.id) is worker
            and not desk.is_draining
        )

    async def _warm(self, worker: Worker) -> None:
        desk, num_tokens = self._desk, 0
        prefixes = desk.placement.overlaps.hot.hottest(self._limit)
        for prefix in prefixes:
            await self._until_free(worker)
            if not self._may_warm(worker):
                break
            if desk.index.is_published(worker.id, prefix.block):
                continue
            try:
                num_tokens += await self._compute(worker, prefix)
            except UpstreamError as error:
                log.info("engine %s is not warmed further: %s", clean(worker.id), error.message)
                break
            except Exception:  # as above
                log.exception("engine %s is not warmed further", clean(worker.id))
                break
        if num_tokens:
            log.info("engine %s was warmed with %d tokens", clean(worker.id), num_tokens)
            desk.metrics.warmed_tokens.add("joined", by=num_tokens)

    async def _until_free(self, worker: Worker) -> None:
        while worker.pending_prefills and self._may_warm(worker):  # noqa: ASYNC110 - it follows from many things
            await asyncio.sleep(_LOOK_S)

    async def _compute(self, worker: Worker, prefix: HotPrefix) -> int:
        """Have one prefix computed; return its tokens, 0 where the engine refused."""
        desk = self._desk
        route = desk.fleet.routes.get(worker.id)
        if route is None:
            return 0
        ids = unpack_tokens(prefix.token_bytes)
        body = {"model": worker.info.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        booking = worker.book(len(ids), len(ids), 1, desk.loop.time(), 0.0)
        try:
            answer = await route.fetch("POST", COMPLETIONS, msgspec.json.encode(body), _TIMEOUT_S)
        finally:
            booking.release()
        return len(ids) if answer.status == 200 else 0
