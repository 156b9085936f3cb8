"""Rings of samples, and what they say of a window: rates and percentiles, across restarts of the counters.

Not here: polling, clocks (times are passed in, monotonic seconds), what is worth showing. Pure.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from dynctl.core.exposition import quantile
from dynctl.core.snapshot import EngineSample, Histogram, RelaySample, RouterSample, Snapshot

RATE_WINDOW_S = 10.0
"""Rates are means over this long: short enough to follow a change, long enough for a 1 Hz scrape."""
LATENCY_WINDOW_S = 60.0
"""Percentiles are over the observations of this long."""
SAME_SAMPLE_S = 0.2
"""A sample measured less than this after the last one is the last one, reported again with more age."""

Sampled = EngineSample | RouterSample | RelaySample


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one latency over a window, in seconds, from histogram buckets (linear inside a bucket)."""

    p50_s: float
    p95_s: float
    p99_s: float
    num_observations: float


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


def share_within(histogram: Histogram | None, limit: float) -> float | None:
    """Estimate the share of observations up to a limit, linear inside the bucket; None without observations.

    Above the last bound nothing is known: what was observed there counts as beyond any limit.
    """
    if histogram is None or not histogram.bounds or histogram.counts[-1] <= 0:
        return None
    total = histogram.counts[-1]
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if limit < bound:
            return (below + (count - below) * max(0.0, limit - lower) / (bound - lower)) / total
        below, lower = count, bound
    return below / total


def latency(histogram: Histogram | None) -> Latency | None:
    """Take the percentiles that people ask for; None without observations."""
    if histogram is None:
        return None
    p50, p95, p99 = (quantile(histogram, q) for q in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return Latency(p50, p95, p99, histogram.counts[-1])


class _Life:
    """Samples between two restarts, oldest first: within a life, counters only grow."""

    __slots__ = ("_known", "incarnation", "samples", "times_s")

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.times_s: list[float] = []
        self.samples: list[Sampled] = []
        self._known: dict[str, float] = {}

    def copy(self) -> "_Life":
        """Return one that goes on by itself; samples never change."""
        found = _Life(self.incarnation)
        found.times_s, found.samples = self.times_s.copy(), self.samples.copy()
        found._known = self._known.copy()
        return found

    def takes(self, measured_s: float, sample: Sampled) -> bool:
        """Take a sample unless its counters began again from zero: a new incarnation, or a counter that fell."""
        if _incarnation(sample) != self.incarnation:
            return False
        counters = {
            name: value
            for name in _COUNTERS[type(sample)]
            if (value := getattr(sample, name)) is not None
        }
        if any(value < self._known.get(name, value) for name, value in counters.items()):
            return False
        if self.samples and _changes_bounds(self.samples[-1], sample):
            return False
        self._known |= counters
        self.times_s.append(measured_s)
        self.samples.append(sample)
        return True

    def ends(
        self, field: str, since_s: float
    ) -> tuple[tuple[float, Any], tuple[float, Any]] | None:
        """Return the first and last known value of a field from `since_s` on, each with its time."""
        start = bisect_left(self.times_s, since_s)
        known = (
            i for i in range(start, len(self.samples)) if _value(self.samples[i], field) is not None
        )
        first = next(known, None)
        if first is None:
            return None
        last = len(self.samples) - 1
        while _value(self.samples[last], field) is None:
            last -= 1
        return tuple((self.times_s[i], _value(self.samples[i], field)) for i in (first, last))  # type: ignore[return-value]


def _value(sample: Sampled, field: str) -> Any:  # noqa: ANN401 - a count or a histogram
    return getattr(sample, field)


def _changes_bounds(before: Sampled, after: Sampled) -> bool:
    """Whether a histogram has other buckets than before: counts of the two cannot be compared."""
    pairs = ((getattr(before, name), getattr(after, name)) for name in _HISTOGRAMS[type(after)])
    return any(a is not None and b is not None and a.bounds != b.bounds for a, b in pairs)


_COUNTERS = {
    kind: tuple(f.name for f in fields(kind) if f.name.endswith("_total"))
    for kind in (EngineSample, RouterSample, RelaySample)
}
_HISTOGRAMS = {
    EngineSample: ("ttft_s", "itl_s", "transfer_s"),
    RouterSample: ("ttft_s", "itl_s"),
    RelaySample: ("kv_lag_s",),
}


class Series:
    """The samples of one engine or router over the longest window, split where its counters began again.

    A question costs a few look-ups per life, not a walk over the window: there may be hundreds of engines.
    """

    __slots__ = ("_lives",)

    def __init__(self) -> None:
        self._lives: deque[_Life] = deque()

    def copy(self) -> "Series":
        """Return one that goes on by itself."""
        found = Series()
        found._lives.extend(life.copy() for life in self._lives)
        return found

    def add(self, measured_s: float, sample: Sampled) -> None:
        """Keep a sample unless it is the last one again; forget what no window reaches."""
        if self._lives and measured_s - self.measured_s < SAME_SAMPLE_S:
            return
        if not self._lives or not self._lives[-1].takes(measured_s, sample):
            self._lives.append(_Life(_incarnation(sample)))
            self._lives[-1].takes(measured_s, sample)
        oldest = self._lives[0]
        too_old = bisect_left(oldest.times_s, measured_s - LATENCY_WINDOW_S - SAME_SAMPLE_S)
        del oldest.times_s[:too_old], oldest.samples[:too_old]
        if not oldest.samples:
            self._lives.popleft()

    @property
    def measured_s(self) -> float:
        """When the newest sample was measured."""
        return self._lives[-1].times_s[-1]

    def rate(self, field: str, window_s: float = RATE_WINDOW_S) -> float | None:
        """Say how fast a counter grows per second; None with fewer than two samples in the window."""
        ends = self._ends(field, window_s)
        span_s = ends[-1][1][0] - ends[0][0][0] if ends else 0.0
        return _growth(ends) / span_s if span_s > 0 else None

    def grown(self, field: str, window_s: float = LATENCY_WINDOW_S) -> float | None:
        """Say how far a counter went up in the window; None with fewer than two samples."""
        ends = self._ends(field, window_s)
        return _growth(ends) if ends and ends[-1][1][0] > ends[0][0][0] else None

    def observed(self, field: str, window_s: float = LATENCY_WINDOW_S) -> Histogram | None:
        """Say what a histogram observed in the window; None with fewer than two samples."""
        ends = self._ends(field, window_s)
        if not ends or ends[-1][1][0] <= ends[0][0][0]:
            return None
        (_, first), (_, last) = ends[0]
        # Later lives began from zero, so what they counted last is all theirs.
        return merge([_minus(last, first), *(last for _, (_, last) in ends[1:])])

    def _ends(
        self, field: str, window_s: float
    ) -> list[tuple[tuple[float, Any], tuple[float, Any]]]:
        """Return per life in the window its first and last known value with their times."""
        if not self._lives:
            return []
        since_s = self.measured_s - window_s - SAME_SAMPLE_S
        found = (life.ends(field, since_s) for life in self._lives)
        return [ends for ends in found if ends is not None]


def _growth(ends: list[tuple[tuple[float, Any], tuple[float, Any]]]) -> float:
    (_, first), (_, last) = ends[0]
    grown: float = last - first
    # Later lives began from zero, so what they counted last is all theirs.
    for _, (_, later) in ends[1:]:
        grown += later
    return grown


def _incarnation(sample: Sampled) -> str:
    return "" if isinstance(sample, RouterSample) else sample.incarnation


class History:
    """The recent past of every engine and router that was seen lately."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[tuple[type[Sampled], str], Series] = {}
        """By kind and id, of relays by host: names of one kind may be those of another."""

    def copy(self) -> "History":
        """Return one that goes on by itself."""
        found = History()
        found._series = {name: series.copy() for name, series in self._series.items()}
        return found

    def add(self, snapshot: Snapshot, now_s: float) -> None:
        """Take in a snapshot made at `now_s` (monotonic); parts that are only older than before change nothing."""
        for host in snapshot.hosts:
            samples: tuple[Sampled, ...] = (*host.engines, *host.routers, *host.relays)
            for sample in samples:
                # All relays have one id.
                name = host.host_name if isinstance(sample, RelaySample) else sample.id
                series = self._series.setdefault((type(sample), name), Series())
                series.add(now_s - host.age_s - sample.age_s, sample)
        gone = [
            key
            for key, series in self._series.items()
            if now_s - series.measured_s > 2 * LATENCY_WINDOW_S
        ]
        for key in gone:
            del self._series[key]

    def engine(self, engine_id: str) -> Series:
        """Return the series of an engine; like the others an empty one when it was never seen."""
        return self._series.get((EngineSample, engine_id)) or Series()

    def router(self, router_id: str) -> Series:
        """Return the series of a router."""
        return self._series.get((RouterSample, router_id)) or Series()

    def relay(self, host_name: str) -> Series:
        """Return the series of the relay of a host."""
        return self._series.get((RelaySample, host_name)) or Series()
