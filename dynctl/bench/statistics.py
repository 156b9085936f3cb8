"""Exact percentiles with bootstrap intervals. Pure."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 500
ENOUGH_FOR_P99 = 1000
"""With fewer samples p99 rests on less than ten of them, and is marked."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A metric over a run. Percentiles are None with fewer than two samples."""

    num: int
    mean: float
    min: float
    max: float
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p50_interval: tuple[float, float] | None = None
    p99_interval: tuple[float, float] | None = None
    is_p99_weak: bool = True


def percentile(ordered: Sequence[float], q: float) -> float:
    """Take the q-quantile (0 to 1) of sorted samples, linear between neighbours."""
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def bootstrap(ordered: Sequence[float], q: float, rng: random.Random) -> tuple[float, float]:
    """Bound the q-quantile of sorted samples: the middle 95% of its values over bootstrap resamples.

    A resample is n draws `ordered[floor(n·U)]`; since that is monotone in U, its k-th smallest is the draw at the
    k-th smallest of n uniform numbers, which is Beta(k, n−k+1) distributed. So each resample costs two Beta draws
    instead of n draws and a sort.
    """
    n = len(ordered)
    rank = q * (n - 1)
    k = math.floor(rank) + 1
    found = []
    for _ in range(NUM_RESAMPLES):
        low_u = rng.betavariate(k, n - k + 1)
        low = ordered[min(n - 1, int(n * low_u))]
        value = low
        if k < n:
            high_u = low_u + (1 - low_u) * rng.betavariate(1, n - k)
            value += (ordered[min(n - 1, int(n * high_u))] - low) * (rank - (k - 1))
        found.append(value)
    found.sort()
    return percentile(found, 0.025), percentile(found, 0.975)


def summarize(values: Iterable[float | None], seed: int) -> Stat | None:
    """Summarise the samples that are there; None when none are."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    n = len(ordered)
    mean = math.fsum(ordered) / n
    if n < 2:
        return Stat(n, mean, ordered[0], ordered[-1])
    rng = random.Random(seed)  # noqa: S311 - not a secret
    return Stat(
        num=n,
        mean=mean,
        min=ordered[0],
        max=ordered[-1],
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        p50_interval=bootstrap(ordered, 0.5, rng),
        p99_interval=bootstrap(ordered, 0.99, rng),
        is_p99_weak=n < ENOUGH_FOR_P99,
    )
