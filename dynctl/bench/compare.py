"""What changed from one set of requests to another, how sure that is, and a verdict per figure. Pure.

Not here: reading results (`results`), tables (`compare_text`), where requests came from.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dynctl.bench.record import Record
from dynctl.bench.report import (
    MAX_FAILED_RATIO,
    METRICS,
    POOLED,
    Report,
    is_good,
    workload_digest,
    workload_facts,
)
from dynctl.bench.resampling import (
    Quantile,
    Ratio,
    Statistic,
    interval,
    is_enough,
    stretch_length,
    value_of,
)
from dynctl.bench.spread import NUM_WINDOWS, tokens_by_window
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode, UsageError

SCHEMA = "dynctl.bench.compare/1"
TOLERANCE = 0.05
"""Of latencies and rates 5%, of shares 5 points; of failed requests a point."""
_SEED = 1
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SHARES = ("hit_rate", "failed", "goodput")
"""Compared by their difference in points; all else by how much it grew."""
MORE_IS_BETTER = frozenset({"hit_rate", "goodput", "output_tok_s"})
_LATENCIES = {name.removesuffix("_ms"): name for name in (*METRICS, *POOLED)}
DEFAULT_FIGURES = (
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "itl_p99",
    "tpot_p50",
    "tpot_p90",
    "e2e_p50",
    "e2e_p99",
    "output_tok_s",
    "hit_rate",
    "failed",
)
_THRESHOLD = re.compile(r"^([a-z0-9_]+)=([0-9]+(?:\.[0-9]+)?)%$")

DEFINITIONS = {
    "change": "(B − A) / A of latencies and throughput; B − A, in points, of shares (hit_rate, failed, goodput)",
    "interval": "95% bootstrap of the change, seeded: stretches of √n neighbouring requests (throughput: "
    f"{NUM_WINDOWS} windows of time; failures: single requests) are drawn anew, since neighbours share queues and caches; widened by "
    "Student's t for few of them",
    "same": "the whole interval lies within the threshold (where none is given 5%, of failed requests 1 point)",
    "better, worse": "the interval leaves zero out, and does not lie within the threshold",
    "not enough data": "the interval holds zero and reaches beyond the threshold; or fewer than 5 samples lie beyond a "
    "percentile (500 samples for p99)",
    "regression": "a figure named by --threshold that is worse, and by more than its threshold",
    "hit_rate": "cached tokens / prompt tokens of answered requests, as the server reports them",
    "failed": "failed requests / all requests",
    "goodput": "requests within the goals / all requests; compared when both runs had the same goals",
    "output_tok_s": "output tokens that arrived within the measured time / measured time",
}
"""What a comparison's words mean; stored with it."""


class Verdict(StrEnum):
    """What can be said of one figure."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNKNOWN = "not enough data"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both, and what became of it."""

    figure: str
    """`ttft_p99`, `hit_rate`, …"""
    before: float | None
    after: float | None
    change: float | None
    """Relative, or for shares the difference."""
    interval: tuple[float, float] | None
    verdict: Verdict
    tolerance: float
    is_gate: bool
    """Whether a threshold was asked for."""
    num_samples: tuple[int, int]
    needed: int
    """Samples it takes in each for a verdict."""

    @property
    def is_regression(self) -> bool:
        """Whether a gate is not passed."""
        if not self.is_gate or self.verdict is not Verdict.WORSE or self.change is None:
            return False
        return abs(self.change) > self.tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `bench compare -o json` writes."""

    schema: str
    before: str
    after: str
    workload: str
    """As A's was written, with its load."""
    workload_digest: str
    differs: dict[str, tuple[Any, Any]]
    """Facts that are not the workload: server, versions, plan, seed."""
    client_limited: dict[str, str]
    """By run, why its load generator was the limit."""
    changes: tuple[Change, ...]
    regressions: tuple[str, ...]
    """Figures that are worse by more than the threshold they were given."""
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    @property
    def exit_code(self) -> ExitCode:
        """6 on a regression, or where a gate was given and the figures are not the servers'."""
        is_gated = any(change.is_gate for change in self.changes)
        return (
            ExitCode.GATE if self.regressions or (is_gated and self.client_limited) else ExitCode.OK
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A stored run."""

    name: str
    report: Report
    records: tuple[Record, ...]
    """All, warm-up included."""


@dataclass(frozen=True, slots=True)
class Side:
    """Measured requests of one side, in stretches; both sides of a pair have the same stretches."""

    stretches: tuple[tuple[Record, ...], ...]
    windows: tuple[tuple[float, float], ...] = ()
    """Per window of time: output tokens and seconds."""
    slo: Slo = field(default_factory=Slo)


def parse_thresholds(given: Sequence[str]) -> dict[str, float]:
    """Read `ttft_p99=5%`, several in one text by commas.

    Raises:
        UsageError: for what is no figure, or no percentage.
    """
    found: dict[str, float] = {}
    for item in (item.strip() for text in given for item in text.split(",")):
        match = _THRESHOLD.match(item)
        if match is None or not is_figure(match[1]):
            raise UsageError(
                f"--threshold {item!r}: cannot read it",
                f"write FIGURE=N%, figures are {', '.join(_LATENCIES)} with _mean, _p50, _p90, _p95 or _p99; "
                f"output_tok_s; and in points {', '.join(SHARES)}",
            )
        found[match[1]] = float(match[2]) / 100
    return found


def is_figure(name: str) -> bool:
    """Whether that can be compared."""
    metric, _, statistic = name.rpartition("_")
    is_latency = metric in _LATENCIES and (statistic in _QUANTILES or statistic == "mean")
    return is_latency or name in {*SHARES, "output_tok_s"}


def compare(before: Run, after: Run, thresholds: Mapping[str, float]) -> Comparison:
    """Compare two runs of one workload.

    Raises:
        DynctlError: when they are not of one workload, or one was interrupted; says what differs. Of goodput too when
            they had not the same goals.
    """
    _check_alike(before, after)
    if "goodput" in thresholds and not _have_goals(before.report, after.report):
        raise DynctlError(
            f"goodput needs the same goals in both: {before.name} had {_goals(before)}, {after.name} {_goals(after)}",
            "give both runs the same --slo, or leave goodput out of --threshold",
            code=ExitCode.REFUSED,
        )
    figures = dict.fromkeys([*_default_figures(before.report, after.report), *thresholds])
    sides = side_of(before), side_of(after)
    judged = [
        changed(*sides, name, thresholds.get(name, tolerance_of(name)), is_gate=name in thresholds)
        for name in figures
    ]
    changes = tuple(change for change in judged if change is not None)
    return Comparison(
        SCHEMA,
        before.name,
        after.name,
        f"{before.report.setting.workload}, {before.report.setting.load}",
        workload_digest(before.report.setting),
        _differences(before.report, after.report),
        {
            run.name: run.report.client_limited
            for run in (before, after)
            if run.report.client_limited
        },
        changes,
        tuple(change.figure for change in changes if change.is_regression),
    )


def tolerance_of(figure: str) -> float:
    """What counts as the same where no threshold is given."""
    return MAX_FAILED_RATIO if figure == "failed" else TOLERANCE


def _default_figures(before: Report, after: Report) -> list[str]:
    has_itl = "itl_ms" in before.metrics and "itl_ms" in after.metrics
    names = [name if has_itl or name != "itl_p99" else "chunk_gap_p99" for name in DEFAULT_FIGURES]
    if _have_goals(before, after):
        names.append("goodput")
    return names


def _have_goals(before: Report, after: Report) -> bool:
    return before.setting.slo == after.setting.slo != Slo()


def _goals(run: Run) -> str:
    slo = run.report.setting.slo
    goals = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}
    return ",".join(f"{k}={v:g}" for k, v in goals.items() if v is not None) or "none"


def _check_alike(before: Run, after: Run) -> None:
    for run in (before, after):
        if run.report.is_partial:
            raise DynctlError(
                f"{run.name} was interrupted: it had less time than it was asked for, so other caches and queues",
                "run it again to its end",
                code=ExitCode.REFUSED,
            )
        if run.report.requests.ok < 2:
            raise DynctlError(
                f"{run.name}: {run.report.requests.ok} of {run.report.requests.sent} requests were answered",
                f"dynctl bench show {run.name} says why",
                code=ExitCode.REFUSED,
            )
    one, other = workload_facts(before.report.setting), workload_facts(after.report.setting)
    one_text, other_text = _workload_text(before.report), _workload_text(after.report)
    differs = [
        f"{one_text} and {other_text}"
        if key == "workload"
        else f"{key} {one[key]} and {other[key]}"
        for key in one
        if one[key] != other[key]
    ]
    if differs:
        raise DynctlError(
            f"{before.name} and {after.name} are not of one workload: {'; '.join(differs)}",
            "give both runs the same workload or trace, load, duration, warm-up and API",
            code=ExitCode.REFUSED,
        )


def _workload_text(report: Report) -> str:
    setting = report.setting
    return setting.workload + (f" ({setting.recorded.digest})" if setting.recorded else "")


def _differences(before: Report, after: Report) -> dict[str, tuple[Any, Any]]:
    def facts(report: Report) -> dict[str, Any]:
        setting = report.setting
        named = {"url": setting.url, "model": setting.model, "seed": setting.seed}
        return named | {k: v for k, v in report.facts.items() if k != "started_unix_s"}

    one, other = facts(before), facts(after)
    return {
        key: (one.get(key), other.get(key))
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    }


def side_of(run: Run) -> Side:
    """The measured requests of a run, cut into stretches by when they were due."""
    measured = sorted(
        (r for r in run.records if not r.is_warmup), key=lambda r: (r.scheduled_s, r.number)
    )
    length = stretch_length(len(measured))
    stretches = tuple(tuple(measured[at : at + length]) for at in range(0, len(measured), length))
    setting, window_s = run.report.setting, run.report.measured_s / NUM_WINDOWS
    tokens = tokens_by_window(run.records, setting.warmup_s, window_s)
    return Side(stretches, tuple((num, window_s) for num in tokens), setting.slo)


def changed(
    before: Side,
    after: Side,
    figure: str,
    tolerance: float,
    *,
    is_gate: bool = False,
    are_paired: bool = False,
) -> Change | None:
    """Judge one figure; None when neither side has it, unless it was asked for."""
    one, other = _statistic(before, figure), _statistic(after, figure)
    early, late = value_of(one), value_of(other)
    if early is None and late is None and not is_gate:
        return None
    rule = _points if figure in SHARES else _relative
    change = None if early is None or late is None else rule(early, late)
    bounds = None
    if is_enough(one) and is_enough(other):
        rng = random.Random(f"{_SEED}/{figure}")  # noqa: S311 - not a secret
        bounds = interval(one, other, rule, rng, are_paired=are_paired and figure != "failed")
    return Change(
        figure=figure,
        before=early,
        after=late,
        change=change,
        interval=bounds,
        verdict=judge(bounds, tolerance, more_is_better=figure in MORE_IS_BETTER),
        tolerance=tolerance,
        is_gate=is_gate,
        num_samples=(one.num_samples, other.num_samples),
        needed=one.needed,
    )


def judge(bounds: tuple[float, float] | None, tolerance: float, *, more_is_better: bool) -> Verdict:
    """Say what an interval of a change means."""
    if bounds is None:
        return Verdict.UNKNOWN
    low, high = bounds
    if -tolerance <= low and high <= tolerance:
        return Verdict.SAME
    if low <= 0 <= high:
        return Verdict.UNKNOWN
    return Verdict.BETTER if (low > 0) == more_is_better else Verdict.WORSE


def _relative(before: float, after: float) -> float | None:
    return None if not before else after / before - 1


def _points(before: float, after: float) -> float | None:
    return after - before


def _statistic(side: Side, figure: str) -> Statistic:
    if figure == "output_tok_s":
        return Ratio(side.windows, len(side.windows))
    if figure == "failed" and not all(r.is_ok for stretch in side.stretches for r in stretch):
        # One by one: drawn in stretches, an outage would be a thing that may as well not have been.
        failed = [_failed(record, side.slo) for stretch in side.stretches for record in stretch]
        return Ratio(failed, len(failed))
    if figure in SHARES:
        of = _SHARE_OF[figure]
        pairs = [[of(record, side.slo) for record in stretch] for stretch in side.stretches]
        num = sum(pair[1] > 0 for stretch in pairs for pair in stretch)
        return Ratio([_sums(stretch) for stretch in pairs], num)
    metric, _, name = figure.rpartition("_")
    values = [
        [value for record in stretch for value in samples_of(record, _LATENCIES[metric])]
        for stretch in side.stretches
    ]
    if name == "mean":
        num = sum(map(len, values))
        return Ratio([(math.fsum(each), float(len(each))) for each in values], num)
    return Quantile(values, _QUANTILES[name])


def samples_of(record: Record, metric: str) -> list[float]:
    """A request's samples of a metric, by the rules of `report`: failed requests have none but their send lag."""
    if not record.is_ok and metric != "send_lag_ms":
        return []
    if metric in POOLED:
        pooled: list[float] = getattr(record, POOLED[metric])()
        return pooled
    value: float | None = getattr(record, metric)
    return [] if value is None else [value]


def _hits(record: Record, _: Slo) -> tuple[float, float]:
    if not record.is_ok or record.cached_tokens is None:
        return 0.0, 0.0
    return float(record.cached_tokens), float(record.prompt_tokens or 0)


def _failed(record: Record, _: Slo) -> tuple[float, float]:
    return float(not record.is_ok), 1.0


def _good(record: Record, slo: Slo) -> tuple[float, float]:
    return float(is_good(record, slo)), 1.0


_SHARE_OF: Mapping[str, Callable[[Record, Slo], tuple[float, float]]] = {
    "hit_rate": _hits,
    "failed": _failed,
    "goodput": _good,
}


def _sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.fsum(above for above, _ in pairs), math.fsum(below for _, below in pairs)
