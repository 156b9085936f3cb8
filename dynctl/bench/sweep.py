"""Loads one after the other → the highest that meets the goals (the knee), what ends it, and what to do. Pure.

Not here: playing (`cli.bench_series`), what a load is (`arrivals`), when a goal is met (`report`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynctl.bench.advice import on_missed_goals
from dynctl.bench.arrivals import MAX_CONCURRENCY, Load, parse_load
from dynctl.bench.record import DEFINITIONS as RECORDED
from dynctl.bench.report import Report, Setting
from dynctl.errors import ExitCode, UsageError

SCHEMA = "dynctl.bench.sweep/1"
MAX_STAGES = 12
CLOSE_RATIO = 1.1
"""A search ends once the lowest load that missed is at most so many times the highest that met its goals."""
MAX_HALVINGS = 4
MAX_RATE_RPS = 1e5

DEFINITIONS = {
    **RECORDED,
    "stage": "a run of its own (warm-up, measured time, all answers awaited) at one load, with prompts of its own; played once "
    "more when the load generator was the limit",
    "met": "all goals at p99 hold, and at most 1% of requests failed; null where the load generator was the limit",
    "knee": "the highest load that met the goals, below the lowest that missed them",
    "is_bounded": "whether a higher load missed the goals: else the knee is at least this",
    "per_gpu": "over the GPUs of --gpus, else of the deployment's plan; null where neither is known",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One load, and what came of it."""

    load: str
    amount: float
    """Requests per second, or requests at a time."""
    is_met: bool | None
    """None: the load generator was the limit, so nobody knows."""
    missed: tuple[str, ...]
    """Goals that do not hold."""
    client_limited: str
    num_requests: int
    failed_ratio: float
    completed_rps: float
    output_tok_s: float
    tok_s_user: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    """Between chunks where the server counts no tokens per chunk."""
    e2e_p50_ms: float | None
    hit_ratio: float | None
    goodput_rps: float | None
    hint: str
    """Of a load that missed its goals: which pool to add to."""


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest load that meets the goals."""

    load: str
    amount: float
    is_bounded: bool
    completed_rps: float
    output_tok_s: float
    completed_rps_per_gpu: float | None
    output_tok_s_per_gpu: float | None
    missed_above: tuple[str, ...]
    """Goals that the next higher load missed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What `bench run` with several loads, or with `--load sweep`, writes."""

    schema: str
    setting: Setting
    """Of the first stage; load and seed are each stage's own."""
    num_gpus: int | None
    stages: tuple[Stage, ...]
    """In the order they were played: their directories are stage-1, stage-2, …"""
    knee: Knee | None
    is_partial: bool
    """Interrupted: the stages that had ended by then."""
    advice: str
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    @property
    def exit_code(self) -> ExitCode:
        """6 when no load met the goals."""
        if self.is_partial:
            return ExitCode.INTERRUPTED
        return ExitCode.OK if self.knee is not None else ExitCode.GATE


class Course(Protocol):
    """Which loads are played."""

    def next(self, stages: Sequence[Stage]) -> Load | None:
        """The next one, by what came of those before; None: that was all."""
        ...


@dataclass(frozen=True, slots=True)
class Steps:
    """Loads that were named, from the lowest up."""

    loads: tuple[Load, ...]

    @property
    def first(self) -> Load:
        """The lowest."""
        return self.loads[0]

    def next(self, stages: Sequence[Stage]) -> Load | None:
        """Take the next."""
        return self.loads[len(stages)] if len(stages) < len(self.loads) else None

    def __str__(self) -> str:
        return f"{len(self.loads)} loads from {self.loads[0]} to {self.loads[-1]}"


@dataclass(frozen=True, slots=True)
class Search:
    """Doubles the load until goals are missed, then halves the gap between met and missed until that is small."""

    first: Load

    def next(self, stages: Sequence[Stage]) -> Load | None:
        """Choose by the stages so far; ends where the load generator is the limit, since nothing is learnt beyond."""
        if len(stages) >= MAX_STAGES or any(stage.is_met is None for stage in stages):
            return None
        met, missed = bounds(stages)
        if missed is None:
            amount = amount_of(self.first) if met is None else 2 * met.amount
        elif met is None:
            if len(stages) > MAX_HALVINGS:
                return None
            amount = missed.amount / 2
        else:
            if missed.amount <= CLOSE_RATIO * met.amount:
                return None
            amount = math.sqrt(met.amount * missed.amount)
        return self._load(amount, stages)

    def _load(self, amount: float, stages: Sequence[Stage]) -> Load | None:
        """A load of about so much, on a number that can be read; None when it was played already, or is too much."""
        if self.first.is_open:
            amount = float(f"{amount:.3g}")
            load = Load(self.first.kind, rate_rps=amount)
            is_possible = amount <= MAX_RATE_RPS
        else:
            load = Load(self.first.kind, concurrency=max(1, round(amount)))
            is_possible = load.concurrency <= MAX_CONCURRENCY
        is_new = str(load) not in {stage.load for stage in stages}
        return load if is_possible and is_new else None

    def __str__(self) -> str:
        return f"a search from {self.first}, at most {MAX_STAGES} loads"


def parse_course(text: str) -> Steps | Search | None:
    """Read `poisson:1,2,4` (each a load of its own), `sweep` or `sweep:concurrency:8`; None for a single load.

    Raises:
        UsageError: when a part of it is no load.
    """
    kind, _, rest = text.partition(":")
    if kind == "sweep":
        first, _, amount = rest.partition(":")
        return Search(parse_load(f"{first or 'poisson'}:{amount or 1}"))
    amounts = [amount.strip() for amount in rest.split(",")]
    if len(amounts) < 2:
        return None
    loads = sorted((parse_load(f"{kind}:{amount}") for amount in amounts), key=amount_of)
    if len({str(load) for load in loads}) < len(loads):
        raise UsageError(f"--load {text!r} names a load twice", "to repeat a load: --repeat N")
    return Steps(tuple(loads))


def amount_of(load: Load) -> float:
    """Requests per second, or at a time."""
    return load.rate_rps if load.is_open else float(load.concurrency)


def bounds(stages: Sequence[Stage]) -> tuple[Stage | None, Stage | None]:
    """The highest load that met the goals below any that missed them, and the lowest that missed them."""
    missed = min((s for s in stages if s.is_met is False), key=lambda s: s.amount, default=None)
    met = [s for s in stages if s.is_met and (missed is None or s.amount < missed.amount)]
    return max(met, key=lambda s: s.amount, default=None), missed


def stage_of(load: Load, report: Report) -> Stage:
    """Take the figures of one load from its report."""
    metrics, requests = report.metrics, report.requests
    ttft, e2e = metrics.get("ttft_ms"), metrics.get("e2e_ms")
    itl = metrics.get("itl_ms", metrics.get("chunk_gap_ms"))
    is_met = all(check.is_met for check in report.checks)
    missed = tuple(check.name for check in report.checks if not check.is_met)
    return Stage(
        load=str(load),
        amount=amount_of(load),
        is_met=None if report.client_limited else is_met,
        missed=missed,
        client_limited=report.client_limited,
        num_requests=requests.sent,
        failed_ratio=requests.failed / requests.sent if requests.sent else 0.0,
        completed_rps=requests.completed_rps,
        output_tok_s=report.throughput.output_tok_s,
        tok_s_user=report.throughput.tok_s_user,
        ttft_p50_ms=ttft.p50 if ttft else None,
        ttft_p99_ms=ttft.p99 if ttft else None,
        itl_p99_ms=itl.p99 if itl else None,
        e2e_p50_ms=e2e.p50 if e2e else None,
        hit_ratio=report.kv.cached_ratio,
        goodput_rps=report.goodput.rps if report.goodput else None,
        hint=next(on_missed_goals(report), ""),
    )


def make_sweep(
    setting: Setting, stages: Sequence[Stage], num_gpus: int | None, *, is_partial: bool = False
) -> Sweep:
    """Find the knee among the stages."""
    met, missed = bounds(stages)
    knee = None if met is None else _knee(met, missed, num_gpus)
    return Sweep(
        schema=SCHEMA,
        setting=setting,
        num_gpus=num_gpus,
        stages=tuple(stages),
        knee=knee,
        is_partial=is_partial,
        advice=_advice(knee, missed, stages),
    )


def _knee(met: Stage, missed: Stage | None, num_gpus: int | None) -> Knee:
    return Knee(
        load=met.load,
        amount=met.amount,
        is_bounded=missed is not None,
        completed_rps=met.completed_rps,
        output_tok_s=met.output_tok_s,
        completed_rps_per_gpu=met.completed_rps / num_gpus if num_gpus else None,
        output_tok_s_per_gpu=met.output_tok_s / num_gpus if num_gpus else None,
        missed_above=missed.missed if missed else (),
    )


def _advice(knee: Knee | None, missed: Stage | None, stages: Sequence[Stage]) -> str:
    """One sentence to act on."""
    limited = next((stage for stage in stages if stage.is_met is None), None)
    if knee is None and missed is None:
        return "run the load generator on another machine: it was the limit, so this says nothing of the server"
    if missed is not None:
        why = missed.hint or f"{', '.join(missed.missed)} does not hold"
        if knee is None:
            return f"no load up to {missed.load} is known to meet the goals; there: {why}"
        return f"up to {knee.load} the goals hold; at {missed.load}: {why}"
    assert knee is not None
    if limited is not None:
        return (
            f"up to {knee.load} the goals hold; at {limited.load} the load generator was the limit: "
            "run it on another machine to go on"
        )
    return f"the goals hold at {knee.load}, the highest load that was tried: try higher ones"
