"""The newest events, trouble first seen first told. Pure."""

from datetime import datetime

from dynctl.telemetry.events import BAD, Event
from dynctl.tui.draw import Line, Span, line
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:  # noqa: ARG001 - a panel's signature
    """Draw up to `height` events, newest on top."""
    if not view.events:
        return [line(Span(" no events", "dim"))][:height]
    return [drawn_event(event) for event in view.events[:height]]


def drawn_event(event: Event) -> Line:
    """Draw one: mark, time, whom it is about, what happened."""
    clock = datetime.fromtimestamp(event.unix_s).strftime("%H:%M:%S")  # noqa: DTZ006 - local time
    style = "bad" if event.mark == BAD else "dim"
    return line(Span(f" {event.mark} ", style), f"{clock} {event.subject}  {event.text}")
