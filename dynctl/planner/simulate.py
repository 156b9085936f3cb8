"""Replays a workload through the router's own placement and simulated engines in virtual time.

The router's table of engines, prefix index, policy and books are the real ones; time jumps, so an hour takes seconds.
The same trace, engines and seed give the same report.
Not here: making engines from a plan (`virtual_plan`), reading traces (`trace`).
IO: none of its own; the router's placement logs when a policy fails.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from dynctl import registry
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.plan import Role
from dynctl.core.workload import Slo
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.tracker import Delta
from dynctl.planner.prompts import Prompts
from dynctl.planner.replayed import EngineLoad, SimReport, spread_of
from dynctl.planner.trace import Call, Trace
from dynctl.planner.virtual import VirtualClock, VirtualEngine, VirtualEngineSpec
from dynctl.router.api.shapes import Usage
from dynctl.router.choosing import Policy
from dynctl.router.config import Settings
from dynctl.router.decisions import DecisionRing
from dynctl.router.handoff import Leg
from dynctl.router.ledger import Ledger
from dynctl.router.metrics import Metrics
from dynctl.router.placement import Order, Placed, Placement, Unplaced
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.route_keys import KeySums
from dynctl.router.worker_table import WorkerTable
from dynctl.sim.scheduler import Output
from dynctl.sim.sequence import SimSequence, Wish

_SEED = "simulation"
SENDING_S = 0.0015
"""Router and HTTP before an engine has a request: parsing, choosing, a connection. Measured on one machine."""
_HEARING_S = 0.001
"""From an engine's token to the client."""
_EVENT_S = 0.003
"""From a change in an engine's cache to the router's index."""
_INCARNATION = "1"


@dataclass(frozen=True, slots=True)
class SimSetting:
    """How a replay is made."""

    policy: str = "kv"
    seed: int = 1
    transfer_bytes_s: float = 1e10
    """Of one pull from a prefill to a decode engine."""
    sending_s: float = SENDING_S
    """From the client to an engine's queue."""
    settings: Settings = field(default_factory=Settings)


@dataclass(slots=True, eq=False)
class _Flight:
    call: Call
    ids: Sequence[int]
    prompt: Prompt
    ledger: Ledger
    number: int
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    gaps_s: list[float] = field(default_factory=list)
    kept: SimSequence | None = None
    is_done: bool = False


class Replay:
    """One replay: `run` it once."""

    def __init__(
        self, trace: Trace, engines: Sequence[VirtualEngineSpec], setting: SimSetting
    ) -> None:
        self._trace, self._setting = trace, setting
        self._clock = VirtualClock()
        self._metrics, self._ring = Metrics(), DecisionRing(16)
        self._workers = WorkerTable(setting.settings)
        self._index = PrefixIndex(setting.settings.index_max_bytes)
        self._hashers = Hashers(_SEED)
        policy: Policy = registry.load("dynctl.router.policies", setting.policy, "POLICY")
        self._placement = Placement(
            self._workers,
            self._index,
            policy,
            setting.settings,
            random.Random(setting.seed),  # noqa: S311 - spreads load, guards nothing
        )
        self._engines = {spec.id: self._engine(spec) for spec in engines}
        self._prompts = Prompts(trace.block_tokens)
        self._flights: list[_Flight] = []
        self._waiting: list[_Flight] = []
        self._by_sequence: dict[SimSequence, tuple[_Flight, VirtualEngine]] = {}

    def _engine(self, spec: VirtualEngineSpec) -> VirtualEngine:
        source = Source(spec.id, _INCARNATION)
        self._index.begin(source)
        self._workers.put(
            EngineInfo(
                id=spec.id,
                incarnation=_INCARNATION,
                state=EngineState.READY,
                role=spec.role.value,
                deployment="",
                kind="sim",
                model="sim",
                block_size_tokens=spec.block_size,
                kv_capacity_tokens=(spec.num_blocks - 1) * spec.block_size,
                max_num_seqs=spec.max_num_seqs,
            )
        )

        def on_delta(delta: Delta) -> None:
            self._clock.after(_EVENT_S, lambda: self._learn(source, delta))

        return VirtualEngine(
            spec, self._clock, on_delta, self._fetch, BlockHasher(_SEED.encode(), spec.block_size)
        )

    def _learn(self, source: Source, delta: Delta) -> None:
        if delta.cleared:
            self._index.clear(source)
        self._index.remove(source, delta.removed)
        self._index.store(source, delta.stored)

    def run(self, slo: Slo) -> SimReport:
        """Replay everything and say what came of it."""
        for number, call in enumerate(self._trace.calls):
            self._clock.at(call.at_s + self._setting.sending_s, partial(self._arrive, call, number))
        self._clock.run()
        return self._report(slo)

    # One request

    def _arrive(self, call: Call, number: int) -> None:
        ids = self._prompts.of(call, number)
        flight = _Flight(
            call,
            ids,
            Prompt.known(self._hashers, ids),
            Ledger(self._metrics, KeySums(), self._ring, self._clock.now_s),
            number,
        )
        self._flights.append(flight)
        if self._waiting or not self._place(flight):
            self._waiting.append(flight)

    def _place(self, flight: _Flight) -> bool:
        now_s = self._clock.now_s
        order = Order(
            str(flight.number),
            flight.prompt,
            None,
            flight.call.osl_tokens,
            route_key=_route_key(flight.call),
        )
        placed = self._placement.place(order, now_s)
        if isinstance(placed, Unplaced):
            return False
        flight.ledger.placed(placed, self._setting.policy, now_s)
        self._send_first(flight, placed)
        return True

    def _send_first(self, flight: _Flight, placed: Placed) -> None:
        flight.ledger.sent_s = self._clock.now_s
        if placed.prefill is None:
            flight.ledger.needs_prefill = False
            self._send_main(flight, is_remote=False)
            return
        engine = self._engines[placed.prefill.worker.id]
        wish = Wish(f"{flight.number}-p", flight.ids, 1, ignore_eos=True, is_remote_decode=True)

        def on_output(output: Output) -> None:
            self._clock.after(_HEARING_S, lambda: self._prefilled(flight, output.sequence))

        sequence = engine.submit(wish, on_output)
        self._by_sequence[sequence] = flight, engine

    def _prefilled(self, flight: _Flight, sequence: SimSequence) -> None:
        ledger, now_s = flight.ledger, self._clock.now_s
        flight.kept = sequence
        flight.num_cached = sequence.num_cached_tokens
        ledger.answered(Leg.PREFILL, _usage(flight, 1))
        ledger.first_token(Leg.PREFILL, now_s)
        ledger.bookings.pop(Leg.PREFILL).release()
        ledger.sent_s = now_s
        ledger.needs_prefill = False
        self._send_main(flight, is_remote=True)
        self._pump()

    def _send_main(self, flight: _Flight, *, is_remote: bool) -> None:
        engine = self._engines[flight.ledger.bookings[Leg.MAIN].worker.id]
        wish = Wish(
            str(flight.number),
            flight.ids,
            flight.call.osl_tokens,
            ignore_eos=True,
            remote_prefill={} if is_remote else None,
        )

        def on_output(output: Output) -> None:
            is_last = output.finish_reason is not None
            self._clock.after(
                _HEARING_S, lambda: self._heard(flight, output.sequence, is_last=is_last)
            )

        def submit() -> None:
            sequence = engine.submit(wish, on_output)
            self._by_sequence[sequence] = flight, engine

        # The first leg's sending is in the arrival; a second one goes over the wire again.
        self._clock.after(self._setting.sending_s if is_remote else 0.0, submit)

    def _fetch(self, sequence: SimSequence) -> None:
        self._clock.after(0.0, lambda: self._pull(sequence))

    def _pull(self, sequence: SimSequence) -> None:
        flight, engine = self._by_sequence[sequence]
        source = flight.kept
        assert source is not None
        spec = engine.spec
        num_blocks = max(0, -(-sequence.num_prompt // spec.block_size) - len(sequence.block_states))
        num_bytes = num_blocks * spec.block_size * spec.kv_bytes_per_token

        def done() -> None:
            engine.fetched(sequence, source)
            self._by_sequence[source][1].release(source)
            del self._by_sequence[source]

        self._clock.after(num_bytes / self._setting.transfer_bytes_s + _HEARING_S, done)

    def _heard(self, flight: _Flight, sequence: SimSequence, *, is_last: bool) -> None:
        now_s, ledger = self._clock.now_s, flight.ledger
        flight.num_tokens += 1
        if flight.num_tokens == 1:
            flight.first_s = now_s
            if flight.kept is None:
                flight.num_cached = sequence.num_cached_tokens
            ledger.first_token(Leg.MAIN, now_s)
        else:
            flight.gaps_s.append(now_s - flight.last_s)
        flight.last_s = now_s
        ledger.tokens(flight.num_tokens, now_s)
        if is_last:
            del self._by_sequence[sequence]
            flight.is_done = True
            ledger.ended(_usage(flight, flight.num_tokens))
            self._workers.lengths.learn(_route_key(flight.call), flight.num_tokens)
            ledger.bookings.pop(Leg.MAIN).release()
            self._pump()

    def _pump(self) -> None:
        """Place whoever waits and finds room now; who waited too long is lost."""
        limit_s = self._clock.now_s - self._setting.settings.queue_timeout_s
        self._waiting = [f for f in self._waiting if f.ledger.arrived_s > limit_s]
        while self._waiting and self._place(self._waiting[0]):
            self._waiting.pop(0)

    # The report

    def _report(self, slo: Slo) -> SimReport:
        done = [flight for flight in self._flights if flight.is_done]
        ttfts = [(f.first_s - f.call.at_s) * 1e3 for f in done]
        tpots = [
            (f.last_s - f.first_s) * 1e3 / (f.num_tokens - 1) for f in done if f.num_tokens > 1
        ]
        good = sum(_is_good(flight, slo) for flight in done)
        prompt_tokens = sum(f.call.isl_tokens for f in done)
        duration_s = max((f.last_s for f in done), default=0.0)
        loads = tuple(self._load(engine, duration_s) for engine in self._engines.values())
        first = Role.PREFILL if any(e.role == Role.PREFILL for e in loads) else Role.AGGREGATED
        work = [e.num_prefill_tokens + e.num_output_tokens for e in loads if e.role == first]
        return SimReport(
            name=self._trace.name,
            policy=self._setting.policy,
            seed=self._setting.seed,
            num_calls=len(self._flights),
            num_failed=len(self._flights) - len(done),
            duration_s=duration_s,
            ttft_ms=spread_of(ttfts),
            itl_ms=spread_of([gap * 1e3 for f in done for gap in f.gaps_s]),
            tpot_ms=spread_of(tpots),
            hit_ratio=sum(f.num_cached for f in done) / prompt_tokens if prompt_tokens else 0.0,
            out_tokens_s=sum(f.num_tokens for f in done) / duration_s if duration_s else 0.0,
            goodput_ratio=good / len(self._flights),
            load_spread=max(work) * len(work) / sum(work) if sum(work) else 1.0,
            engines=loads,
        )

    def _load(self, engine: VirtualEngine, duration_s: float) -> EngineLoad:
        tally = engine.tally
        return EngineLoad(
            engine.spec.id,
            engine.spec.role.value,
            tally.num_requests,
            tally.busy_s / duration_s if duration_s else 0.0,
            tally.peak_kv_ratio,
            engine.scheduler.counts.num_preemptions,
            tally.num_prefill_tokens,
            tally.num_output_tokens,
        )


def simulate(
    trace: Trace, engines: Sequence[VirtualEngineSpec], setting: SimSetting, slo: Slo
) -> SimReport:
    """Replay a trace through a router and engines."""
    return Replay(trace, engines, setting).run(slo)


def _route_key(call: Call) -> str:
    """What the router takes for a kind of request where the client names none."""
    return f"completions:{call.osl_tokens}"


def _usage(flight: _Flight, num_tokens: int) -> Usage:
    return msgspec.convert(
        {
            "prompt_tokens": flight.call.isl_tokens,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": flight.num_cached},
        },
        Usage,
    )


def _is_good(flight: _Flight, slo: Slo) -> bool:
    ttft_ms = (flight.first_s - flight.call.at_s) * 1e3
    if slo.ttft_ms is not None and ttft_ms > slo.ttft_ms:
        return False
    if slo.itl_ms is None or flight.num_tokens < 2:
        return True
    return (flight.last_s - flight.first_s) * 1e3 / (flight.num_tokens - 1) <= slo.itl_ms
