"""Books per engine: what was sent there and has not ended, and what its work has cost so far.

Load is booked when a decision is made and released exactly once, whatever happens to the request. A new incarnation
is a new worker; bookings of the old one run out on the old object.

Not here: choosing, HTTP, clocks (times are passed in, monotonic seconds). Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.choosing import WATERMARK, Load
from dynctl.router.config import Settings
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.rates import Line, OutputLengths

_BREAKER_FAILURES = 5
_BREAKER_OPEN_S = 5.0
_BREAKER_MAX_S = 60.0
# Source: defaults of common breakers (5 consecutive failures, 5 s doubling to 60 s).

_RECENT_S = 30.0
"""Age at which a request counts 1/e in what an engine had lately."""

_SLOW_START_S = 30.0
_SLOW_START_SHARE = 2.0
"""Fair shares an engine that joins others may take at most during that time. Source: row O7."""

_MIN_MS_PER_TOKEN = 0.001
"""A million tokens a second: prefill that was measured as free still counts."""

_MAX_UNIT = 1e12
_MAX_SPREAD = 4096


class Tally:
    """What the engines of one table know of each other: who is full, and what prefill costs on any of them.

    An engine nobody has seen at work is taken for one like the others: with the rates assumed at the start it would
    look dearer than every engine that turned out to be faster, and so never be tried.
    """

    __slots__ = ("itl", "limited_until_s", "num_full", "prefill", "unseen", "version")

    def __init__(self, settings: Settings) -> None:
        self.prefill = Line(settings.prefill_base_ms, 1000.0 / settings.prefill_tokens_s, 2048.0)
        """Milliseconds a prefill takes by tokens to prefill."""
        self.itl = Line(settings.itl_ms, settings.itl_slope_ms, 32.0)
        """Milliseconds between tokens by sequences running."""
        self.unseen: set[Worker] = set()
        """Engines without a prefill of their own so far."""
        self.version = 0
        """Changes when a block size or the outcome of a tokenizer check does."""
        self.num_full = 0
        self.limited_until_s = 0.0
        """Until when some engine is kept out by its breaker or by its own wish."""


class Worker:
    """One incarnation of an engine, as the router sees it."""

    __slots__ = (
        "_block_size",
        "_is_full",
        "_parity",
        "_tally",
        "active_requests",
        "active_tokens",
        "cached_load",
        "capacity_tokens",
        "failures_in_row",
        "free_at_s",
        "id",
        "info",
        "is_reachable",
        "itl",
        "joined",
        "last_token_s",
        "num_sent",
        "open_until_s",
        "pending_prefill_tokens",
        "pending_prefills",
        "prefill",
        "prefill_ended_s",
        "recent",
        "saturated_until_s",
        "slots",
        "transfer_identity",
        "was_serving",
    )

    def __init__(self, info: EngineInfo, settings: Settings, tally: Tally | None = None) -> None:
        self.id = info.id
        self.is_reachable = True
        self.active_requests = 0
        self.active_tokens = 0
        self.pending_prefill_tokens = 0
        self.pending_prefills = 0
        self.free_at_s = 0.0
        """When its queued prefills are expected to be over."""
        self.prefill_ended_s = 0.0
        """When it last brought a first token."""
        self.recent = 0.0
        """Requests sent here lately, in units that grow with time (`WorkerTable.recent_unit`)."""
        self.num_sent = 0
        self.was_serving = False
        """Whether requests could be sent here before."""
        self.joined: Joined | None = None
        """Set while it starts slowly."""
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.saturated_until_s = 0.0
        self.last_token_s = 0.0
        """When any of its streams last brought a token."""
        self._tally = tally or Tally(settings)
        self._tally.unseen.add(self)
        self._parity = "unverified"
        self._block_size = 0
        self.transfer_identity = ""
        """The engine id in its first transfer parameters; fixed for the incarnation."""
        self.prefill = self._tally.prefill
        self.itl = self._tally.itl
        self.cached_load: Load | None = None
        self._is_full = False
        self.update(info, settings)

    def update(self, info: EngineInfo, settings: Settings) -> None:
        """Take newer facts about the same incarnation."""
        self.info = info
        self.block_size = info.block_size_tokens or self.block_size
        self.capacity_tokens = info.kv_capacity_tokens
        self.slots = info.max_num_seqs or settings.default_slots
        self._changed()

    def load(self) -> Load:
        """Its facts for a policy; kept in `cached_load` until one changes."""
        prefill, capacity = self.prefill, self.capacity_tokens
        self.cached_load = load = Load(
            self.id,
            max(prefill.slope, _MIN_MS_PER_TOKEN),
            prefill.base,
            self.free_at_s,
            self.itl.slope * self.active_requests,
            self.recent,
            WATERMARK * capacity - self.active_tokens if capacity else math.inf,
            capacity,
            self.active_requests,
            self.active_tokens,
            self.pending_prefill_tokens,
        )
        return load

    def _changed(self) -> None:
        self.cached_load = None
        is_full = self.active_requests >= self.slots
        if is_full != self._is_full:
            self._is_full = is_full
            self._tally.num_full += 1 if is_full else -1

    def prefill_took(self, tokens: int, ms: float) -> None:
        """Learn what a prefill of so many tokens costs here."""
        tally = self._tally
        if self in tally.unseen:
            tally.unseen.discard(self)
            self.prefill, self.itl = tally.prefill.copy(), tally.itl.copy()
        self.prefill.learn(tokens, ms)
        self.cached_load = None
        tally.prefill.learn(tokens, ms)
        for other in tally.unseen:
            other.cached_load = None

    def gaps_took(self, ms: float) -> None:
        """Learn what the gap between two tokens is beside the sequences that run now."""
        self._tally.itl.learn(self.active_requests, ms)
        if self.itl is not self._tally.itl:
            self.itl.learn(self.active_requests, ms)
        self.cached_load = None

    @property
    def parity(self) -> str:
        """Outcome of the tokenizer check: `verified`, `unverified`, `mismatch`."""
        return self._parity

    @parity.setter
    def parity(self, parity: str) -> None:
        self._parity = parity
        self._tally.version += 1

    @property
    def block_size(self) -> int:
        """Tokens; 0 until the engine or its events say it."""
        return self._block_size

    @block_size.setter
    def block_size(self, tokens: int) -> None:
        if tokens != self._block_size:
            self._block_size = tokens
            self._tally.version += 1

    @property
    def has_blocks(self) -> bool:
        """Whether its cache can be considered: it counts tokens as we do, in blocks of a known size."""
        return self._block_size > 0 and self._parity != "mismatch"

    @property
    def incarnation(self) -> str:
        """Which start of the engine this is."""
        return self.info.incarnation

    @property
    def key(self) -> tuple[str, str]:
        """Engine and incarnation: what exclusions name, so that a restarted engine is a fresh chance."""
        return (self.info.id, self.info.incarnation)

    def is_serving(self) -> bool:
        """Whether it takes new requests at all."""
        return self.is_reachable and self.info.state is EngineState.READY

    def has_room(self, now_s: float) -> bool:
        """Whether one more request may go there now."""
        return (
            self.active_requests < self.slots
            and now_s >= self.open_until_s
            and now_s >= self.saturated_until_s
        )

    def book(
        self,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
        now_s: float = 0.0,
        unit: float = 1.0,
    ) -> "Booking":
        """Enter a request into the books; release the booking exactly once. `unit` is `WorkerTable.recent_unit`."""
        self.active_requests += 1
        self.active_tokens += prompt_tokens + output_tokens
        self.num_sent += 1
        self.recent += unit
        booking = Booking(self, prompt_tokens + output_tokens)
        if uncached_tokens:
            booking.prefill_here(uncached_tokens, now_s)
        self._changed()
        return booking

    def released(self, tokens: int) -> None:
        """Take one request out of the books; for its booking only."""
        self.active_requests -= 1
        self.active_tokens -= tokens
        self._changed()

    def failed(self, now_s: float) -> None:
        """Count a failure; several in a row keep the engine out for a while that doubles."""
        self.failures_in_row += 1
        if self.failures_in_row >= _BREAKER_FAILURES:
            doubled = _BREAKER_OPEN_S * 2.0 ** (self.failures_in_row - _BREAKER_FAILURES)
            self.open_until_s = now_s + min(doubled, _BREAKER_MAX_S)
            self._limit(self.open_until_s)

    def succeeded(self, now_s: float) -> None:
        """Note that a request brought what it should."""
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.last_token_s = now_s

    def saturated(self, now_s: float, retry_after_s: float) -> None:
        """Keep new requests away for as long as the engine asked, at least a second, at most a minute."""
        self.saturated_until_s = now_s + min(max(retry_after_s, 1.0), 60.0)
        self._limit(self.saturated_until_s)

    def _limit(self, until_s: float) -> None:
        self._tally.limited_until_s = max(self._tally.limited_until_s, until_s)


@dataclass(frozen=True, slots=True)
class Joined:
    """When an engine joined others that were serving already, and what had been sent by then."""

    until_s: float
    num_sent: int
    """By the router, to all engines."""

    def allows(self, worker: Worker, now_s: float, num_sent: int, num_workers: int) -> bool:
        """Whether the engine had less than its bound of fair shares since then."""
        fair = (num_sent - self.num_sent) / num_workers
        return now_s >= self.until_s or worker.num_sent < 1 + _SLOW_START_SHARE * fair


class Booking:
    """One request's entry in one engine's books."""

    __slots__ = (
        "_prefill_ms",
        "_prefill_tokens",
        "_tokens",
        "_worker",
        "is_released",
        "prefill_ahead_tokens",
    )

    def __init__(self, worker: Worker, tokens: int) -> None:
        self._worker = worker
        self._tokens = tokens
        self._prefill_tokens = 0
        self._prefill_ms = 0.0
        self.is_released = False
        self.prefill_ahead_tokens = worker.pending_prefill_tokens
        """Tokens the engine had to prefill when this was booked, its own included."""

    @property
    def worker(self) -> Worker:
        """Whose books these are."""
        return self._worker

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill of this request still counts here."""
        return self._prefill_tokens > 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens expected to be computed here for this request."""
        return self._prefill_tokens

    def prefill_here(self, tokens: int, now_s: float) -> None:
        """Take on a prefill."""
        worker = self._worker
        self._prefill_ms += worker.prefill.at(tokens)
        self._prefill_tokens += tokens
        worker.pending_prefill_tokens += tokens
        worker.pending_prefills += 1
        worker.free_at_s = max(worker.free_at_s, now_s) + self._prefill_ms / 1e3
        worker.cached_load = None
        self.prefill_ahead_tokens = worker.pending_prefill_tokens

    def prefill_ended(self, now_s: float | None = None) -> None:
        """Note that nothing of this request waits for prefill any more; with a time: since its first token came then."""
        if not self._prefill_tokens:
            return
        worker = self._worker
        worker.pending_prefill_tokens -= self._prefill_tokens
        worker.pending_prefills -= 1
        if now_s is None:
            worker.free_at_s -= self._prefill_ms / 1e3
        else:
            # What is left is counted from here, so that a wrong guess does not last.
            base, slope = worker.prefill.base, worker.prefill.slope
            left_ms = worker.pending_prefills * base + worker.pending_prefill_tokens * slope
            worker.free_at_s = now_s + left_ms / 1e3
            worker.prefill_ended_s = now_s
        self._prefill_tokens = 0
        self._prefill_ms = 0.0
        worker.cached_load = None

    def release(self) -> None:
        """Take the request out of the books."""
        assert not self.is_released, "a booking is released once"
        self.is_released = True
        self.prefill_ended()
        self._worker.released(self._tokens)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What can be said about the engines that could do a leg."""

    serving: int
    """Ready and reachable."""
    coming: int
    """Starting, restarting, or behind a relay that does not answer just now: worth waiting for."""


class View:
    """The serving engines of some roles, as long as none comes, goes or changes; `WorkerTable.view` makes it."""

    __slots__ = ("_layout", "_sizes", "_spread", "_tally", "_version", "positions", "workers")

    def __init__(self, workers: Sequence[Worker], tally: Tally) -> None:
        self.workers = workers
        self.positions = {worker.id: position for position, worker in enumerate(workers)}
        self._tally = tally
        self._spread: dict[tuple[int, int], tuple[int, ...]] = {}
        self._sizes: set[int] = set()
        self._layout = self._version = -1

    def block_sizes(self, index: PrefixIndex) -> set[int]:
        """The block sizes of engines whose cache can be considered."""
        if self._layout != index.layout or self._version != self._tally.version:
            self._layout, self._version = index.layout, self._tally.version
            self._spread = {}
            self._sizes = {worker.block_size for worker in self.workers if worker.has_blocks}
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
        self.tally = Tally(settings)
        self.lengths = OutputLengths()
        self.num_sent = 0
        """Requests sent to any engine."""
        self._recent_base_s: float | None = None
        self._num_joining = 0

    def recent_unit(self, now_s: float) -> float:
        """What a request made now weighs in `Worker.recent`: units grow, so that nothing has to be aged."""
        if self._recent_base_s is None:
            self._recent_base_s = now_s
        unit = math.exp((now_s - self._recent_base_s) / _RECENT_S)
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

    def may_limit(self, now_s: float) -> bool:
        """Whether any engine may be without room just now: full, failing, busy, or starting slowly."""
        tally = self.tally
        return bool(tally.num_full or now_s < tally.limited_until_s or self._num_joining)

    def with_room(self, workers: Sequence[Worker], now_s: float) -> list[Worker]:
        """The engines that may take one more; slow starters only when the others have no room either."""
        free = [worker for worker in workers if worker.has_room(now_s)]
        if self._num_joining:
            settled = [worker for worker in free if not self._is_held_back(worker, now_s, workers)]
            return settled or free
        return free

    def _is_held_back(self, worker: Worker, now_s: float, workers: Sequence[Worker]) -> bool:
        joined = worker.joined
        if joined is None:
            return False
        if now_s >= joined.until_s:
            worker.joined = None
            self._num_joining = sum(w.joined is not None for w in self._workers.values())
            return False
        return not joined.allows(worker, now_s, self.num_sent, len(workers))

    def _join(self, worker: Worker, fleet: Sequence[Worker], now_s: float) -> None:
        others = [other for other in fleet if other is not worker and other.num_sent]
        if not others:
            return
        worker.recent = sum(other.recent for other in others) / len(others)
        worker.cached_load = None
        worker.joined = Joined(now_s + _SLOW_START_S, self.num_sent)
        self._num_joining += 1

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
            self._views.clear()
            return False
        fresh = Worker(info, self._settings, self.tally)
        if known is not None:
            # The machine is the same: what its work costs is the best guess for the new start too.
            fresh.prefill, fresh.itl = known.prefill, known.itl
            if known not in self.tally.unseen:
                self.tally.unseen.discard(fresh)
            self.tally.unseen.discard(known)
        self._workers[info.id] = fresh
        self._views.clear()
        return True

    def remove(self, engine_id: str) -> None:
        """Forget an engine; its bookings run out on their own."""
        gone = self._workers.pop(engine_id, None)
        if gone is not None:
            self.tally.unseen.discard(gone)
        self._views.clear()

    def set_reachable(self, engine_id: str, *, is_reachable: bool) -> None:
        """Note whether the way to an engine (its relay, its port) works."""
        worker = self._workers.get(engine_id)
        if worker is not None:
            worker.is_reachable = is_reachable
            self._views.clear()

    def set_state(self, engine_id: str, state: EngineState) -> None:
        """Note a change of state that was seen before the facts of its source changed."""
        worker = self._workers.get(engine_id)
        if worker is not None:
            worker.update(replace(worker.info, state=state), self._settings)
            self._views.clear()

    def serving(self, roles: frozenset[str], model: str | None = None) -> list[Worker]:
        """Engines of these roles that take requests, for one model or any."""
        return [
            worker
            for worker in self._workers.values()
            if worker.info.role in roles
            and (model is None or worker.info.model == model)
            and worker.is_serving()
        ]

    def readiness(self, roles: frozenset[str], model: str | None = None) -> Readiness:
        """Count the engines of these roles that serve or are about to."""
        serving = coming = 0
        for worker in self._workers.values():
            if worker.info.role not in roles or (model is not None and worker.info.model != model):
                continue
            if worker.is_serving():
                serving += 1
            elif worker.info.state in _COMING:
                coming += 1
        return Readiness(serving, coming)


_COMING = frozenset({EngineState.STARTING, EngineState.BACKOFF, EngineState.READY})
"""READY but not reachable counts as coming: its relay may be restarting."""
