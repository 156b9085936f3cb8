"""One figure on two sides → how it changed, how sure that is, and a verdict. Pure.

Not here: which runs may be compared (`compare`), where requests came from, words (`compare_text`).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from dynctl.bench.record import Record
from dynctl.bench.report import MAX_FAILED_RATIO, METRICS, POOLED, Report, is_good
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

TOLERANCE = 0.05
"""Of latencies and rates 5%, of shares 5 points; of failed requests a point."""
_SEED = 1
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SHARES = ("hit_rate", "failed", "goodput")
"""Compared by their difference in points; all else by how much it grew."""
MORE_IS_BETTER = frozenset({"hit_rate", "goodput", "output_tok_s"})
LATENCIES = {name.removesuffix("_ms"): name for name in (*METRICS, *POOLED)}
"""As figures are named, before `_mean`, `_p50`, `_p90`, `_p95` or `_p99`."""


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
    """Of runs that were repeated: runs."""
    needed: int
    """Samples it takes in each for a verdict."""

    @property
    def is_regression(self) -> bool:
        """Whether a gate is not passed."""
        if not self.is_gate or self.verdict is not Verdict.WORSE or self.change is None:
            return False
        return abs(self.change) > self.tolerance


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


def is_figure(name: str) -> bool:
    """Whether that can be compared."""
    metric, _, statistic = name.rpartition("_")
    is_latency = metric in LATENCIES and (statistic in _QUANTILES or statistic == "mean")
    return is_latency or name in {*SHARES, "output_tok_s"}


def tolerance_of(figure: str) -> float:
    """What counts as the same where no threshold is given."""
    return MAX_FAILED_RATIO if figure == "failed" else TOLERANCE


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
    change = None if early is None or late is None else difference(figure, early, late)
    bounds = None
    if is_enough(one) and is_enough(other):
        rng = random.Random(f"{_SEED}/{figure}")  # noqa: S311 - not a secret
        rule = partial(difference, figure)
        are_paired = are_paired and figure != "failed"
        bounds = interval(one, other, rule, rng, are_paired=are_paired)
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


def difference(figure: str, before: float, after: float) -> float | None:
    """How a figure changed: in points, or by how much it grew; None when it grew from nothing."""
    if figure in SHARES:
        return after - before
    return None if not before else after / before - 1


def value_on(side: Side, figure: str) -> float | None:
    """The figure itself; None when the side has no samples of it."""
    return value_of(_statistic(side, figure))


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
        [value for record in stretch for value in samples_of(record, LATENCIES[metric])]
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
