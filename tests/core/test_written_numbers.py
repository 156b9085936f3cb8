"""How quantities are written for people."""

import pytest

from dynctl.core.units import GIB, format_bytes, format_count, format_number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.5456, "0.546"),
        (0.0000123456, "0.0000123"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.6, "1,000"),
        (1912.0, "1,910"),
        (-1912.0, "-1,910"),
        (1_762_100.0, "1,760,000"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_digits_and_no_power_of_ten(number, text):
    assert format_number(number) == text


def test_sizes_and_counts_just_below_the_next_unit_are_plain():
    assert format_bytes(1010 * GIB) == "1,010 GiB"
    assert format_count(999_900) == "1,000k"
