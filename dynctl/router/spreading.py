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
            for prefix in prefixes:
                if (worker := self._target(view, idle, prefix, now_s)) is not None:
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
        self, view: Sequence[Worker], idle: set[Worker], prefix: HotPrefix, now_s: float
    ) -> Worker | None:
        """The idle engine that is to have a prefix: the emptiest, where all that hold it are overloaded."""
        index = self._index
        holders = [worker for worker in view if index.is_published(worker.id, prefix.block)]
        if not holders or not all(self._is_above(worker, view, now_s) for worker in holders):
            return None
        model = holders[0].info.model
        may = [
            worker
            for worker in view
            if worker in idle
            and worker.joined is None
            and worker.has_room(now_s)
            and worker not in holders
            and worker.info.model == model
            and worker.block_size == holders[0].block_size
            and (worker.key, prefix.block) not in self._tried
            and self._has_room(worker, prefix)
        ]
        return min(
            may, key=lambda worker: self._held(worker) / worker.capacity_tokens, default=None
        )

    def _held(self, worker: Worker) -> int:
        """Tokens, as its events say now."""
        return self._index.num_blocks(worker.id) * worker.block_size

    def _is_above(self, worker: Worker, view: Sequence[Worker], now_s: float) -> bool:
        fair = sum([other.recent for other in view]) / len(view)
        shares = (worker.recent - fair) / (fair + _PRIOR * self._table.recent_unit(now_s))
        return worker.active_requests > 0 and shares >= _ABOVE

    def _has_room(self, worker: Worker, prefix: HotPrefix) -> bool:
        """Whether it is known to hold it beside all it has."""
        is_known = worker.capacity_tokens > 0 and worker.is_told and worker.parity != "mismatch"
        if not is_known or not self._index.is_told_of(worker.id):
            return False
        # A block more: the token that it answers with.
        more_tokens = len(prefix.token_bytes) // _TOKEN_BYTES + worker.block_size
        return self._held(worker) + more_tokens <= _ROOM * worker.capacity_tokens
