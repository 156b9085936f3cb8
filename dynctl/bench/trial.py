"""Two arms that played the same trace in turn on the same engines → what changed, a verdict and what to do. Pure.

Not here: playing (`cli.bench_trial`), how a figure is judged (`compare`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dynctl.bench.changes import Change, Side, Verdict, changed, tolerance_of
from dynctl.bench.compare import DEFINITIONS as COMPARED
from dynctl.bench.compare_text import change_text, interval_text
from dynctl.bench.record import Record
from dynctl.bench.report import Report
from dynctl.bench.resampling import stretch_length
from dynctl.bench.workload import Recorded
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode

SCHEMA = "dynctl.bench.trial/1"
DECIDING = ("ttft_mean", "ttft_p90", "e2e_mean", "failed")
"""A verdict on two arms rests on these. Means: where lines are of a few lengths, a median leaps from one to the next."""
FIGURES = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "itl_p99",
    "tpot_p50",
    "e2e_mean",
    "e2e_p99",
    "hit_rate",
    "failed",
)
LITTLE_SHARED = 0.05
"""A trace that shares less gives no routing anything to find."""
HITS_MOVED = 0.02

DEFINITIONS = {
    **{
        key: COMPARED[key]
        for key in ("change", "better, worse", "not enough data", "hit_rate", "failed")
    },
    "same": "the whole interval lies within 5% (of failed requests 1 point)",
    "interval": "95% bootstrap of the change, seeded: stretches of √n neighbouring lines of the trace are drawn anew, "
    "with all rounds of both arms together, since both played the same lines",
    "order": "arms take turns, and each round begins with the arm that the one before ended with, so that neither is "
    "always first",
    "cold start": "each turn's prompts are made with a seed of its own: no two turns share a block, so none finds what "
    "another left behind; engines then evict what is left first, since it was used longest ago",
    "rounds": "one in which the load generator was the limit is left out with both its turns",
    "improved, worse": "a deciding figure ("
    + ", ".join(DECIDING)
    + ") is better (worse) by more than 5%, failed "
    "requests by a point, and none is the other",
    "no change": "no deciding figure changed by more than that, and each interval leaves no room for it",
    "inconclusive": "neither: figures disagree, or an interval is too wide",
}


class Outcome(StrEnum):
    """What a trial came to, for its second arm."""

    IMPROVED = "improved"
    NO_CHANGE = "no change"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's replay of the whole trace."""

    arm: int
    """0 or 1."""
    report: Report
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """What `bench replay --ab -o json` writes."""

    schema: str
    arms: tuple[str, str]
    order: tuple[str, ...]
    """The arms in the order they played."""
    recorded: Recorded | None
    changes: tuple[Change, ...]
    outcome: Outcome
    advice: str
    client_limited: dict[str, str]
    """By turn in which the load generator was the limit, why; its round is left out."""
    num_rounds: int
    """That count; 0: the load generator was the limit in all, so the figures are not the servers'."""
    is_partial: bool
    """Interrupted: rounds that both arms did not end are left out."""
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    @property
    def exit_code(self) -> ExitCode:
        """A verdict is an answer, whatever it says."""
        return ExitCode.INTERRUPTED if self.is_partial else ExitCode.OK


def order_of(rounds: int) -> list[int]:
    """The arms' turns: A B, B A, A B, …"""
    return [arm for at in range(rounds) for arm in ((0, 1) if at % 2 == 0 else (1, 0))]


def judge_trial(
    arms: tuple[str, str], turns: Sequence[Turn], *, is_partial: bool = False
) -> Trial | None:
    """Judge the rounds that both arms ended; None when there is none."""
    ended = [turn for turn in turns if not turn.report.is_partial]
    rounds = [ended[at : at + 2] for at in range(0, len(ended) - 1, 2)]
    if not rounds:
        return None
    limited = {
        f"round {at + 1}, {arms[turn.arm]}": turn.report.client_limited
        for at, both in enumerate(rounds)
        for turn in both
        if turn.report.client_limited
    }
    sound = [both for both in rounds if not any(turn.report.client_limited for turn in both)]
    whole = [turn for both in (sound or rounds) for turn in both]
    sides = _sides(whole)
    figures = [
        changed(*sides, name, tolerance_of(name), are_paired=True) for name in _figures(whole)
    ]
    changes = tuple(change for change in figures if change is not None)
    outcome = outcome_of(changes) if sound else Outcome.INCONCLUSIVE
    recorded = whole[0].report.setting.recorded
    return Trial(
        SCHEMA,
        arms,
        tuple(arms[turn.arm] for both in rounds for turn in both),
        recorded,
        changes,
        outcome,
        advice(arms, recorded, changes, outcome, len(sound)),
        limited,
        len(sound),
        is_partial,
    )


def _figures(turns: Sequence[Turn]) -> list[str]:
    has_itl = all("itl_ms" in turn.report.metrics for turn in turns)
    return [name if has_itl or name != "itl_p99" else "chunk_gap_p99" for name in FIGURES]


def _sides(turns: Sequence[Turn]) -> tuple[Side, Side]:
    """Cut both arms at the same lines of the trace; a record's number is its line."""
    num = 1 + max((r.number for turn in turns for r in turn.records), default=0)
    length = stretch_length(num)
    stretches: list[list[list[Record]]] = [
        [[] for _ in range(math.ceil(num / length))] for _ in range(2)
    ]
    for turn in turns:
        for record in turn.records:
            stretches[turn.arm][record.number // length].append(record)
    one, other = (Side(tuple(map(tuple, each)), slo=Slo()) for each in stretches)
    return one, other


def outcome_of(changes: Sequence[Change]) -> Outcome:
    """Say what the deciding figures come to."""
    deciding = [change for change in changes if change.figure in DECIDING]
    better = [c for c in deciding if c.verdict is Verdict.BETTER and _is_material(c)]
    worse = [c for c in deciding if c.verdict is Verdict.WORSE and _is_material(c)]
    if better and worse:
        return Outcome.INCONCLUSIVE
    if better or worse:
        return Outcome.IMPROVED if better else Outcome.WORSE
    if deciding and all(change.verdict is Verdict.SAME for change in deciding):
        return Outcome.NO_CHANGE
    return Outcome.INCONCLUSIVE


def _is_material(change: Change) -> bool:
    return abs(change.change or 0.0) > change.tolerance


def advice(
    arms: tuple[str, str],
    recorded: Recorded | None,
    changes: Sequence[Change],
    outcome: Outcome,
    rounds: int,
) -> str:
    """One sentence to act on, with what it rests on: so many sound rounds."""
    of = {change.figure: change for change in changes}
    if not rounds:
        return "run the load generator on another machine: it was the limit, so this says nothing of the arms"
    hits = of.get("hit_rate")
    if outcome is Outcome.IMPROVED:
        return f"use {arms[1]}: {_grounds(changes, Verdict.BETTER)}{_hits(hits)}{_but(changes)}"
    if outcome is Outcome.WORSE:
        return (
            f"stay with {arms[0]}: with {arms[1]} {_grounds(changes, Verdict.WORSE)}{_hits(hits)}"
        )
    ideal = recorded.ideal_ratio if recorded else 0.0
    if outcome is Outcome.NO_CHANGE:
        if ideal < LITTLE_SHARED:
            return f"either will do: this trace shares {ideal:.0%} of its prompts, so there is nothing to route by"
        if hits is not None and abs(hits.change or 0.0) < HITS_MOVED:
            return (
                f"hits did not move{_hits(hits)}, and {ideal:.0%} of the prompts could be: "
                "suspect the configuration: dynctl explain hits"
            )
        return f"either will do at this load{_hits(hits)}: try a higher one with --speed"
    return _on_doubt(changes, rounds)


def _grounds(changes: Sequence[Change], verdict: Verdict) -> str:
    found = [
        f"{c.figure} {change_text(c)} ({interval_text(c)})"
        for c in changes
        if c.figure in DECIDING and c.verdict is verdict and _is_material(c)
    ]
    return ", ".join(found)


def _but(changes: Sequence[Change]) -> str:
    """What decides nothing and still is much worse: its whole interval is."""
    found = [
        f"{c.figure} {change_text(c)}"
        for c in changes
        if c.figure not in DECIDING
        and c.verdict is Verdict.WORSE
        and c.interval is not None
        and min(map(abs, c.interval)) > c.tolerance
    ]
    return f"; but {', '.join(found)}: weigh that by your goals" if found else ""


def _hits(change: Change | None) -> str:
    if change is None or change.before is None or change.after is None:
        return ""
    return f", KV hit rate {change.before:.0%} → {change.after:.0%}"


def _on_doubt(changes: Sequence[Change], rounds: int) -> str:
    better, worse = (_grounds(changes, verdict) for verdict in (Verdict.BETTER, Verdict.WORSE))
    if better and worse:
        return f"weigh them by your goals: {better}, but {worse}"
    wide = [c for c in changes if c.figure in DECIDING and c.verdict is not Verdict.SAME]
    needed = [rounds * _too_wide(c) ** 2 for c in wide if c.interval is not None]
    if not needed:
        return "this trace is too short to tell: replay more of it, or in more --rounds"
    names = ", ".join(c.figure for c in wide)
    return f"not decided: {names}; about --rounds {math.ceil(max(*needed, rounds + 1))} would tell"


def _too_wide(change: Change) -> float:
    """How many times wider an interval is than what would leave no doubt."""
    low, high = change.interval or (0.0, 0.0)
    return (high - low) / 2 / max(change.tolerance, 1e-9)
