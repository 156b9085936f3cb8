"""All events since the watch began, newest first. Pure."""

from dynctl.telemetry.events import Event
from dynctl.tui.draw import Line, Span, line, rule
from dynctl.tui.listing import filter_note, listing
from dynctl.tui.panels.events import drawn_event
from dynctl.tui.screen import Screen
from dynctl.tui.view import View, passes


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the list."""
    listed = _listed(view)
    head = [rule(width)] if listed else [rule(width), line(Span(" no events", "dim"))]
    size = (width, height - len(head))
    return [*head, *listing(view, listed, drawn_event, size, "events", filter_note(view))][:height]


def _listed(view: View) -> list[Event]:
    wanted = view.choices.place.filter
    return [
        event
        for event in view.events
        if passes({"subject": event.subject, "text": event.text}, wanted)
    ]


SCREEN = Screen("events", rows, num_rows=lambda view: len(_listed(view)))
