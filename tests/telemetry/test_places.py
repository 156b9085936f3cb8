"""What an operator writes for a place in a recording."""

from datetime import datetime

import pytest

from dynctl.errors import UsageError
from dynctl.telemetry.places import place_s

START = datetime(2026, 11, 30, 23, 50, 20).timestamp()  # noqa: DTZ001 - local, as operators write it


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("23:50", 0.0),
        ("23:51", 40.0),
        ("23:50:30", 10.0),
        ("00:10", 1180.0),
        ("0:10:05", 1185.0),
        ("2026-12-01T00:10", 1180.0),
        ("2026-12-01 00:10:05", 1185.0),
        ("+0", 0.0),
        ("+90", 90.0),
        ("+90s", 90.0),
    ],
)
def test_times_of_day_dates_and_seconds(text, at_s):
    assert place_s(text, START, 0.0, 3600.0) == pytest.approx(at_s)


def test_the_first_part_may_be_gone():
    assert place_s("23:51", START, 30.0, 3600.0) == pytest.approx(40.0)
    assert place_s("+5", START, 30.0, 3600.0) == pytest.approx(35.0)


@pytest.mark.parametrize("text", ["23:40", "01:00", "2026-11-29T23:55", "+99999"])
def test_a_time_outside_is_refused_with_what_there_is(text):
    with pytest.raises(UsageError, match="is not in this recording") as found:
        place_s(text, START, 0.0, 3600.0)
    assert found.value.hint == "it goes from 2026-11-30T23:50:20 to 2026-12-01T00:50:20"


@pytest.mark.parametrize("text", ["", "noon", "25:00", "12:99", "-5", "+", "9999-99-99", "+1e9"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="is no time"):
        place_s(text, START, 0.0, 3600.0)
