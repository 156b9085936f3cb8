"""Tables of lines: columns with priorities, dropped in order when the width is short. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from dynctl.tui.draw import Line, Span, cell

R = TypeVar("R")

GAP = 1


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One column of a table of R."""

    title: str
    width: int
    show: Callable[[R, int], Span]
    """Row and width to a styled text; the text is fitted to the width afterwards."""
    drop: int = 0
    """Higher goes first when there is no room; 0 is never dropped."""
    is_right: bool = True
    is_flexible: bool = False
    """Takes what width is left."""
    max_width: int = 0
    """Of a flexible column; 0: no limit."""


def choose(columns: Sequence[Column[R]], width: int) -> list[Column[R]]:
    """Keep the columns that fit, and widen the flexible ones, left to right, into what is left."""
    kept = list(columns)
    while _width(kept) > width and any(c.drop for c in kept):
        kept.remove(max(kept, key=lambda c: c.drop))
    left = width - _width(kept)
    for index, column in enumerate(kept):
        if column.is_flexible and left > 0:
            grow = min(left, column.max_width - column.width) if column.max_width else left
            kept[index] = replace(column, width=column.width + max(0, grow))
            left -= max(0, grow)
    return kept


def _width(columns: Sequence[Column[R]]) -> int:
    return sum(c.width + GAP for c in columns)


def header(columns: Sequence[Column[R]]) -> Line:
    """Draw the titles."""
    titles = (" " * GAP + cell(c.title, c.width, is_right=c.is_right) for c in columns)
    return (Span("".join(titles), "title"),)


def row(columns: Sequence[Column[R]], value: R) -> Line:
    """Draw one row."""
    spans: list[Span] = []
    for column in columns:
        text, style = column.show(value, column.width)
        spans.append(Span(" " * GAP))
        spans.append(Span(cell(text, column.width, is_right=column.is_right), style))
    return tuple(spans)
