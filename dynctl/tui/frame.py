"""What stands around every screen: the title, the keys, the help; and what is left on a small terminal. Pure."""

from dynctl.tui.catalog import SCREENS, screen_of
from dynctl.tui.draw import Line, Span, fit, line, milliseconds, rule, whole
from dynctl.tui.panels import help as help_panel
from dynctl.tui.panels import title
from dynctl.tui.view import View

WIDTH, HEIGHT = 80, 24
"""The smallest terminal that screens are drawn on."""
LEAST_WIDTH, LEAST_HEIGHT = 40, 10
FRAME_HEIGHT = 3


def compose(view: View, width: int, height: int) -> list[Line]:
    """Draw everything: exactly `height` lines of exactly `width` cells."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        drawn = [line("terminal too small")]
    elif width < WIDTH or height < HEIGHT:
        drawn = _small(view)
        drawn[1:1] = [line(f"enlarge to {WIDTH}x{HEIGHT} (now {width}x{height})")]
    else:
        drawn = _framed(view, width, height)
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


def _framed(view: View, width: int, height: int) -> list[Line]:
    room = height - FRAME_HEIGHT
    shown = help_panel.rows if view.choices.is_helping else screen_of(view.choices).rows
    body = shown(view, width, room)
    return [
        *title.rows(view, width, 1),
        *body,
        *[()] * (room - len(body)),
        rule(width),
        _keys(view),
    ]


def _keys(view: View) -> Line:
    """The screens with their digits, the shown one marked, and the keys that lead on."""
    if view.note:
        return line(Span(f" {view.note}", "title"))
    choices = view.choices
    shown = "" if choices.opened or choices.is_helping else screen_of(choices).name
    spans: list[Span | str] = []
    for digit, screen in enumerate(SCREENS, 1):
        style = "title" if screen.name == shown else "dim"
        spans += [" ", Span(f"{digit} {screen.name}", style)]
    is_deep = choices.opened or choices.screen != SCREENS[0].name
    way = "esc back" if is_deep else "/ filter"
    return line(*spans, Span(f"  {way}  q quit", "dim"))
