"""Logs: the last lines of one unit, errors and warnings marked; `<` and `>` take another. Pure."""

import re
from dataclasses import replace

from dynctl.core.text import clean
from dynctl.telemetry.answers import Asks, UnitName
from dynctl.tui.draw import Line, Span, line, rule, wrapped
from dynctl.tui.listing import filter_note, footer
from dynctl.tui.screen import Screen
from dynctl.tui.view import Choices, Place, View, passes

MAX_LINE_CHARS = 1000
FRAME_HEIGHT = 3
"""Lines that are not the log's."""
_BAD = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|Error:|error:|\w+Error\b)")
_WARN = re.compile(r"\b(WARN|WARNING|warning:)")


def style_of(text: str) -> str:
    """Colour a line of a log by what it calls itself."""
    if _BAD.search(text):
        return "bad"
    return "warn" if _WARN.search(text) else ""


def log_lines(view: View, name: UnitName) -> tuple[str, ...] | None:
    """The last lines of a log, cleaned; None while nothing came."""
    found = view.answers.logs.get(name) if view.answers else None
    return None if found is None else tuple(clean(text, MAX_LINE_CHARS) for text in found)


def drawn_log_line(text: str, width: int) -> list[Line]:
    """Draw a line in as many as it takes; trouble has a mark as well, since colour is never alone."""
    style = style_of(text)
    first, *more = wrapped(text, width - 1)
    return [
        line(Span("!" if style else " ", style), Span(first, style)),
        *(line(" ", Span(part, style)) for part in more),
    ]


def missing(view: View, name: UnitName) -> Line:
    """Say why there are no lines."""
    why = view.answers.failures.get(name) if view.answers else None
    if why is None:
        return line(Span(" reading…", "dim"))
    return line(Span(f" {clean(why)}", "bad"))


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw whose log it is, and its lines, the newest at the bottom."""
    names = logs_of(view)
    if not names:
        return [rule(width), line(Span(" no unit is known yet", "dim"))][:height]
    name = _chosen(names, view)
    head = line(
        Span(f" {clean(name[1], 60)}", "title"),
        Span(
            f"  on {clean(name[0], 40)}   {names.index(name) + 1} of {len(names)}, < > another",
            "dim",
        ),
    )
    if log_lines(view, name) is None:
        return [rule(width), head, missing(view, name)][:height]
    texts = _listed(view)
    lines = _drawn(texts, width)
    room = max(0, height - FRAME_HEIGHT)
    last = len(lines) - min(view.choices.place.cursor, max(0, len(lines) - room))
    drawn = lines[max(0, last - room) : last]
    drawn += [()] * (room - len(drawn))
    below = len(lines) - last
    notes = ("newest" if below == 0 else f"{below} below", filter_note(view))
    return [
        rule(width),
        head,
        *drawn,
        footer(view, len(texts), len(texts), width, "lines", *notes),
    ][:height]


_ORDER = {"router": 0, "engine": 1, "relay": 2, "agent": 3}


def logs_of(view: View) -> list[UnitName]:
    """All there are: routers, engines, relays, then agents, which are no units."""
    hosts = view.overview.hosts if view.overview else ()
    known = [
        (_ORDER.get(kind, 9), unit, host.name)
        for host in hosts
        for unit, kind in (*host.units, ("agent", "agent"))
    ]
    return [(host, unit) for _, unit, host in sorted(known)]


def _chosen(names: list[UnitName], view: View) -> UnitName:
    return names[view.choices.place.sort % len(names)]


def _listed(view: View) -> list[str]:
    names = logs_of(view)
    known = log_lines(view, _chosen(names, view)) if names else None
    wanted = view.choices.place.filter
    return [text for text in known or () if passes({"text": text}, wanted)]


def _drawn(texts: list[str], width: int) -> list[Line]:
    return [one for text in texts for one in drawn_log_line(text, width)]


def log_of(view: View, unit: str) -> Choices:
    """Go to the log of an engine or router."""
    units = [unit for _, unit in logs_of(view)]
    if unit not in units:
        return view.choices
    return replace(view.choices.at("logs"), place=Place(sort=units.index(unit)))


def _asks(view: View) -> Asks:
    names = logs_of(view)
    return Asks(logs=(_chosen(names, view),) if names else ())


def _num_places(view: View) -> int:
    """How far one can go back: until the oldest line is the top one."""
    num_lines = len(_drawn(_listed(view), view.width))
    return max(1, num_lines - (view.room - FRAME_HEIGHT) + 1)


SCREEN = Screen(
    "logs",
    rows,
    num_rows=_num_places,
    num_orders=lambda view: len(logs_of(view)),
    is_from_end=True,
    asks=_asks,
)
