"""The overview: what clients meet, the pools, every engine, the newest events; with room also courses and heat map. Pure."""

from dynctl.tui.draw import Line, beside, rule
from dynctl.tui.panels import engines, events, gpus, hits, itl, pools, traffic, ttft
from dynctl.tui.screen import Screen
from dynctl.tui.view import SORTS, View

WIDE, TALL = 120, 37
"""From here on there is room for courses and heat maps."""
COURSE_HEIGHT = 8
SIDE_HEIGHT = 5


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the panels below each other; the engines take what the others leave."""
    top = traffic.rows(view, width, 3)
    is_large = width >= WIDE and height >= TALL
    if is_large:
        half = (width - 2) // 2
        top.append(rule(width))
        top += beside(
            ttft.rows(view, half, COURSE_HEIGHT),
            itl.rows(view, half, COURSE_HEIGHT),
            width,
        )
        top.append(rule(width))
        top += beside(
            hits.rows(view, half, SIDE_HEIGHT),
            gpus.rows(view, half, SIDE_HEIGHT),
            width,
        )
    top.append(rule(width))
    num_pools = len(view.overview.pools) if view.overview else 1
    top += pools.rows(view, width, 1 + max(1, min(num_pools, height // 6)))
    top.append(rule(width))
    num_events = 4 if is_large else 2
    bottom = [rule(width), *events.rows(view, width, num_events)]
    bottom += [()] * (num_events + 1 - len(bottom))
    room = max(0, height - len(top) - len(bottom))
    middle = engines.rows(view, width, room)
    return [*top, *middle, *[()] * (room - len(middle)), *bottom][:height]


def _under_cursor(view: View) -> str:
    listed = view.engines()
    return listed[min(view.choices.place.cursor, len(listed) - 1)].id if listed else ""


SCREEN = Screen(
    "overview",
    rows,
    num_rows=lambda view: len(view.engines()),
    num_orders=lambda _: len(SORTS),
    engine=_under_cursor,
)
