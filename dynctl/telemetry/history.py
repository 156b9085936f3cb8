"""Rings of samples, and what they say of a window: rates and percentiles, across restarts of the counters.

Not here: polling, clocks (times are passed in, monotonic seconds), what is worth showing. Pure.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynctl.core.snapshot import EngineSample, Histogram, RouterSample, Snapshot

RATE_WINDOW_S = 10.0
"""Rates are means over this long: short enough to follow a change, long enough for a 1 Hz scrape."""
LATENCY_WINDOW_S = 60.0
"""Percentiles are over the observations of this long."""
SAME_SAMPLE_S = 0.2
"""A sample measured less than this after the last one is the last one, reported again with more age."""

Sampled = EngineSample | RouterSample


class Point(NamedTuple):
    """A cumulative value with the incarnation that counted it; counters start from zero in each."""

    incarnation: str
    value: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one latency over a window, in seconds, from histogram buckets (linear inside a bucket)."""

    p50_s: float
    p95_s: float
    p99_s: float
    num_observations: float


def increase(points: Iterable[Point]) -> float:
    """Say how far a counter went up; after a restart it began again from zero, so its new value counts whole."""
    grown = 0.0
    for earlier, later in itertools.pairwise(points):
        is_reset = earlier.incarnation != later.incarnation or later.value < earlier.value
        grown += later.value if is_reset else later.value - earlier.value
    return grown


def histogram_increase(points: Sequence[tuple[str, Histogram]]) -> Histogram | None:
    """Say which observations came in between the first and the last point; None with fewer than two points."""
    if len(points) < 2:
        return None
    parts: list[Histogram] = []
    start = points[0][1]
    for (earlier_in, earlier), (later_in, later) in itertools.pairwise(points):
        if (
            earlier_in != later_in
            or later.bounds != earlier.bounds
            or later.counts[-1] < earlier.counts[-1]
        ):
            parts.append(_minus(earlier, start))
            start = Histogram(later.bounds, (0.0,) * len(later.counts), 0.0)
    parts.append(_minus(points[-1][1], start))
    return merge(parts)


def _minus(later: Histogram, earlier: Histogram) -> Histogram:
    counts = tuple(b - a for a, b in zip(earlier.counts, later.counts, strict=True))
    return Histogram(later.bounds, counts, later.total - earlier.total)


def merge(histograms: Iterable[Histogram | None]) -> Histogram | None:
    """Add histograms up over the bounds they share, where the counts stay exact; None if there are none."""
    present = [h for h in histograms if h is not None]
    if not present:
        return None
    if all(h.bounds == present[0].bounds for h in present):
        bounds = present[0].bounds
        columns = [h.counts for h in present]
    else:
        shared = set.intersection(*(set(h.bounds) for h in present))
        bounds = tuple(sorted(shared))
        columns = [_at_bounds(h, shared) for h in present]
    counts = tuple(sum(column) for column in zip(*columns, strict=True))
    return Histogram(bounds, counts, sum(h.total for h in present))


def _at_bounds(histogram: Histogram, bounds: set[float]) -> tuple[float, ...]:
    kept = [c for b, c in zip(histogram.bounds, histogram.counts, strict=False) if b in bounds]
    return (*kept, histogram.counts[-1])


def quantile(histogram: Histogram, q: float) -> float | None:
    """Estimate the q-quantile (0 to 1), linear inside the bucket; None without observations.

    Above the last bound nothing is known but that bound, which is then the answer.
    """
    observed = histogram.counts[-1]
    if observed <= 0 or not histogram.bounds:
        return None
    rank = q * observed
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count >= rank and count > below:
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return histogram.bounds[-1]


def latency(histogram: Histogram | None) -> Latency | None:
    """Take the percentiles that people ask for; None without observations."""
    if histogram is None:
        return None
    p50, p95, p99 = (quantile(histogram, q) for q in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return Latency(p50, p95, p99, histogram.counts[-1])


class Series:
    """The samples of one engine or router over the longest window, oldest first."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sampled]] = deque()

    def add(self, measured_s: float, sample: Sampled) -> None:
        """Keep a sample unless it is the last one again; forget what no window reaches."""
        if self._samples and measured_s - self._samples[-1][0] < SAME_SAMPLE_S:
            return
        self._samples.append((measured_s, sample))
        while measured_s - self._samples[0][0] > LATENCY_WINDOW_S:
            self._samples.popleft()

    @property
    def measured_s(self) -> float:
        """When the newest sample was measured."""
        return self._samples[-1][0]

    def rate(self, field: str, window_s: float = RATE_WINDOW_S) -> float | None:
        """Say how fast a counter grows per second; None with fewer than two samples in the window."""
        points = self._points(field, window_s)
        if len(points) < 2:
            return None
        return increase(point for _, point in points) / (points[-1][0] - points[0][0])

    def grown(self, field: str, window_s: float = LATENCY_WINDOW_S) -> float | None:
        """Say how far a counter went up in the window; None with fewer than two samples."""
        points = self._points(field, window_s)
        return increase(point for _, point in points) if len(points) >= 2 else None

    def observed(self, field: str, window_s: float = LATENCY_WINDOW_S) -> Histogram | None:
        """Say what a histogram observed in the window; None with fewer than two samples."""
        return histogram_increase(
            [
                (_incarnation(sample), value)
                for _, sample in self._recent(window_s)
                if (value := getattr(sample, field)) is not None
            ]
        )

    def _points(self, field: str, window_s: float) -> list[tuple[float, Point]]:
        return [
            (measured_s, Point(_incarnation(sample), value))
            for measured_s, sample in self._recent(window_s)
            if (value := getattr(sample, field)) is not None
        ]

    def _recent(self, window_s: float) -> list[tuple[float, Sampled]]:
        since_s = self._samples[-1][0] - window_s - SAME_SAMPLE_S if self._samples else 0.0
        return [entry for entry in self._samples if entry[0] >= since_s]


def _incarnation(sample: Sampled) -> str:
    return sample.incarnation if isinstance(sample, EngineSample) else ""


class History:
    """The recent past of every engine and router that was seen lately."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, snapshot: Snapshot, now_s: float) -> None:
        """Take in a snapshot made at `now_s` (monotonic); parts that are only older than before change nothing."""
        for host in snapshot.hosts:
            samples: tuple[Sampled, ...] = (*host.engines, *host.routers)
            for sample in samples:
                series = self._series.setdefault(sample.id, Series())
                series.add(now_s - host.age_s - sample.age_s, sample)
        gone = [
            name
            for name, series in self._series.items()
            if now_s - series.measured_s > 2 * LATENCY_WINDOW_S
        ]
        for name in gone:
            del self._series[name]

    def of(self, sample_id: str) -> Series:
        """Return the series of an engine or router; an empty one when it was never seen."""
        return self._series.get(sample_id) or Series()


class Trends:
    """Short rings of shown figures, for sparklines; None marks a moment without a figure."""

    __slots__ = ("_length", "_rings")

    def __init__(self, length: int = 240) -> None:
        self._length = length
        self._rings: dict[str, deque[float | None]] = {}

    def push(self, values: Mapping[str, float | None]) -> None:
        """Add one moment: a figure per key. Keys that no longer occur are forgotten."""
        self._rings = {key: self._rings.get(key) or deque(maxlen=self._length) for key in values}
        for key, value in values.items():
            self._rings[key].append(value)

    def copy(self) -> "Trends":
        """Return trends that stay as they are now."""
        held = Trends(self._length)
        held._rings = {key: ring.copy() for key, ring in self._rings.items()}
        return held

    def of(self, key: str) -> tuple[float | None, ...]:
        """Return the ring of a key, oldest first; empty when there is none."""
        return tuple(self._rings.get(key, ()))
