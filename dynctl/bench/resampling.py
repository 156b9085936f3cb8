"""How sure a difference between two sets of requests is, by drawing whole stretches of neighbours anew. Pure.

Neighbours wait in the same queues and find the same caches, so single requests drawn anew would make every interval
too narrow. Not here: which figures are compared (`compare`), intervals of one run (`statistics`).
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from dynctl.bench.statistics import NUM_RESAMPLES, percentile

FEWEST_STRETCHES = 8
"""Fewer say nothing about how much stretches vary; so many are of 57 requests."""
Z = 1.959964
"""Of the normal distribution at 0.975."""
FEWEST_BEYOND = 5
"""A percentile that rests on fewer samples beyond it gets no verdict: 500 samples for p99, 50 for p90."""


class Statistic(Protocol):
    """A figure over stretches of requests, each counted as often as its weight says."""

    num_samples: int
    num_stretches: int
    needed: int
    """Samples it takes for a verdict."""

    def at(self, weights: Sequence[int]) -> float | None:
        """The figure; None when nothing is left to take it from."""
        ...


class Quantile:
    """The q-quantile (0 to 1) of all samples together, linear between neighbours as `statistics.percentile`."""

    def __init__(self, stretches: Sequence[Sequence[float]], q: float) -> None:
        falling = sorted(
            ((value, at) for at, values in enumerate(stretches) for value in values), reverse=True
        )
        self._values = [value for value, _ in falling]
        self._owners = [at for _, at in falling]
        self._sizes = [len(values) for values in stretches]
        self._q = q
        self.num_samples = len(falling)
        self.num_stretches = len(stretches)
        self.needed = round(FEWEST_BEYOND / min(q, 1 - q))

    def at(self, weights: Sequence[int]) -> float | None:
        """Walk down from the largest: tails, which matter most, cost a hundredth of the samples."""
        num = sum(map(int.__mul__, weights, self._sizes))
        if not num:
            return None
        rank = (1 - self._q) * (num - 1)
        whole = int(rank)
        counted = itertools.accumulate(map(weights.__getitem__, self._owners))
        upper: float | None = None
        for value, up_to in zip(self._values, counted, strict=True):
            if upper is None and up_to > whole:
                upper = value
            if upper is not None and up_to > min(whole + 1, num - 1):
                return upper + (value - upper) * (rank - whole)
        return upper


class Ratio:
    """Sum of one quantity over the sum of another: means, hit rates, shares."""

    def __init__(self, stretches: Sequence[tuple[float, float]], num_samples: int) -> None:
        self._above = [above for above, _ in stretches]
        self._below = [below for _, below in stretches]
        self.num_samples = num_samples
        self.num_stretches = len(stretches)
        self.needed = FEWEST_STRETCHES

    def at(self, weights: Sequence[int]) -> float | None:
        """Divide the weighted sums."""
        below = sum(w * b for w, b in zip(weights, self._below, strict=True))
        above = sum(w * a for w, a in zip(weights, self._above, strict=True))
        return above / below if below else None


def value_of(statistic: Statistic) -> float | None:
    """The figure itself: everything counts once."""
    return statistic.at([1] * statistic.num_stretches)


def is_enough(statistic: Statistic) -> bool:
    """Whether there is enough to say how sure the figure is."""
    return statistic.num_stretches >= FEWEST_STRETCHES and statistic.num_samples >= statistic.needed


def stretch_length(num: int) -> int:
    """Requests per stretch: as many as there are stretches, so that both how long and how many grow."""
    return max(1, round(math.sqrt(num)))


def interval(
    before: Statistic,
    after: Statistic,
    change: Callable[[float, float], float | None],
    rng: random.Random,
    *,
    are_paired: bool = False,
) -> tuple[float, float] | None:
    """Bound a change: the middle 95% of it over resamples, widened for few stretches; None when it cannot be told.

    Pairs (the same requests under both) are drawn together, so that what varies between requests cancels out.
    """
    found = sorted(_changes(before, after, change, rng, are_paired=are_paired))
    if len(found) < NUM_RESAMPLES / 2:
        return None
    middle = percentile(found, 0.5)
    wider = _widening(min(before.num_stretches, after.num_stretches))
    return (
        middle + (percentile(found, 0.025) - middle) * wider,
        middle + (percentile(found, 0.975) - middle) * wider,
    )


_FEW_FREEDOM = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t at 0.975 for 1 to 9 degrees of freedom."""


def student(freedom: int) -> float:
    """Student's t at 0.975 for so many degrees of freedom, at least one.

    Source: tables up to 9; from there the Cornish-Fisher expansion, which is within 0.2%.
    """
    if freedom <= len(_FEW_FREEDOM):
        return _FEW_FREEDOM[freedom - 1]
    return Z + 2.3719 / freedom + 2.8226 / freedom**2


def _widening(num: int) -> float:
    """How much wider an interval from so many stretches has to be: Student's t over the normal, and n over n − 1."""
    freedom = num - 1
    return student(freedom) / Z * math.sqrt(num / freedom)


def _changes(
    before: Statistic,
    after: Statistic,
    change: Callable[[float, float], float | None],
    rng: random.Random,
    *,
    are_paired: bool,
) -> Iterator[float]:
    for _ in range(NUM_RESAMPLES):
        one = _draw(before.num_stretches, rng)
        other = one if are_paired else _draw(after.num_stretches, rng)
        early, late = before.at(one), after.at(other)
        found = None if early is None or late is None else change(early, late)
        if found is not None:
            yield found


def _draw(num: int, rng: random.Random) -> list[int]:
    """How often each of so many stretches is drawn, with replacement."""
    weights = [0] * num
    for at in rng.choices(range(num), k=num):
        weights[at] += 1
    return weights
