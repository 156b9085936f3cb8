"""A list with a cursor: which rows are in sight, the chosen one marked, a line below that says about the rest. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from dynctl.tui.draw import MISSING, Line, Span, fit, joined, line, restyled
from dynctl.tui.view import View

R = TypeVar("R")


def listing(
    view: View,
    listed: Sequence[R],
    draw: Callable[[R], Line],
    size: tuple[int, int],
    what: str,
    *notes: str,
) -> list[Line]:
    """Draw the rows around the cursor, no others, and the line below; `size` is width and height, `notes` go to its right end."""
    width, height = size
    room = max(0, height - 1)
    cursor, first = in_sight(view, len(listed), room)
    drawn: list[Line] = []
    for index, one in enumerate(listed[first : first + room], first):
        row = draw(one)
        is_chosen = index == cursor
        drawn.append(
            restyled(fit((Span("▸"), *_behind_mark(row)), width), "cursor") if is_chosen else row
        )
    drawn += [()] * (room - len(drawn))
    return [*drawn, footer(view, len(listed), room, width, what, *notes)][:height]


def in_sight(view: View, num_rows: int, room: int) -> tuple[int, int]:
    """Say which row the cursor is on, and which is the first in sight."""
    cursor = min(view.choices.place.cursor, max(0, num_rows - 1))
    return cursor, max(0, min(cursor - room + 1 if cursor >= room else 0, num_rows - room))


def footer(view: View, num_rows: int, room: int, width: int, what: str, *notes: str) -> Line:
    """Say how many rows are out of sight, or how many there are, once that is known."""
    hidden = num_rows - room
    told = f" … {hidden} more (j/k)" if hidden > 0 else f" {num_rows} {what}"
    left = line(told if view.overview is not None else "")
    right = joined((line(note) for note in notes), "   ")
    room_left = max(0, width - sum(len(span.text) for span in right) - 1)
    return restyled((*fit(left, room_left), *right), "dim")


def filter_note(view: View) -> str:
    """The filter, with a cursor while it is typed."""
    chosen = view.choices
    shown = f"{chosen.place.filter}▏" if chosen.is_typing else chosen.place.filter or MISSING
    return f"filter: {shown}"


def _behind_mark(row: Line) -> Line:
    """A row without the blank its mark takes the place of."""
    if not row:
        return row
    return (Span(row[0].text[1:], row[0].style), *row[1:])
