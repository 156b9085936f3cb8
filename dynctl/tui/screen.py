"""What a screen is: what it draws, which rows the cursor goes over, what it needs to have asked. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from dynctl.telemetry.answers import Asks
from dynctl.tui.draw import Line
from dynctl.tui.view import Choices, View


def _no_rows(_: View) -> int:
    return 0


def _no_orders(_: View) -> int:
    return 1


def _nothing(_: View) -> Asks:
    return Asks()


def _no_engine(_: View) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Screen:
    """One screen; the frame puts a title above it and the keys below."""

    name: str
    rows: Callable[[View, int, int], list[Line]]
    """Drawn like a panel: at most as many lines as there is room for."""
    num_rows: Callable[[View], int] = _no_rows
    """What the cursor goes over."""
    num_orders: Callable[[View], int] = _no_orders
    """What `<` and `>` go through."""
    is_from_end: bool = False
    """The cursor counts from the end: the newest line of a log."""
    num_metrics: int = 1
    """What `m` goes through."""
    asks: Callable[[View], Asks] = _nothing
    enter: Callable[[View], Choices] | None = None
    """Opens the row under the cursor; None: the engine there."""
    engine: Callable[[View], str] = _no_engine
    """The engine under the cursor, which `enter` opens and whose log `l` shows; empty: none."""
