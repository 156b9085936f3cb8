"""The course of ITL of the shown deployment against its goal. Pure."""

from dynctl.tui.course import Course, course_rows
from dynctl.tui.draw import Line
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the percentiles and the course."""
    found = view.deployment.itl if view.deployment else None
    name = view.deployment.name if view.deployment else ""
    goal_ms = view.slo.itl_ms
    return course_rows(view, Course("ITL", f"deployment:{name}:itl", found, goal_ms), width, height)
