"""Courses: gaps are gaps, a long course has a point every ten seconds."""

from dynctl.telemetry.trends import WINDOWS, Trends

ONE_MINUTE, FIVE_MINUTES, QUARTER, HOUR = WINDOWS


def filled(seconds, key="a"):
    trends = Trends()
    for second in range(seconds):
        trends.push({key: float(second)}, 100.0 + second)
    return trends


def test_trends_keep_gaps_and_drop_keys_that_are_gone():
    trends = Trends()
    for second, value in enumerate((1.0, 2.0, None, 4.0)):
        trends.push({"a": value, "b": 0.0}, float(second))
    trends.push({"a": 5.0}, 4.0)

    assert trends.of("a") == (1.0, 2.0, None, 4.0, 5.0)
    assert trends.of("b") == ()


def test_moments_that_were_left_out_are_gaps_and_late_ones_are_not():
    trends = Trends()
    for now_s in (0.0, 1.0, 2.4, 3.2, 7.0, 7.1):
        trends.push({"a": now_s}, now_s)

    assert trends.of("a") == (0.0, 1.0, 2.4, 3.2, None, None, None, 7.0)


def test_a_course_has_as_many_points_as_its_window_whatever_is_known():
    trends = filled(5)

    for window in WINDOWS:
        assert len(trends.course("a", window)) == window.num_points
        assert set(trends.course("unknown", window)) == {None}
    assert trends.course("a", ONE_MINUTE)[-5:] == (0.0, 1.0, 2.0, 3.0, 4.0)


def test_a_long_course_takes_every_tenth_second():
    course = filled(1000).course("a", QUARTER)

    assert course[-3:] == (979.0, 989.0, 999.0)
    assert None not in course


def test_a_long_gap_is_one_in_both_courses():
    trends = filled(60)
    trends.push({"a": 7.0}, 100.0 + 59 + 100)

    assert trends.course("a", FIVE_MINUTES)[-101:] == (59.0, *[None] * 99, 7.0)
    assert trends.course("a", HOUR)[-11:] == (59.0, *[None] * 9, 7.0)


def test_a_copy_stands_still():
    trends = filled(3)
    held = trends.copy()
    trends.push({"a": 9.0}, 103.0)

    assert held.of("a") == (0.0, 1.0, 2.0)
    assert held.course("a", ONE_MINUTE)[-1] == 2.0
