"""Percentiles against their definition, and the bootstrap against resampling by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.bench.statistics import bootstrap, percentile, summarize

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50).map(sorted)


def test_percentile_is_linear_between_neighbours():
    ordered = [10.0, 20.0, 30.0, 40.0]

    assert percentile(ordered, 0.5) == 25.0
    assert percentile(ordered, 0.0) == 10.0
    assert percentile(ordered, 1.0) == 40.0
    assert percentile(ordered, 0.99) == pytest.approx(39.7)


@given(samples, st.floats(0, 1), st.floats(0, 1))
def test_percentiles_are_monotone_and_inside_the_samples(ordered, one, two):
    low, high = sorted((one, two))

    assert ordered[0] <= percentile(ordered, low) <= percentile(ordered, high) + 1e-6
    assert percentile(ordered, high) <= ordered[-1] + 1e-6


def test_bootstrap_agrees_with_resampling_by_hand():
    rng = random.Random(7)
    ordered = sorted(rng.lognormvariate(3, 0.6) for _ in range(400))
    by_hand = sorted(
        percentile(sorted(rng.choices(ordered, k=len(ordered))), 0.9) for _ in range(1500)
    )
    low, high = bootstrap(ordered, 0.9, random.Random(1))

    assert low == pytest.approx(percentile(by_hand, 0.025), rel=0.05)
    assert high == pytest.approx(percentile(by_hand, 0.975), rel=0.05)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_the_interval_lies_inside_the_samples(values):
    ordered = sorted(values)
    low, high = bootstrap(ordered, 0.99, random.Random(1))

    assert ordered[0] <= low <= high <= ordered[-1] + 1e-6


def test_the_same_seed_gives_the_same_interval():
    values = [float(i * i % 97) for i in range(200)]

    assert summarize(values, 3) == summarize(values, 3)


def test_one_sample_has_no_percentiles():
    stat = summarize([4.0, None], 1)

    assert (stat.num, stat.mean, stat.p50, stat.p99, stat.p99_interval) == (
        1,
        4.0,
        None,
        None,
        None,
    )


def test_nothing_is_none():
    assert summarize([None], 1) is None


def test_p99_is_marked_below_a_thousand_samples():
    assert summarize([float(i) for i in range(999)], 1).is_p99_weak
    assert not summarize([float(i) for i in range(1000)], 1).is_p99_weak
