"""The keys: one table that `press` follows and the help is drawn from. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from dynctl.telemetry.trends import WINDOWS
from dynctl.tui.catalog import SCREENS, screen_of
from dynctl.tui.screens.logs import log_of
from dynctl.tui.view import Choices, View

MAX_FILTER_CHARS = 60
PAGE = 10

_MOVES = {
    "j": 1, "down": 1, "k": -1, "up": -1, "ctrl+d": PAGE, "pagedown": PAGE, "ctrl+u": -PAGE, "pageup": -PAGE,
}  # fmt: skip
_ENDS = ("g", "home", "G", "end")


class Binding(NamedTuple):
    """What some keys do."""

    keys: tuple[str, ...]
    shown: str
    """As the help names them."""
    text: str
    do: Callable[[View, str], Choices]
    """The view and the key to the choices after it."""


def press(view: View, key: str, character: str | None) -> Choices:
    """Take one key; unknown keys change nothing."""
    if view.choices.is_typing:
        return _type(view.choices, key, character)
    # Textual names keys; where case or layout matter, what they type says more.
    for name in (character, key):
        if name is not None and name in _BY_KEY:
            return _BY_KEY[name].do(view, name)
    return view.choices


def _move(view: View, key: str) -> Choices:
    screen = screen_of(view.choices)
    last = max(0, screen.num_rows(view) - 1)
    if key in _ENDS:
        is_start = key in ("g", "home")
        return view.choices.placed(cursor=0 if is_start != screen.is_from_end else last)
    step = -_MOVES[key] if screen.is_from_end else _MOVES[key]
    now = min(view.choices.place.cursor, last)
    return view.choices.placed(cursor=max(0, min(last, now + step)))


def _go(view: View, key: str) -> Choices:
    index = int(key) - 1
    return view.choices.at(SCREENS[index].name) if index < len(SCREENS) else view.choices


def _enter(view: View, _: str) -> Choices:
    screen = screen_of(view.choices)
    if screen.enter is not None:
        return screen.enter(view)
    engine = screen.engine(view)
    return replace(view.choices, opened=engine, metric=0) if engine else view.choices


def _leave(view: View, _: str) -> Choices:
    """One level up: out of the help, the engine, the filter, the screen."""
    choices = view.choices
    if choices.is_helping:
        return replace(choices, is_helping=False)
    if choices.opened:
        return replace(choices, opened="")
    if choices.place.filter:
        return choices.placed(filter="")
    return choices.at(SCREENS[0].name)


def _order(view: View, key: str) -> Choices:
    step = 1 if key == ">" else -1
    num_orders = max(1, screen_of(view.choices).num_orders(view))
    return view.choices.placed(sort=(view.choices.place.sort + step) % num_orders)


def _reverse(view: View, _: str) -> Choices:
    return view.choices.placed(is_reversed=not view.choices.place.is_reversed)


def _span(view: View, key: str) -> Choices:
    window = view.choices.window + (1 if key == "]" else -1)
    return replace(view.choices, window=max(0, min(len(WINDOWS) - 1, window)))


def _metric(view: View, _: str) -> Choices:
    num = screen_of(view.choices).num_metrics
    return replace(view.choices, metric=(view.choices.metric + 1) % num)


def _log(view: View, _: str) -> Choices:
    engine = view.choices.opened or screen_of(view.choices).engine(view)
    return log_of(view, engine) if engine else view.choices


def _pause(view: View, _: str) -> Choices:
    return replace(view.choices, is_paused=not view.choices.is_paused)


def _help(view: View, _: str) -> Choices:
    return replace(view.choices, is_helping=not view.choices.is_helping)


def _filter(view: View, _: str) -> Choices:
    return replace(view.choices, is_typing=True, is_helping=False)


def _deployment(view: View, _: str) -> Choices:
    return replace(view.choices, deployment=view.choices.deployment + 1)


BINDINGS = (
    Binding(tuple(str(i + 1) for i in range(len(SCREENS))), f"1 to {len(SCREENS)}", "screens", _go),
    Binding(("enter",), "enter", "open the row", _enter),
    Binding(("escape",), "esc", "back; clear the filter", _leave),
    Binding((*_MOVES, *_ENDS), "j k g G", "move; first, last row", _move),
    Binding(("/",), "/", "filter; enter keeps it", _filter),
    Binding(("<", ">"), "< >", "column to sort by; unit", _order),
    Binding(("r",), "r", "reverse the order", _reverse),
    Binding(("[", "]"), "[ ]", "span of plots", _span),
    Binding(("m",), "m", "figure of plot, heat map", _metric),
    Binding(("l",), "l", "log of the row", _log),
    Binding(("space", " "), "space", "hold the picture", _pause),
    Binding(("d",), "d", "next deployment", _deployment),
    Binding(("?",), "?", "this help", _help),
)
"""All that choose what is shown."""

ACTIONS = (("e S", "save the screen: text, SVG"), ("y Y", "copy the row, the screen"))
"""Of the app, live or replaying."""
PLAYS = (
    ("space", "play, hold"),
    (", .", "a look back, on; hold"),
    ("← → { }", "10 s, 5 min back, on"),
    ("n N", "next, previous event"),
    ("- +", "slower, faster"),
)
"""Of a replay, where `space` is no choice."""

_BY_KEY = {key: binding for binding in BINDINGS for key in binding.keys}


def _type(choices: Choices, key: str, character: str | None) -> Choices:
    wanted = choices.place.filter
    if key == "enter":
        return replace(choices, is_typing=False)
    if key == "escape":
        return replace(choices, is_typing=False).placed(filter="")
    if key == "backspace":
        return choices.placed(filter=wanted[:-1])
    if character is not None and character.isprintable() and len(wanted) < MAX_FILTER_CHARS:
        return choices.placed(filter=wanted + character, cursor=0)
    return choices
