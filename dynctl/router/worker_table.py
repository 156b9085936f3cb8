"""All engines by id, which of them serve a role just now, and who may take one more request.

Not here: an engine's own books (`workers`), choosing, clocks (times are passed in, monotonic seconds). Pure.
"""

import math
from collections.abc import Container, Iterable, Sequence
from itertools import combinations
from typing import Final

from dynctl.core.deployment import EngineInfo, EngineState, may_exchange_kv
from dynctl.router.config import Settings
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Prompt
from dynctl.router.rates import OutputLengths
from dynctl.router.slow_start import SlowStarts
from dynctl.router.tally import Tally
from dynctl.router.workers import Worker

_RECENT_S: Final = 4.0
"""Age at which a request counts 1/e in what an engine had lately. Longer, and what was uneven once is made good when it
no longer matters. Tuned: benchmarks/balance.py."""

_STORED_KEEP: Final = math.exp(-1.0 / 4.0)
"""By the second, of what an engine stored lately. Tuned: benchmarks/balance.py."""

_STORED_PRIOR: Final = 256.0
"""Blocks each engine is taken to have stored before: where little is stored, caches are all alike."""

_MOST_CROWDED: Final = 2.0
"""Shares of the mean that count at most: where one engine alone has stored, its next turns still stay."""

_FADE_AFTER_S: Final = 5.0
_MAX_UNIT: Final = 1e12
_MAX_AGE: Final = 700.0
"""In which growing units are still numbers; what engines had before so long is nothing, however much it was."""
_MAX_SPREAD: Final = 4096


DECODE: Final = frozenset(("decode",))
_AGGREGATED: Final = frozenset(("aggregated",))


class View:
    """The serving engines of some roles, as long as none comes, goes or changes; `WorkerTable.view` makes it."""

    __slots__ = (
        "_layout",
        "_sizes",
        "_spread",
        "_tally",
        "_version",
        "positions",
        "strangers",
        "workers",
    )

    def __init__(self, workers: Sequence[Worker], tally: Tally) -> None:
        self.workers = workers
        self.positions = {worker.id: position for position, worker in enumerate(workers)}
        self._tally = tally
        self._spread: dict[tuple[int, int], tuple[int, ...]] = {}
        self._sizes: set[int] = set()
        self.strangers: list[Worker] = []
        """Engines that count tokens otherwise; as of the last `block_sizes`."""
        self._layout = self._version = -1

    def block_sizes(self, index: PrefixIndex) -> set[int]:
        """The block sizes of engines whose cache can be considered."""
        if self._layout != index.layout or self._version != self._tally.version:
            self._layout, self._version = index.layout, self._tally.version
            self._spread = {}
            self._sizes = {worker.block_size for worker in self.workers if worker.has_blocks}
            self.strangers = [worker for worker in self.workers if worker.is_stranger]
        return self._sizes

    def positions_of(self, bits: int, block_size: int, index: PrefixIndex) -> tuple[int, ...]:
        """Positions of the engines with that block size whose sources these bits of the index are.

        Ask `block_sizes` first: it notices that bits have changed their meaning.
        """
        found = self._spread.get((bits, block_size))
        if found is None:
            if len(self._spread) > _MAX_SPREAD:
                self._spread = {}
            own, workers = self.positions, self.workers
            places = [own[name] for name in dict.fromkeys(index.engines_of(bits)) if name in own]
            found = self._spread[bits, block_size] = tuple(
                [
                    place
                    for place in places
                    if workers[place].has_blocks and workers[place].block_size == block_size
                ]
            )
        return found


class WorkerTable:
    """All engines known, by id; one incarnation each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workers: dict[str, Worker] = {}
        self._views: dict[tuple[frozenset[str], str | None], View] = {}
        self._whole: dict[str | None, Sequence[Worker]] = {}
        self._models: frozenset[str] = frozenset()
        self.tally = Tally(settings)
        self.lengths = OutputLengths()
        self.num_sent = 0
        """Requests sent to any engine."""
        self._recent_base_s: float | None = None
        self._joining = SlowStarts()
        self.has_strange_pairs = False
        """Whether some engine's KV blocks are known to be of no use to another."""

    def recent_unit(self, now_s: float) -> float:
        """What a request made now weighs in `Worker.recent`: units grow, so that nothing has to be aged."""
        if self._recent_base_s is None:
            self._recent_base_s = now_s
        unit = math.exp(min((now_s - self._recent_base_s) / _RECENT_S, _MAX_AGE))
        if unit > _MAX_UNIT:
            for worker in self._workers.values():
                worker.recent /= unit
                worker.cached_load = None
            self._recent_base_s, unit = now_s, 1.0
        return unit

    def view(self, roles: frozenset[str], model: str | None, now_s: float) -> View:
        """The serving engines of these roles, made anew only after a change; one that is new among them starts slowly."""
        found = self._views.get((roles, model))
        if found is None:
            found = self._views[roles, model] = View(self.serving(roles, model), self.tally)
            for worker in found.workers:
                if not worker.was_serving:
                    worker.was_serving = True
                    self._join(worker, found.workers, now_s)
        return found

    def whole(self, model: str | None, now_s: float) -> Sequence[Worker]:
        """The serving engines that do whole requests; none where decode engines generate."""
        found = self._whole.get(model)
        if found is None:
            roles = self.main_roles(model, now_s)
            found = () if roles is DECODE else self.view(roles, model, now_s).workers
            self._whole[model] = found
        return found

    def knows(self, model: str) -> bool:
        """Whether any engine, serving or not, has this model."""
        return model in self._models

    def _changed(self) -> None:
        """Note that an engine came, went or changed."""
        self._views.clear()
        self._whole.clear()
        self._models = frozenset([worker.info.model for worker in self._workers.values()])
        infos = [worker.info for worker in self._workers.values()]
        kinds = {(info.kv_identity, info.tp): info for info in infos}
        self.has_strange_pairs = not all(
            may_exchange_kv(one, other) for one, other in combinations(kinds.values(), 2)
        )

    def main_roles(self, model: str | None, now_s: float) -> frozenset[str]:
        """Decode engines generate where there are any that serve; otherwise whole-request engines."""
        if self.view(DECODE, model, now_s).workers:
            return DECODE
        if self.view(_AGGREGATED, model, now_s).workers:
            return _AGGREGATED
        return DECODE if self.are_coming(DECODE, model) else _AGGREGATED

    def relax(self, now_s: float, index: PrefixIndex) -> None:
        """Let what was learned of engines nobody uses fade towards the others, see whose cache is full; call it every second."""
        self._joining.look(now_s)
        self._note_crowding(index)
        for worker in self._workers.values():
            if now_s - worker.prefill_ended_s > _FADE_AFTER_S and worker not in self.tally.unseen:
                worker.prefill.fade()
                for medium, line in worker.loads.items():
                    if line is not self.tally.loads[medium]:
                        line.fade()
                worker.pace.learn(1.0)
                worker.cached_load = None
        self.tally.tighten(self._workers.values())

    def _note_crowding(self, index: PrefixIndex) -> None:
        """See which caches are full, and in which of those blocks go the soonest: where most is stored."""
        lately: dict[str, list[float]] = {}
        for worker in self._workers.values():
            worker.stored(index.num_stored(worker.id), _STORED_KEEP)
            lately.setdefault(worker.info.role, []).append(worker.stored_lately)
        for worker in self._workers.values():
            of_role = lately[worker.info.role]
            mean = sum(of_role) / len(of_role)
            share = (worker.stored_lately + _STORED_PRIOR) / (mean + _STORED_PRIOR)
            turnover, num_held = index.turnover(worker.id), index.num_blocks(worker.id)
            worker.crowded(min(share, _MOST_CROWDED), turnover, num_held)

    def may_limit(self, now_s: float) -> bool:
        """Whether any engine may be without room just now: full, failing, busy, or starting slowly."""
        tally = self.tally
        return bool(tally.num_full or now_s < tally.limited_until_s or len(self._joining))

    def with_room(
        self, workers: Sequence[Worker], now_s: float, prompt: Prompt | None, tokens: int
    ) -> Sequence[Worker]:
        """The engines that may take one more; slow starters only when the others have no room either.

        It needs so many tokens of KV memory; its prompt, where that is given, may have some in common with others. Engines
        that could never hold it are asked only where none could.
        """
        is_small = tokens <= self.tally.small_tokens
        everybody = workers
        if prompt is not None and not is_small:
            workers = [worker for worker in workers if not worker.is_beyond(prompt)] or workers
        free: Sequence[Worker] = [
            worker
            for worker in workers
            if worker.has_room(now_s)
            and ((is_small and not worker.is_tight) or worker.fits(prompt, tokens, now_s))
        ]
        if len(self._joining):
            free = self._joining.settled(free, now_s, self.num_sent, len(workers))
        return free if len(free) < len(everybody) else everybody

    def left_out(
        self,
        workers: Iterable[Worker],
        taken: Iterable[Worker],
        failed: Container[tuple[str, str]],
        now_s: float,
        apart: Container[str] = (),
    ) -> dict[str, str]:
        """Why engines may not take a request, by id; of those that are not among those taken.

        `failed` have failed it before, `apart` are those whose KV blocks nobody could use.
        """
        may, reasons = set(taken), {}
        for worker in workers:
            if worker in may:
                continue
            if worker.key in failed:
                reasons[worker.id] = "failed_before"
            elif worker.id in apart:
                reasons[worker.id] = "other_kv"
            else:
                other = "kv_memory" if worker.joined is None else "starts_slowly"
                reasons[worker.id] = worker.lack(now_s) or other
        return reasons

    def _join(self, worker: Worker, fleet: Sequence[Worker], now_s: float) -> None:
        others = [other for other in fleet if other is not worker and other.num_sent]
        if not others:
            return
        worker.recent = sum(other.recent for other in others) / len(others)
        worker.cached_load = None
        self._joining.begin(worker, now_s, self.num_sent)

    def all(self) -> tuple[Worker, ...]:
        """Every engine known."""
        return tuple(self._workers.values())

    def get(self, engine_id: str) -> Worker | None:
        """The engine of that id, if it is known."""
        return self._workers.get(engine_id)

    def put(self, info: EngineInfo) -> bool:
        """Take facts about an engine; True when it is a new incarnation (its blocks are to be dropped)."""
        known = self._workers.get(info.id)
        if known is not None and known.incarnation == info.incarnation:
            known.update(info, self._settings)
            self._changed()
            return False
        fresh = Worker(info, self._settings, self.tally)
        if known is not None:
            # The machine is the same: what its work costs is the best guess for the new start too.
            fresh.prefill, fresh.loads, fresh.pace = known.prefill, known.loads, known.pace
            if known not in self.tally.unseen:
                self.tally.unseen.discard(fresh)
            self._left(known)
        self._workers[info.id] = fresh
        self._changed()
        return True

    def remove(self, engine_id: str) -> None:
        """Forget an engine; its bookings run out on their own."""
        gone = self._workers.pop(engine_id, None)
        if gone is not None:
            self._left(gone)
        self._changed()

    def _left(self, worker: Worker) -> None:
        """Count it nowhere any more but in its own books, which run out."""
        self.tally.unseen.discard(worker)
        self._joining.end(worker)

    def set_reachable(self, engine_id: str, *, is_reachable: bool) -> None:
        """Note whether the way to an engine (its relay, its port) works."""
        worker = self._workers.get(engine_id)
        if worker is not None:
            worker.is_reachable = is_reachable
            self._changed()

    def serving(self, roles: frozenset[str], model: str | None = None) -> list[Worker]:
        """Engines of these roles that take requests, for one model or any."""
        return [
            worker
            for worker in self._workers.values()
            if worker.info.role in roles
            and (model is None or worker.info.model == model)
            and worker.is_serving()
        ]

    def are_coming(self, roles: frozenset[str], model: str | None = None) -> bool:
        """Whether engines of these roles are worth waiting for: they start, restart, or are out of reach just now."""
        return any(
            worker.info.role in roles
            and (model is None or worker.info.model == model)
            and not worker.is_serving()
            and worker.info.state in _COMING
            for worker in self._workers.values()
        )


_COMING: Final = frozenset({EngineState.STARTING, EngineState.BACKOFF, EngineState.READY})
"""READY but not reachable counts as coming: its relay may be restarting."""
