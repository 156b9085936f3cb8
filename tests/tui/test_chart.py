"""The braille plot: its size is exact, its scale is steady, no peak is lost, gaps are gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.telemetry.trends import WINDOWS
from dynctl.tui.chart import AXIS, Curve, Scale, chart, scale_for, spread, time_axis
from dynctl.tui.draw import milliseconds, plain, width_of

MINUTE = WINDOWS[0]


def drawn(points, top=1.0, goal=None, size=(27, 5)):
    scale = Scale(top, milliseconds, goal)
    return [plain(found) for found in chart([Curve(points)], scale, MINUTE, *size)]


@given(
    st.lists(st.none() | st.floats(0, 1e6), max_size=400),
    st.integers(AXIS + 1, 200),
    st.integers(2, 30),
    st.floats(0, 1e6),
)
def test_a_plot_has_exactly_its_size(points, width, height, top):
    found = chart([Curve(points)], Scale(top, milliseconds, top / 2), MINUTE, width, height)

    assert len(found) == height
    assert {width_of(one) for one in found} == {width}


def test_a_rising_course_goes_from_bottom_left_to_top_right():
    texts = drawn([i / 39 for i in range(40)])

    assert texts[0].startswith(" 1000 ┤")
    assert texts[0][-1] > "⠀"
    assert texts[0][AXIS] == " "
    assert texts[3].startswith("    0 ┤")
    assert texts[3][AXIS] > "⠀"
    assert texts[3][-1] == " "


def test_a_gap_is_left_empty():
    texts = drawn([0.5] * 10 + [None] * 20 + [0.5] * 10)

    middle = [text[AXIS + 6 : AXIS + 14] for text in texts[:-1]]
    assert all(text.strip() == "" for text in middle)


def test_the_goal_is_a_dashed_line_with_its_value():
    texts = drawn([0.1] * 40, top=1.0, goal=0.8)
    (line,) = [text for text in texts if "╌" in text]

    assert line.startswith("  800 ┤")
    assert line[AXIS:] == "╌" * 20


def test_a_curve_is_drawn_over_the_goal():
    row = next(text for text in drawn([0.8] * 20 + [None] * 20, goal=0.8) if "╌" in text)

    assert set(row[AXIS : AXIS + 10]) == {"⣀"}
    assert set(row[AXIS + 10 :]) == {"╌"}


@pytest.mark.parametrize(
    ("highest", "goal", "top"),
    [(0.1, 0.4, 0.5), (0.5, 0.4, 0.5), (0.51, 0.4, 1.0), (3.0, 0.4, 4.0), (0.3, None, 0.5), (7.0, None, 10.0),
     (0.0, None, 0.0)],
)  # fmt: skip
def test_the_scale_holds_the_goal_and_changes_in_steps(highest, goal, top):
    scale = scale_for([Curve([None, highest, 0.0])], milliseconds, goal)

    assert scale.top == pytest.approx(top)


def test_the_highest_of_points_that_share_a_place_is_kept():
    assert spread([1.0, 9.0, None, 2.0, None, None], 3) == [9.0, 2.0, None]
    assert spread([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
    assert spread([], 2) == [None, None]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", [1, 8, 30, 73, 150])
def test_the_axis_of_time_begins_with_the_window_and_ends_now(window, width):
    axis = time_axis(window, width)

    assert len(axis) == width
    if width >= 30:
        assert axis.endswith("now")
        assert axis.startswith(
            {"1m": "-60s", "5m": "-5m", "15m": "-15m", "1h": "-60m"}[window.name]
        )
