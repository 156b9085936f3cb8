"""A braille plot over time: fixed scale, axes, the goal as a dashed line. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from dynctl.telemetry.trends import Window
from dynctl.tui.draw import MISSING, Line, Span, cell, line

AXIS = 7
"""Cells left of the plot."""
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Of one cell: left and right column, each from top to bottom."""
_GOAL_MARK = "╌"
_HEADROOM = 1.25

Points = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """One course, oldest point first."""

    points: Points
    style: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """What the height means."""

    top: float
    show: Callable[[float | None], str]
    goal: float | None = None


def scale_for(
    curves: Sequence[Curve], show: Callable[[float | None], str], goal: float | None = None
) -> Scale:
    """Choose a scale that changes seldom, so that the shape means the same over time: the goal's, doubled while it has to be.

    Without a goal: the next of 1, 2, 5, 10 and so on.
    """
    highest = max((p for curve in curves for p in curve.points if p is not None), default=0.0)
    if goal:
        top = goal * _HEADROOM
        while top < highest:
            top *= 2
        return Scale(top, show, goal)
    top, steps = 1e-6, (2.0, 2.5, 2.0)
    at = 0
    while top < highest:
        top *= steps[at % 3]
        at += 1
    return Scale(top if highest else 0.0, show)


def chart(
    curves: Sequence[Curve], scale: Scale, window: Window, width: int, height: int
) -> list[Line]:
    """Draw curves, later ones over earlier ones, `height` lines with the axis of time as the last."""
    room_x, room_y = max(1, width - AXIS), max(1, height - 1)
    dots, styles = _dots(curves, scale.top, room_x, room_y)
    goal_row = None
    if scale.goal and scale.top:
        goal_row = _row(scale.goal / scale.top, room_y * 4) // 4
    drawn = []
    for y in range(room_y):
        mark = _mark(scale, y, goal_row, room_y)
        cells = [
            (chr(_BLANK + bits), style)
            if bits
            else ((_GOAL_MARK, "warn") if y == goal_row else (" ", ""))
            for bits, style in zip(dots[y], styles[y], strict=True)
        ]
        spans = [
            Span("".join(text for text, _ in run), style)
            for style, run in groupby(cells, key=itemgetter(1))
        ]
        drawn.append(line(Span(f"{cell(mark, 5, is_right=True)} ┤", "dim"), *spans))
    drawn.append(line(Span(" " * (AXIS - 1) + "└" + time_axis(window, room_x), "dim")))
    return drawn[:height]


def _mark(scale: Scale, y: int, goal_row: int | None, height: int) -> str:
    if y == goal_row:
        return scale.show(scale.goal)
    if y == 0:
        return scale.show(scale.top) if scale.top else MISSING
    return "0" if y == height - 1 else ""


def _dots(
    curves: Sequence[Curve], top: float, width: int, height: int
) -> tuple[list[list[int]], list[list[str]]]:
    dots = [[0] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for curve in curves:
        before: int | None = None
        for x, value in enumerate(spread(curve.points, width * 2)):
            if value is None or top <= 0:
                before = None
                continue
            at = _row(value / top, height * 4)
            # A steep change is joined up, so that a course is one line.
            low, high = (at, at) if before is None else (min(at, before), max(at, before))
            for y in range(low, high + 1):
                dots[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
                styles[y // 4][x // 2] = curve.style
            before = at
    return dots, styles


def _row(share: float, height: int) -> int:
    return round((1 - max(0.0, min(1.0, share))) * (height - 1))


def spread(points: Points, width: int) -> list[float | None]:
    """Stretch or thin a course to a width; of points that share a place the highest is kept, so that no peak is lost."""
    found: list[float | None] = []
    for x in range(width):
        first = x * len(points) // width
        last = max(first + 1, (x + 1) * len(points) // width)
        known = [p for p in points[first:last] if p is not None]
        found.append(max(known) if known else None)
    return found


def time_axis(window: Window, width: int) -> str:
    """Write `-5m ─── -4m … now` across a width."""
    per, unit = (
        (3600, "h") if window.span_s > 7200 else (60, "m") if window.span_s > 60 else (1, "s")
    )
    span = window.span_s // per
    step = next(
        s for s in (1, 5, 10, 15, 20, 30, span) if span // s <= max(1, width // 8) or s == span
    )
    axis = ["─"] * width
    for ago in range(span, 0, -step):
        label = f"-{ago}{unit}"
        at = round((span - ago) * width / span)
        if at + len(label) + 4 <= width:
            axis[at : at + len(label)] = label
    axis[max(0, width - 3) :] = "now"[: min(3, width)]
    return "".join(axis)[:width]
