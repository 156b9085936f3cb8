"""What a dynctl router itself added to requests over a run, by its own histograms. Pure."""

from dataclasses import dataclass

from dynctl.core.exposition import quantile
from dynctl.core.snapshot import Histogram

DECISION = "dynctl_router_decision_seconds"
QUEUE = "dynctl_router_queue_seconds"


@dataclass(frozen=True, slots=True)
class RouterTime:
    """One part of it."""

    num: float
    """Requests it was observed for."""
    mean_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """What the router added; None where it did not say, or was started anew meanwhile."""

    waiting: RouterTime | None
    """Before it decides: tokenising, and the wait for an engine with room."""
    decision: RouterTime | None


def growth(before: Histogram | None, after: Histogram | None) -> Histogram | None:
    """What was observed in between; None where that cannot be told."""
    if before is None or after is None or before.bounds != after.bounds:
        return None
    counts = tuple(late - early for early, late in zip(before.counts, after.counts, strict=True))
    is_one_life = all(count >= 0 for count in counts) and after.total >= before.total
    return Histogram(after.bounds, counts, after.total - before.total) if is_one_life else None


def router_times(decision: Histogram | None, queue: Histogram | None) -> RouterTimes | None:
    """Sum up both; None when the router said nothing of either."""
    found = RouterTimes(_time(queue), _time(decision))
    return None if found == RouterTimes(None, None) else found


def _time(seconds: Histogram | None) -> RouterTime | None:
    if seconds is None:
        return None
    num, p50, p99 = seconds.counts[-1], quantile(seconds, 0.5), quantile(seconds, 0.99)
    if p50 is None or p99 is None:
        return None
    return RouterTime(num, seconds.total / num * 1e3, p50 * 1e3, p99 * 1e3)
