"""The course of one latency of the shown deployment, drawn over time against its goal; panels share it. Pure."""

from dataclasses import dataclass

from dynctl.telemetry.history import Latency
from dynctl.tui.draw import MISSING, Line, Span, line, milliseconds, plot
from dynctl.tui.view import View

AXIS = 7


@dataclass(frozen=True, slots=True)
class Course:
    """What to draw."""

    title: str
    key: str
    """Its name among the trend values of a deployment."""
    found: Latency | None
    goal_ms: float | None


def course_rows(view: View, what: Course, width: int, height: int) -> list[Line]:
    """Draw the percentiles in a line, and p99 over time below with the goal as a dashed line."""
    found, goal_ms = what.found, what.goal_ms
    name = view.deployment.name if view.deployment else ""
    course = view.trends.of(f"deployment:{name}:{what.key}")
    p50, p95, p99 = (found.p50_s, found.p95_s, found.p99_s) if found else (None, None, None)
    goal = f"   SLO {goal_ms:g}" if goal_ms is not None else ""
    figures = f"p50 {milliseconds(p50)}  p95 {milliseconds(p95)}  p99 {milliseconds(p99)}"
    head = line(Span(f"{what.title} ms ", "title"), f" {figures}{goal}")
    highest = max((v for v in course if v is not None), default=0.0)
    # The scale holds the goal, so that the shape means the same over time.
    top = max(highest, (goal_ms or 0.0) / 1e3)
    lines = plot(course, max(1, width - AXIS), max(0, height - 1), top)
    drawn = [head]
    for index, text in enumerate(lines):
        mark = {0: milliseconds(top) if top else MISSING, len(lines) - 1: "0"}.get(index, "")
        goal_here = (
            goal_ms is not None and top > 0 and index == _row_of(goal_ms / 1e3 / top, len(lines))
        )
        filled = text.replace(" ", "╌") if goal_here else text
        drawn.append(line(Span(f"{mark:>5} ┤", "dim"), Span(filled, "warn" if goal_here else "")))
    return drawn[:height]


def _row_of(share: float, height: int) -> int:
    return max(0, min(height - 1, round((1 - share) * height)))
