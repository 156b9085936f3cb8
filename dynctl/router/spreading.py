"""Which hot prefix an idle engine is to compute next, before load would have it copied there in a client's time.

Only where the engine has been idle for a while, everybody who holds the prefix is busy and above their share, and the engine
says that it has room left: nothing is ever evicted for it. Not here: sending it there (`warming`), engines that join, clocks
(times are passed in, monotonic seconds). Pure.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from dynctl.router.hot import HotPrefix, HotPrefixes
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

_IDLE_S = 2.0
"""So long without a request."""

_MINUTE_S = 60.0

_TOKEN_BYTES = 4

_ROOM = 0.9
"""Of its KV memory may be held afterwards: what comes to the engine meanwhile evicts nothing either."""

_STARTS = 2.0
"""Conversations that must have begun with a prefix lately for a copy to be worth its prefill."""

_ABOVE = 0.1
"""Shares above the fair one from which on an engine is taken to have more than its own."""

_PRIOR = 4.0
"""Requests each engine is taken to have had before the first, as for policy `kv`: a handful says nothing about shares."""


class Copies:
    """Looks for the next copy, a few times a second."""

    def __init__(
        self, table: WorkerTable, index: PrefixIndex, hot: HotPrefixes, per_minute: int
    ) -> None:
        self._table, self._index, self._hot = table, index, hot
        self._per_minute = per_minute
        self._idle_since: dict[tuple[str, str], tuple[float, int]] = {}
        """By engine and incarnation: since when, and the number of requests it had had by then."""
        self._begun_s: deque[float] = deque()
        """When those of the last minute were."""
        self._tried: dict[tuple[tuple[str, str], int], float] = {}
        """When an engine was last given a prefix: what it then does not say it holds, it is not given again at once."""

    def next(
        self, views: Iterable[Sequence[Worker]], now_s: float
    ) -> tuple[Worker, HotPrefix] | None:
        """Say what is to be computed where; `views` are the serving engines by role. To be called again and again."""
        views = list(views)
        idle = self._idle([worker for view in views for worker in view], now_s)
        while self._begun_s and now_s - self._begun_s[0] >= _MINUTE_S:
            self._begun_s.popleft()
        if not idle or len(self._begun_s) >= self._per_minute:
            return None
        self._tried = {key: at_s for key, at_s in self._tried.items() if now_s - at_s < _MINUTE_S}
        prefixes = self._hot.above(_STARTS, now_s)
        for view in views:
            above = self._above(view, now_s)
            takers = [worker for worker in view if worker in idle and _may_take(worker, now_s)]
            for prefix in prefixes if above and takers else ():
                if (worker := self._target(view, above, takers, prefix)) is not None:
                    return worker, prefix
        return None

    def begun(self, worker: Worker, prefix: HotPrefix, now_s: float) -> None:
        """Note that it is computed now."""
        self._begun_s.append(now_s)
        self._tried[worker.key, prefix.block] = now_s

    def _idle(self, workers: Sequence[Worker], now_s: float) -> set[Worker]:
        """The engines that have done nothing for long enough."""
        since = {}
        for worker in workers:
            if worker.active_requests or worker.pending_prefills:
                continue
            known = self._idle_since.get(worker.key)
            is_same = known is not None and known[1] == worker.num_sent
            since[worker.key] = known if known and is_same else (now_s, worker.num_sent)
        self._idle_since = since
        return {
            worker
            for worker in workers
            if worker.key in since and now_s - since[worker.key][0] >= _IDLE_S
        }

    def _target(
        self,
        view: Sequence[Worker],
        above: set[Worker],
        takers: Sequence[Worker],
        prefix: HotPrefix,
    ) -> Worker | None:
        """The idle engine that is to have a prefix: the emptiest, where all that hold it are overloaded."""
        index = self._index
        published = index.publishers(prefix.block)
        holders = [worker for worker in view if worker.id in published]
        if not holders or not above.issuperset(holders):
            return None
        model, size = holders[0].info.model, holders[0].block_size
        may = [
            worker
            for worker in takers
            if worker.id not in published
            and worker.info.model == model
            and worker.block_size == size
            and (worker.key, prefix.block) not in self._tried
            and _has_room(worker, prefix)
        ]
        may.sort(key=lambda worker: worker.held_tokens / worker.capacity_tokens)
        return next((worker for worker in may if index.is_told_of(worker.id)), None)

    def _above(self, view: Sequence[Worker], now_s: float) -> set[Worker]:
        """The busy engines that had more than their share."""
        unit = self._table.recent_unit(now_s)
        fair = sum([worker.recent for worker in view]) / max(len(view), 1)
        limit = fair + _ABOVE * (fair + _PRIOR * unit)
        return {worker for worker in view if worker.active_requests and worker.recent >= limit}


def _may_take(worker: Worker, now_s: float) -> bool:
    """Whether an idle engine may be given anything: it has settled, and says what it holds."""
    return (
        worker.joined is None
        and worker.has_room(now_s)
        and worker.capacity_tokens > 0
        and worker.is_told
        and worker.parity != "mismatch"
    )


def _has_room(worker: Worker, prefix: HotPrefix) -> bool:
    """Whether it holds a prefix beside all it has."""
    # A block more: the token that it answers with.
    more_tokens = len(prefix.token_bytes) // _TOKEN_BYTES + worker.block_size
    return worker.held_tokens + more_tokens <= _ROOM * worker.capacity_tokens
