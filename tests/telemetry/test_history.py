"""Rates and percentiles over windows: restarts, repeats, gaps, odd bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.core.exposition import quantile
from dynctl.core.snapshot import EngineSample, Histogram, HostSnapshot, RouterSample, Snapshot
from dynctl.telemetry.history import (
    History,
    Series,
    latency,
    merge,
)


def sample(incarnation="i1", **fields):
    return EngineSample("e", incarnation, **fields)


def tokens(*points):
    """A series of (incarnation, generation tokens) a second apart."""
    series = Series()
    for second, (incarnation, value) in enumerate(points):
        series.add(float(second), sample(incarnation, generation_tokens_total=value))
    return series.grown("generation_tokens_total")


def test_growth_within_one_incarnation_is_the_difference():
    assert tokens(("a", 5), ("a", 7), ("a", 7), ("a", 12)) == 7


def test_growth_across_a_restart_counts_the_new_value_whole():
    assert tokens(("a", 100), ("a", 110), ("b", 4), ("b", 9)) == 10 + 9


def test_a_new_incarnation_counts_from_zero_even_when_its_counter_is_already_higher():
    assert tokens(("a", 10), ("b", 30)) == 30


def test_a_counter_that_falls_without_a_new_incarnation_is_a_restart_too():
    assert tokens(("a", 10), ("a", 3)) == 3


def test_growth_looks_past_scrapes_without_the_family():
    assert tokens(("a", None), ("a", 10), ("a", None), ("a", 14), ("a", None)) == 4


@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(0, 1e6)), max_size=20))
def test_growth_is_what_a_walk_over_all_points_finds(moments):
    # Incarnations never come back.
    starts = itertools.accumulate(int(is_new) for is_new, _ in moments)
    points = [(str(n), value) for n, (_, value) in zip(starts, moments, strict=True)]
    known = [point for point in points if point[1] is not None]
    grown, before = 0.0, None
    for point in known:
        if before is not None:
            is_restart = before[0] != point[0] or point[1] < before[1]
            grown += point[1] if is_restart else point[1] - before[1]
        before = point
    found = tokens(*points)

    if len(known) < 2:
        assert found is None
    else:
        assert found == pytest.approx(grown, abs=1e-3)


def test_quantile_is_linear_inside_the_bucket():
    histogram = Histogram((1.0, 2.0, 4.0), (0.0, 50.0, 100.0, 100.0), 0.0)

    assert quantile(histogram, 0.25) == pytest.approx(1.5)
    assert quantile(histogram, 0.5) == pytest.approx(2.0)
    assert quantile(histogram, 0.75) == pytest.approx(3.0)


def test_quantile_beyond_the_last_bound_is_that_bound():
    assert quantile(Histogram((1.0,), (1.0, 10.0), 50.0), 0.99) == 1.0


def test_quantile_of_nothing_is_none():
    assert quantile(Histogram((1.0,), (0.0, 0.0), 0.0), 0.5) is None
    assert latency(None) is None
    assert latency(Histogram((1.0,), (0.0, 0.0), 0.0)) is None


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=8),
    st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
)
def test_quantiles_are_monotone_and_within_the_bounds(per_bucket, qs):
    bounds = tuple(float(2**i) for i in range(len(per_bucket) - 1))
    counts = tuple(float(sum(per_bucket[: i + 1])) for i in range(len(per_bucket)))
    low, high = (quantile(Histogram(bounds, counts, 0.0), q) for q in qs)

    if counts[-1] == 0:
        assert low is high is None
    else:
        assert 0 <= low <= high <= bounds[-1]


def observed(*points):
    series = Series()
    for second, (incarnation, histogram) in enumerate(points):
        series.add(float(second), sample(incarnation, ttft_s=histogram))
    return series.observed("ttft_s")


def test_observations_of_a_window_are_the_difference():
    earlier = Histogram((1.0,), (2.0, 3.0), 4.0)
    later = Histogram((1.0,), (5.0, 7.0), 9.0)

    assert observed(("a", earlier), ("a", later)) == Histogram((1.0,), (3.0, 4.0), 5.0)
    assert observed(("a", earlier)) is None


def test_observations_across_a_restart_add_both_lives():
    points = [
        ("a", Histogram((1.0,), (2.0, 3.0), 4.0)),
        ("a", Histogram((1.0,), (4.0, 6.0), 8.0)),
        ("b", Histogram((1.0,), (1.0, 1.0), 0.5)),
        ("b", Histogram((1.0,), (2.0, 5.0), 9.0)),
    ]

    assert observed(*points) == Histogram((1.0,), (2.0 + 2.0, 3.0 + 5.0), 4.0 + 9.0)


def test_merge_of_different_bounds_keeps_the_shared_ones_exact():
    one = Histogram((1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0), 5.0)
    two = Histogram((2.0, 3.0, 9.0), (10.0, 20.0, 30.0, 40.0), 6.0)

    assert merge([one, None, two]) == Histogram((2.0, 3.0), (12.0, 23.0, 44.0), 11.0)
    assert merge([]) is None


def test_rate_needs_two_samples_and_divides_by_the_time_between_them():
    series = Series()
    series.add(100.0, sample(generation_tokens_total=1000.0))
    assert series.rate("generation_tokens_total") is None

    series.add(102.0, sample(generation_tokens_total=1300.0))
    assert series.rate("generation_tokens_total") == pytest.approx(150.0)


def test_a_sample_reported_again_does_not_thin_the_rate():
    series = Series()
    for measured_s, tokens in ((0.0, 0.0), (1.0, 100.0), (1.05, 100.0), (1.1, 100.0)):
        series.add(measured_s, sample(generation_tokens_total=tokens))

    assert series.rate("generation_tokens_total") == pytest.approx(100.0)
    assert series.measured_s == 1.0


def test_a_family_the_engine_does_not_have_stays_unknown():
    series = Series()
    series.add(0.0, sample())
    series.add(1.0, sample())

    assert series.rate("generation_tokens_total") is None
    assert series.grown("generation_tokens_total") is None
    assert series.observed("ttft_s") is None


def test_rate_looks_only_at_its_window():
    series = Series()
    for second in range(61):
        series.add(float(second), sample(generation_tokens_total=float(max(0, second - 50) * 10)))

    assert series.rate("generation_tokens_total", 10.0) == pytest.approx(10.0)
    assert series.grown("generation_tokens_total", 60.0) == pytest.approx(100.0)


def snapshot_at(age_s, tokens):
    engine = EngineSample("e", "i", generation_tokens_total=tokens)
    return Snapshot("c", 0.0, (HostSnapshot("h", engines=(engine,), age_s=age_s),))


def test_history_counts_from_when_a_sample_was_measured_not_when_it_was_shown():
    history = History()
    history.add(snapshot_at(0.0, 0.0), 10.0)
    history.add(snapshot_at(1.0, 0.0), 11.0)
    history.add(snapshot_at(0.5, 150.0), 12.0)

    assert history.engine("e").rate("generation_tokens_total") == pytest.approx(100.0)


def test_history_forgets_what_is_long_gone():
    history = History()
    history.add(snapshot_at(0.0, 0.0), 10.0)
    history.add(Snapshot("c", 0.0, ()), 1000.0)

    assert history.engine("e").rate("generation_tokens_total") is None
    assert not history._series


def test_an_engine_and_a_router_of_one_name_are_two_series():
    history = History()
    for at in (1.0, 2.0):
        host = HostSnapshot(
            "h",
            engines=(EngineSample("x", "i", generation_tokens_total=10.0 * at),),
            routers=(RouterSample("x", "chat", requests_total=3.0 * at),),
        )
        history.add(Snapshot("c", at, (host,)), at)

    assert history.engine("x").rate("generation_tokens_total") == 10.0
    assert history.router("x").rate("requests_total") == 3.0
    assert history.relay("x").rate("requests_total") is None
