"""One figure over repeated runs → its mean, how far runs differ, and what that says of two sets of runs. Pure.

Requests of one run share its queues, caches and moment; only another run shows what another moment does to a figure.
Not here: which runs count (`repeat`), figures of one run (`changes`).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dynctl.bench.changes import MORE_IS_BETTER, SHARES, Change, difference, judge
from dynctl.bench.resampling import student


@dataclass(frozen=True, slots=True)
class RunFigure:
    """One figure over runs."""

    figure: str
    """`ttft_p99`, `hit_rate`, …"""
    values: tuple[float | None, ...]
    """By run; None: it had none, or was left out."""
    num: int
    """Runs that had it."""
    mean: float
    deviation: float | None
    """Standard deviation between runs (n − 1); None for a single one."""
    cv: float | None
    """That over the mean."""
    interval: tuple[float, float] | None
    """95% of the mean: Student's t."""


def over_runs(figure: str, values: Sequence[float | None]) -> RunFigure | None:
    """Put the runs' values together; None when no run had any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    num, mean = len(known), statistics.fmean(known)
    if num < 2:
        return RunFigure(figure, tuple(values), num, mean, None, None, None)
    deviation = statistics.stdev(known)
    half = student(num - 1) * deviation / math.sqrt(num)
    cv = deviation / mean if mean > 0 else None
    return RunFigure(figure, tuple(values), num, mean, deviation, cv, (mean - half, mean + half))


def changed_between(
    figure: str,
    before: Sequence[float | None],
    after: Sequence[float | None],
    tolerance: float,
    *,
    is_gate: bool = False,
) -> Change | None:
    """Judge one figure by the runs of both sides; None when no run has it, unless it was asked for."""
    one, other = over_runs(figure, before), over_runs(figure, after)
    if one is None and other is None and not is_gate:
        return None
    change, bounds = None, None
    if one is not None and other is not None:
        change = difference(figure, one.mean, other.mean)
        bounds = None if change is None else _bounds(one, other, change)
    return Change(
        figure=figure,
        before=one.mean if one else None,
        after=other.mean if other else None,
        change=change,
        interval=bounds,
        verdict=judge(bounds, tolerance, more_is_better=figure in MORE_IS_BETTER),
        tolerance=tolerance,
        is_gate=is_gate,
        num_samples=(one.num if one else 0, other.num if other else 0),
        needed=1,
    )


def _bounds(one: RunFigure, other: RunFigure, change: float) -> tuple[float, float] | None:
    """The 95% interval of a change, by how far runs differ; None when no side has two of them."""
    is_share = one.figure in SHARES
    if not is_share and other.mean <= 0:
        return None
    # A quotient's logarithm varies as its parts do, each by its own mean.
    spreads = [
        None if each.deviation is None else each.deviation / (1.0 if is_share else each.mean)
        for each in (one, other)
    ]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    # A single run is taken to vary as the other side's do.
    parts = [
        (known[0] if spread is None else spread) ** 2 / each.num
        for spread, each in zip(spreads, (one, other), strict=True)
    ]
    half = student(_freedom(parts, one, other)) * math.sqrt(sum(parts))
    if is_share:
        return change - half, change + half
    return (1 + change) * math.exp(-half) - 1, (1 + change) * math.exp(half) - 1


def _freedom(parts: Sequence[float], one: RunFigure, other: RunFigure) -> int:
    """Degrees of freedom: Welch's, rounded down; of the one side that has any when the other is a single run."""
    if one.num < 2 or other.num < 2:
        return max(one.num, other.num) - 1
    below = sum(part**2 / (each.num - 1) for part, each in zip(parts, (one, other), strict=True))
    # Runs that do not differ at all: any number will do, as half the width is nothing.
    return max(1, int(sum(parts) ** 2 / below + 1e-9)) if below else 1
