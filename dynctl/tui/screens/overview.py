"""The overview: which panels stand where, at any size of the terminal. Pure."""

from dynctl.tui.draw import Line, Span, beside, fit, line, milliseconds, rule, whole
from dynctl.tui.panels import engines, events, gpus, hits, itl, pools, title, traffic, ttft
from dynctl.tui.panels import help as help_panel
from dynctl.tui.view import View

WIDTH, HEIGHT = 80, 24
"""The smallest terminal the overview is drawn on."""
WIDE, TALL = 120, 40
"""From here on there is room for courses and heat maps."""
LEAST_WIDTH, LEAST_HEIGHT = 40, 10
COURSE_HEIGHT = 7
SIDE_HEIGHT = 5
KEYS = " / filter  < > sort  r reverse  space pause  d deployment  ? help  q quit"


def compose(view: View, width: int, height: int) -> list[Line]:
    """Draw the whole screen: exactly `height` lines of exactly `width` cells."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        drawn = [line("terminal too small")]
    elif width < WIDTH or height < HEIGHT:
        drawn = _small(view)
        drawn[1:1] = [line(f"enlarge to {WIDTH}x{HEIGHT} (now {width}x{height})")]
    else:
        drawn = _full(view, width, height)
    drawn += [()] * (height - len(drawn))
    return [fit(found, width) for found in drawn[:height]]


def _small(view: View) -> list[Line]:
    """One line that still says how things are."""
    deployment, overview = view.deployment, view.overview
    ready = sum(pool.num_ready for pool in overview.pools) if overview else 0
    known = sum(pool.num_engines for pool in overview.pools) if overview else 0
    ttft_s = deployment.ttft.p99_s if deployment and deployment.ttft else None
    itl_s = deployment.itl.p99_s if deployment and deployment.itl else None
    figures = f"up {ready}/{known} TTFT99 {milliseconds(ttft_s)} ITL99 {milliseconds(itl_s)}"
    return [line(f"{figures} queue {whole(deployment.queued if deployment else None)}")]


def _help(view: View, width: int, height: int) -> list[Line]:
    """Keys and marks, in all the room there is."""
    room = height - 4
    told = help_panel.rows(view, width, room)
    bottom = [rule(width), line(Span(KEYS, "dim"))]
    return [*title.rows(view, width, 1), rule(width), *told, *[()] * (room - len(told)), *bottom]


def _full(view: View, width: int, height: int) -> list[Line]:
    if view.choices.is_helping:
        return _help(view, width, height)
    top = [*title.rows(view, width, 1), *traffic.rows(view, width, 3)]
    if width >= WIDE and height >= TALL:
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
    num_events = 2 if height < TALL else 4
    bottom = [rule(width), *events.rows(view, width, num_events)]
    bottom += [()] * (num_events + 1 - len(bottom))
    bottom += [rule(width), line(Span(KEYS, "dim"))]
    room = height - len(top) - len(bottom)
    middle = engines.rows(view, width, room)
    return [*top, *middle, *[()] * (room - len(middle)), *bottom]
