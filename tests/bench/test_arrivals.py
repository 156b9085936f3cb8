"""Schedules: rates, seeds, and what is refused."""

import itertools
import random

import pytest

from dynctl.bench.arrivals import Load, parse_duration, parse_load
from dynctl.errors import UsageError


def test_constant_arrivals_are_equally_spaced_from_the_start():
    assert list(parse_load("constant:4").offsets_s(random.Random(1), 1.0)) == [0.0, 0.25, 0.5, 0.75]


def test_rounding_lets_no_arrival_in_at_the_end():
    assert len(list(parse_load("constant:20").offsets_s(random.Random(1), 0.5))) == 10


def test_poisson_arrivals_have_the_rate_and_exponential_gaps():
    times = list(parse_load("poisson:50").offsets_s(random.Random(1), 200.0))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)

    assert len(times) == pytest.approx(10_000, rel=0.04)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)
    assert all(0 < t < 200.0 for t in times)


def test_the_seed_decides_the_schedule():
    def times(seed):
        return list(parse_load("poisson:10").offsets_s(random.Random(seed), 5.0))

    assert times(3) == times(3)
    assert times(3) != times(4)


@pytest.mark.parametrize("text", ["poisson:8", "constant:0.5", "concurrency:64"])
def test_loads_print_as_they_are_written(text):
    assert str(parse_load(text)) == text


def test_only_concurrency_is_a_closed_loop():
    assert parse_load("poisson:1").is_open
    assert parse_load("concurrency:3") == Load("concurrency", concurrency=3)
    assert not parse_load("concurrency:3").is_open


@pytest.mark.parametrize(
    "text",
    ["", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf", "burst:3",
     "concurrency:0", "concurrency:1.5", "concurrency:1000000", "constant:x"],
)  # fmt: skip
def test_what_is_no_load_is_refused_with_examples(text):
    with pytest.raises(UsageError) as caught:
        parse_load(text)

    assert "poisson:8" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15s", 15.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0), ("7", 7.0), ("1.5s", 1.5)],
)
def test_durations(text, seconds):
    assert parse_duration(text, "--duration") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 days", "1e3s"])
def test_bad_durations_name_the_flag(text):
    with pytest.raises(UsageError, match="--warmup"):
        parse_duration(text, "--warmup")
