"""Figures of resampled stretches against their definition, and how often intervals hold the truth."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.bench.resampling import (
    Quantile,
    Ratio,
    _changes,
    _widening,
    interval,
    is_enough,
    stretch_length,
    value_of,
)
from dynctl.bench.statistics import percentile


def grew(before, after):
    return after / before - 1


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1e6), max_size=5), st.integers(0, 3)), max_size=12),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_a_weighted_quantile_is_that_of_the_samples_written_out(stretches, q):
    written_out = sorted(v for values, weight in stretches for v in values * weight)
    found = Quantile([values for values, _ in stretches], q).at([w for _, w in stretches])

    assert found == (pytest.approx(percentile(written_out, q)) if written_out else None)


def test_a_ratio_is_of_sums_not_a_mean_of_ratios():
    ratio = Ratio([(1.0, 1.0), (0.0, 3.0)], 2)

    assert value_of(ratio) == 0.25
    assert ratio.at([2, 0]) == 1.0
    assert ratio.at([0, 0]) is None


def test_intervals_hold_the_true_change_about_as_often_as_they_say():
    rng = random.Random(5)
    held = 0
    for trial in range(60):
        before = Quantile([[rng.lognormvariate(3, 0.5)] for _ in range(200)], 0.9)
        after = Quantile([[1.1 * rng.lognormvariate(3, 0.5)] for _ in range(200)], 0.9)
        low, high = interval(before, after, grew, random.Random(trial))
        held += low <= 0.1 <= high

    assert 53 <= held <= 60


def test_pairs_are_drawn_together_so_that_what_requests_differ_in_cancels_out():
    rng = random.Random(1)
    ones = [[rng.lognormvariate(3, 1.0)] for _ in range(100)]
    before, after = Quantile(ones, 0.5), Quantile([[v * 1.02] for [v] in ones], 0.5)

    assert interval(before, after, grew, random.Random(1), are_paired=True) == (
        pytest.approx(0.02),
        pytest.approx(0.02),
    )
    low, high = interval(before, after, grew, random.Random(1))
    assert low < 0 < high


def test_a_percentile_needs_samples_beyond_it():
    assert not is_enough(Quantile([[1.0]] * 499, 0.99))
    assert is_enough(Quantile([[1.0]] * 500, 0.99))
    assert is_enough(Quantile([[1.0]] * 10, 0.5))
    assert not is_enough(Quantile([[1.0] * 500], 0.99))


def test_stretches_are_the_square_root_long():
    assert [stretch_length(n) for n in (0, 1, 9, 100, 1000)] == [1, 1, 3, 10, 32]


@pytest.mark.parametrize(("num", "student"), [(8, 2.3646), (15, 2.1448), (31, 2.0423)])
def test_few_stretches_widen_the_interval_by_students_t(num, student):
    """Against the tables: t at 0.975 with one degree of freedom less than there are stretches."""
    assert _widening(num) == pytest.approx(student / 1.96 * (num / (num - 1)) ** 0.5, rel=0.004)


def test_an_interval_is_wider_by_that_for_the_fewer_stretches():
    few, many = (Ratio([(10.0 + i % 4, 1.0) for i in range(num)], num) for num in (8, 80))
    low, high = interval(few, many, grew, random.Random(1))
    found = sorted(_changes(few, many, grew, random.Random(1), are_paired=False))

    assert high - low == pytest.approx(
        (percentile(found, 0.975) - percentile(found, 0.025)) * _widening(8)
    )


def test_neighbours_that_are_alike_are_drawn_together_which_widens_the_interval():
    rng = random.Random(3)
    alike = [
        level + rng.random()
        for level in (rng.uniform(10, 20) for _ in range(20))
        for _ in range(20)
    ]
    other = [
        level + rng.random()
        for level in (rng.uniform(10, 20) for _ in range(20))
        for _ in range(20)
    ]

    def width(length):
        one, two = (
            Quantile([values[at : at + length] for at in range(0, 400, length)], 0.5)
            for values in (alike, other)
        )
        low, high = interval(one, two, grew, random.Random(1))
        return high - low

    assert width(20) > 2 * width(1)


def test_a_change_from_nothing_cannot_be_told():
    zero = Ratio([(0.0, 1.0)] * 20, 20)

    assert interval(zero, zero, lambda a, b: None if not a else b / a, random.Random(1)) is None
