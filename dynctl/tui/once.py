"""`dynctl top --once`: one look as a table of lines, or as a document. Pure."""

from typing import Any

from dynctl.core.workload import Slo
from dynctl.telemetry.events import Event
from dynctl.telemetry.figures import Overview
from dynctl.telemetry.history import LATENCY_WINDOW_S, RATE_WINDOW_S
from dynctl.tui.draw import plain
from dynctl.tui.panels import engines, events, pools, title, traffic
from dynctl.tui.view import View

SCHEMA = "dynctl.top/1"


def document(overview: Overview, newest: tuple[Event, ...]) -> dict[str, Any]:
    """Make the JSON document: the figures as they are named in `telemetry.figures`, SI units, null when not known."""
    return {
        "schema": SCHEMA,
        "cluster": overview.cluster,
        "taken_unix_s": overview.taken_unix_s,
        "rate_window_s": RATE_WINDOW_S,
        "latency_window_s": LATENCY_WINDOW_S,
        "slo": common_goals(overview),
        "deployments": overview.deployments,
        "pools": overview.pools,
        "engines": overview.engines,
        "hosts": overview.hosts,
        "events": newest,
    }


def common_goals(overview: Overview) -> Slo:
    """The goals of all deployments where they are the same; each has its own beside it."""
    goals = {deployment.slo for deployment in overview.deployments}
    return goals.pop() if len(goals) == 1 else Slo()


def text(view: View, width: int) -> str:
    """Draw the panels below each other, as many lines as there are engines, without trailing spaces."""
    num_engines = len(view.engines())
    num_pools = len(view.overview.pools) if view.overview else 0
    blocks = (
        (title, 1),
        (traffic, 3),
        (pools, num_pools + 2),
        (engines, num_engines + 2),
        (events, 5),
    )
    drawn = []
    for panel, height in blocks:
        lines = panel.rows(view, width, height)
        # The line about scrolling and sorting says nothing on paper, nor does the cursor.
        lines = lines[:-1] if panel is engines else lines
        drawn.append("\n".join(plain(found).rstrip().replace("▸", " ", 1) for found in lines))
    return "\n\n".join(drawn[1:]).join((drawn[0].replace("? help", "").rstrip() + "\n", "\n"))
