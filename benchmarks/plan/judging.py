"""Predictions beside measurements: errors, bias, what the bands cover. Prints tables; reads nothing."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from points import Point

from dynctl.planner.calibration import Calibration
from dynctl.planner.closed_loop import run_loop
from dynctl.planner.pricing import is_flood

FIGURES = ("ttft", "tpot", "tokens")


@dataclass(slots=True)
class Outcome:
    """Predicted over measured, by figure."""

    point: Point
    ratios: tuple[float, float, float]

    def is_covered(self, calibration: Calibration, figure: str) -> bool:
        """Whether the 90 % band that a user is shown holds what was measured."""
        query = self.point.query
        asked = (
            "tokens-flood" if figure == "tokens" and is_flood(query, self.point.loop) else figure
        )
        low, high = calibration.band(asked, query.model, query.engine, query.spec)
        return low <= 1 / self.ratios[FIGURES.index(figure)] <= high


def outcomes(calibration: Calibration, points: Iterable[Point]) -> list[Outcome]:
    """What `dynctl estimate` would say of each point with these constants."""
    found = []
    for p in points:
        c = calibration.constants(p.engine, p.query.spec, p.query.model)
        r = run_loop(p.load, c, p.loop)
        ratios = r.ttft_s * 1e3 / p.ttft_ms, r.tpot_s * 1e3 / p.tpot_ms, r.tokens_s / p.tokens_s
        found.append(Outcome(p, ratios))
    return found


def medians(found: Sequence[Outcome]) -> list[float]:
    """Median absolute error in percent, by figure."""
    return [100 * statistics.median(abs(o.ratios[i] - 1) for o in found) for i in range(3)]


def coverage(calibration: Calibration, found: Sequence[Outcome]) -> list[float]:
    """Percent of measurements inside their bands, by figure."""
    return [
        100 * sum(o.is_covered(calibration, name) for o in found) / max(1, len(found))
        for name in FIGURES
    ]


def header() -> None:
    """The columns of `row`."""
    names = "  ".join(f"{name:>6} {'bias':>6} {'p90':>6}" for name in ("TTFT", "TPOT", "tok/s"))
    print(f"{'':34} {'n':>5}  {names}")


def row(name: str, found: Sequence[Outcome]) -> None:
    """Median error, bias and the error of nine in ten, by figure."""
    if not found:
        return
    cells = []
    for i, error in enumerate(medians(found)):
        bias = 100 * (statistics.median(o.ratios[i] for o in found) - 1)
        tail = 100 * sorted(abs(o.ratios[i] - 1) for o in found)[int(0.9 * (len(found) - 1))]
        cells.append(f"{error:6.1f} {bias:+6.1f} {tail:6.0f}")
    print(f"{name:34} {len(found):5}  " + "  ".join(cells), flush=True)


def quantiles(values: Iterable[float], low: float, high: float) -> tuple[float, float]:
    """Two order statistics."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[min(last, int(low * len(ordered)))], ordered[min(last, int(high * len(ordered)))]
