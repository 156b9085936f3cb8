"""Books per engine: what was sent there and has not ended, and what its work has cost so far.

Load is booked when a decision is made and released exactly once, whatever happens to the request. A new incarnation
is a new worker; bookings of the old one run out on the old object.

Not here: choosing, HTTP, clocks (times are passed in, monotonic seconds). Pure.
"""

from dataclasses import dataclass, replace

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.rates import Line, Mean

_BREAKER_FAILURES = 5
_BREAKER_OPEN_S = 5.0
_BREAKER_MAX_S = 60.0
# Source: defaults of common breakers (5 consecutive failures, 5 s doubling to 60 s).


class Worker:
    """One incarnation of an engine, as the router sees it."""

    __slots__ = (
        "active_requests",
        "active_tokens",
        "block_size",
        "capacity_tokens",
        "failures_in_row",
        "id",
        "info",
        "is_reachable",
        "itl",
        "last_token_s",
        "open_until_s",
        "parity",
        "pending_prefill_tokens",
        "prefill",
        "saturated_until_s",
        "slots",
        "transfer_identity",
    )

    def __init__(self, info: EngineInfo, settings: Settings) -> None:
        self.id = info.id
        self.is_reachable = True
        self.active_requests = 0
        self.active_tokens = 0
        self.pending_prefill_tokens = 0
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.saturated_until_s = 0.0
        self.last_token_s = 0.0
        """When any of its streams last brought a token."""
        self.parity = "unverified"
        """Outcome of the tokenizer check: `verified`, `unverified`, `mismatch`."""
        self.block_size = 0
        """Tokens; 0 until the engine or its events say it."""
        self.transfer_identity = ""
        """The engine id in its first transfer parameters; fixed for the incarnation."""
        self.prefill = Line(settings.prefill_base_ms, 1000.0 / settings.prefill_tokens_s, 2048.0)
        """Milliseconds to the first token by tokens to prefill."""
        self.itl = Line(settings.itl_ms, settings.itl_slope_ms, 32.0)
        """Milliseconds between tokens by sequences running."""
        self.update(info, settings)

    def update(self, info: EngineInfo, settings: Settings) -> None:
        """Take newer facts about the same incarnation."""
        self.info = info
        self.block_size = info.block_size_tokens or self.block_size
        self.capacity_tokens = info.kv_capacity_tokens
        self.slots = info.max_num_seqs or settings.default_slots

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

    def book(self, prompt_tokens: int, uncached_tokens: int, output_tokens: int) -> "Booking":
        """Enter a request into the books; release the booking exactly once."""
        self.active_requests += 1
        self.active_tokens += prompt_tokens + output_tokens
        self.pending_prefill_tokens += uncached_tokens
        return Booking(self, prompt_tokens + output_tokens, uncached_tokens)

    def failed(self, now_s: float) -> None:
        """Count a failure; several in a row keep the engine out for a while that doubles."""
        self.failures_in_row += 1
        if self.failures_in_row >= _BREAKER_FAILURES:
            doubled = _BREAKER_OPEN_S * 2.0 ** (self.failures_in_row - _BREAKER_FAILURES)
            self.open_until_s = now_s + min(doubled, _BREAKER_MAX_S)

    def succeeded(self, now_s: float) -> None:
        """Note that a request brought what it should."""
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.last_token_s = now_s

    def saturated(self, now_s: float, retry_after_s: float) -> None:
        """Keep new requests away for as long as the engine asked, at least a second, at most a minute."""
        self.saturated_until_s = now_s + min(max(retry_after_s, 1.0), 60.0)


class Booking:
    """One request's entry in one engine's books."""

    __slots__ = ("_prefill_tokens", "_tokens", "_worker", "is_released", "prefill_ahead_tokens")

    def __init__(self, worker: Worker, tokens: int, prefill_tokens: int) -> None:
        self._worker = worker
        self._tokens = tokens
        self._prefill_tokens = prefill_tokens
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

    def prefill_here(self, tokens: int) -> None:
        """Take on a prefill that was to happen elsewhere."""
        self._worker.pending_prefill_tokens += tokens
        self._prefill_tokens += tokens
        self.prefill_ahead_tokens = self._worker.pending_prefill_tokens

    def prefill_ended(self) -> None:
        """Note that the first token came: nothing of this request waits for prefill any more."""
        self._worker.pending_prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def release(self) -> None:
        """Take the request out of the books."""
        assert not self.is_released, "a booking is released once"
        self.is_released = True
        self.prefill_ended()
        self._worker.active_requests -= 1
        self._worker.active_tokens -= self._tokens


@dataclass(frozen=True, slots=True)
class Readiness:
    """What can be said about the engines that could do a leg."""

    serving: int
    """Ready and reachable."""
    coming: int
    """Starting, restarting, or behind a relay that does not answer just now: worth waiting for."""


class WorkerTable:
    """All engines known, by id; one incarnation each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workers: dict[str, Worker] = {}
        self.output_tokens = Mean(128.0)
        """Tokens a request generates, learned over all of them; the start is a guess."""

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
            return False
        fresh = Worker(info, self._settings)
        if known is not None:
            # The machine is the same: what its work costs is the best guess for the new start too.
            fresh.prefill, fresh.itl = known.prefill, known.itl
        self._workers[info.id] = fresh
        return True

    def remove(self, engine_id: str) -> None:
        """Forget an engine; its bookings run out on their own."""
        self._workers.pop(engine_id, None)

    def set_reachable(self, engine_id: str, *, is_reachable: bool) -> None:
        """Note whether the way to an engine (its relay, its port) works."""
        worker = self._workers.get(engine_id)
        if worker is not None:
            worker.is_reachable = is_reachable

    def set_state(self, engine_id: str, state: EngineState) -> None:
        """Note a change of state that was seen before the facts of its source changed."""
        worker = self._workers.get(engine_id)
        if worker is not None:
            worker.update(replace(worker.info, state=state), self._settings)

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
