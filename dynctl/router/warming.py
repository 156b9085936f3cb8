"""Lets an engine that joins others compute the hottest prefixes before clients ask for them, one after another.

Clients come first: nothing is sent while a client's prefill waits there, and what is sent is booked like any request, so that
decisions see it. Not here: which prefixes are hot (`hot`), how many requests a joining engine gets (`worker_table`).
IO: upstream connections.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from dynctl.core.text import clean
from dynctl.http1.upstream import UpstreamError
from dynctl.kv.hashing import unpack_tokens
from dynctl.router.api.requests import COMPLETIONS
from dynctl.router.hot import HotPrefix
from dynctl.router.workers import Worker

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

log = logging.getLogger("dynctl.router")

_LOOK_S = 0.2
_TIMEOUT_S = 30.0
_ROLES = (frozenset(("aggregated",)), frozenset(("prefill",)))


class Warmer:
    """Watches for engines that join; `run` until cancelled."""

    def __init__(self, desk: "Desk") -> None:
        self._desk = desk
        self._limit = desk.settings.warm_prefixes
        self._begun: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Warm every engine that joins, once per incarnation."""
        if self._limit <= 0:
            return
        async with asyncio.TaskGroup() as group:
            while True:
                table, now_s = self._desk.workers, self._desk.loop.time()
                self._begun &= {worker.key for worker in table.all()}
                # A look at who serves is what tells the table that one has joined.
                views = [table.view(roles, None, now_s) for roles in _ROLES]
                for worker in [worker for view in views for worker in view.workers]:
                    if worker.key not in self._begun and self._may_warm(worker):
                        self._begun.add(worker.key)
                        group.create_task(self._warm(worker), name=f"warm:{worker.id}")
                await asyncio.sleep(_LOOK_S)

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
        if num_tokens:
            log.info("engine %s was warmed with %d tokens", clean(worker.id), num_tokens)
            desk.metrics.warmed_tokens.add(by=num_tokens)

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
