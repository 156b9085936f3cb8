"""The course of TTFT of the shown deployment against its goal. Pure."""

from dynctl.tui.course import Course, course_rows
from dynctl.tui.draw import Line
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the percentiles and the course."""
    found = view.deployment.ttft if view.deployment else None
    name = view.deployment.name if view.deployment else ""
    goal_ms = view.slo.ttft_ms
    return course_rows(
        view, Course("TTFT", f"deployment:{name}:ttft", found, goal_ms), width, height
    )
