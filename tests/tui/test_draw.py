"""Drawing primitives: widths are exact, gaps are gaps, marks do not rest on colour alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import (
    Span,
    beside,
    cell,
    fit,
    judged,
    line,
    milliseconds,
    percent,
    plain,
    spark,
    width_of,
)


@given(st.text(max_size=30), st.integers(1, 40), st.booleans())
def test_a_cell_has_exactly_its_width(text, width, is_right):
    assert cell_len(cell(text, width, is_right=is_right)) == width


@given(st.lists(st.text(max_size=10), max_size=5), st.integers(0, 60))
def test_a_fitted_line_has_exactly_its_width(texts, width):
    assert width_of(fit(line(*texts), width)) == width


def test_a_long_name_ends_in_an_ellipsis():
    assert cell("chat-prefill-0", 8) == "chat-pr…"


def test_hostile_text_is_cleaned_and_markup_stays_text():
    drawn = cell("[red]a\x1b[2Jb\n\u202ec", 30)

    assert drawn.isprintable()
    assert "[red]a" in drawn


def test_a_sparkline_keeps_gaps_and_fills_from_the_right():
    assert spark([1.0, None, 8.0], 5, 8.0) == "  ▁ █"
    assert spark([0.0, 0.0], 2) == "▁▁"
    assert spark([], 4) == "    "
    assert spark([9.0, 1.0], 2, 4.0) == "█▂"


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=300), st.integers(1, 80))
def test_a_sparkline_has_exactly_its_width(values, width):
    assert len(spark(values, width)) == width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0004, "0.40"), (0.0021, "2.1"), (0.018, "18"), (0.462, "462"), (9.1, "9100")],
)
def test_milliseconds(seconds, text):
    assert milliseconds(seconds) == text


def test_unknown_is_a_dash_and_zero_is_zero():
    assert percent(None) == "–"
    assert percent(0.0) == "0%"


@pytest.mark.parametrize(
    ("value", "span"),
    [
        (None, Span("x")),
        (0.1, Span("x", "good")),
        (0.4, Span("!x", "warn")),
        (0.6, Span("!x", "bad")),
    ],
)
def test_colour_by_goal_is_never_alone(value, span):
    assert judged("x", value, 0.5) == span


def test_beside_keeps_columns_apart():
    drawn = beside([line("ab"), line("c")], [line("x")], 12)

    assert [plain(found) for found in drawn] == ["ab     x", "c      "]


def column(title, width, drop=0, **options):
    return Column(title, width, lambda value, _: Span(str(value)), drop=drop, **options)


def test_columns_are_dropped_in_order_of_priority():
    columns = [column("A", 5), column("B", 5, drop=1), column("C", 5, drop=2)]

    assert [c.title for c in choose(columns, 18)] == ["A", "B", "C"]
    assert [c.title for c in choose(columns, 17)] == ["A", "B"]
    assert [c.title for c in choose(columns, 11)] == ["A"]
    assert [c.title for c in choose(columns, 2)] == ["A"]


def test_flexible_columns_take_what_is_left_up_to_their_limit():
    columns = [column("A", 5, is_flexible=True, max_width=8), column("B", 5, is_flexible=True)]

    assert [c.width for c in choose(columns, 30)] == [8, 20]


def test_titles_stand_over_their_cells():
    columns = choose([column("NAME", 6, is_right=False), column("N", 4)], 20)

    assert plain(header(columns)) == " NAME      N"
    assert plain(row(columns, 7)) == " 7         7"


def test_a_course_beside_a_scale_next_to_nothing_is_full():
    assert spark([1e17, 0.0, -1.0], 3, 5e-324) == "█▁▁"
