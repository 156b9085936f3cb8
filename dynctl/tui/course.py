"""The course of one latency over time against its goal, p50 and p99; panels and the engine screen share it. Pure."""

from dataclasses import dataclass

from dynctl.telemetry.history import Latency
from dynctl.tui.chart import Curve, chart, scale_for
from dynctl.tui.draw import Line, Span, fit, joined, line, milliseconds, width_of
from dynctl.tui.view import View


@dataclass(frozen=True, slots=True)
class Course:
    """What to draw."""

    title: str
    key: str
    """Its name among trend values, without the percentile: `engine:ID:itl`."""
    found: Latency | None
    goal_ms: float | None


def course_rows(view: View, what: Course, width: int, height: int) -> list[Line]:
    """Draw the percentiles in a line, and their course below with the goal as a dashed line."""
    found, goal_ms = what.found, what.goal_ms
    p50, p95, p99 = (found.p50_s, found.p95_s, found.p99_s) if found else (None, None, None)
    figures = [
        line(Span(f"{what.title} ms", "title")),
        line(f"p50 {milliseconds(p50)}"),
        line(f"p95 {milliseconds(p95)}"),
        line(f"p99 {milliseconds(p99)}"),
        line(f"SLO {goal_ms:g}" if goal_ms is not None else "no SLO"),
    ]
    head, window = joined(figures), line(Span(f"window {view.window.name}", "dim"))
    room = max(0, width - width_of(window))
    curves = [
        Curve(view.trends.course(f"{what.key}_p50", view.window), "dim"),
        Curve(view.trends.course(f"{what.key}_p99", view.window), "title"),
    ]
    scale = scale_for(curves, milliseconds, None if goal_ms is None else goal_ms / 1e3)
    drawn = [(*fit(head, room), *window)]
    return [*drawn, *chart(curves, scale, view.window, width, max(2, height - 1))][:height]
