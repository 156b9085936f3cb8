"""Lines of styled text, and the small drawings in them: sparklines, plots, aligned cells. Pure.

Not here: what is drawn (`panels`), colours (`app` maps style names), terminals.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size

from dynctl.core.text import clean
from dynctl.core.units import format_count

MISSING = "–"
EIGHTHS = " ▁▂▃▄▅▆▇█"


class Span(NamedTuple):
    """A piece of a line in one style: `` (plain), `dim`, `title`, `good`, `warn`, `bad` or `cursor`."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def line(*parts: Span | str) -> Line:
    """Make a line of spans and plain texts."""
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def plain(drawn: Line) -> str:
    """Return the text of a line without its styles."""
    return "".join(span.text for span in drawn)


def width_of(drawn: Line) -> int:
    """Say how many terminal cells a line takes."""
    return sum(cell_len(span.text) for span in drawn)


def fit(drawn: Line, width: int) -> Line:
    """Cut or pad a line to exactly `width` cells."""
    fitted: list[Span] = []
    left = width
    for text, style in drawn:
        if left <= 0:
            break
        size = cell_len(text)
        fitted.append(Span(text if size <= left else set_cell_size(text, left), style))
        left -= min(size, left)
    if left > 0:
        fitted.append(Span(" " * left))
    return tuple(fitted)


def restyled(drawn: Line, style: str) -> Line:
    """Give a whole line one style."""
    return tuple(Span(span.text, style) for span in drawn)


def cell(text: str, width: int, *, is_right: bool = False) -> str:
    """Clean a text from a host and fit it into a cell, with an ellipsis when it is too long."""
    cleaned = clean(text, 400)
    if cell_len(cleaned) > width:
        cleaned = set_cell_size(cleaned, width - 1) + "…" if width > 1 else "…"[:width]
    pad = " " * (width - cell_len(cleaned))
    return pad + cleaned if is_right else cleaned + pad


def wrapped(text: str, width: int) -> list[str]:
    """Cut a text into as many lines of a width as it takes; an empty one is one line."""
    return chop_cells(text, max(1, width)) or [""]


def rule(width: int) -> Line:
    """Draw a line across."""
    return line(Span("─" * width, "dim"))


def spark(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Draw the last `width` values as eighths of a block; a gap where there is none.

    `top` fixes the scale, so that the height means the same over time; values above it fill the block.
    """
    recent = list(values)[-width:]
    ceiling = top or max((v for v in recent if v is not None), default=0.0)
    drawn = "".join(_eighth(value, ceiling) for value in recent)
    return drawn.rjust(width)


def _eighth(value: float | None, ceiling: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    if ceiling <= 0:
        return EIGHTHS[1]
    return EIGHTHS[max(1, math.ceil(max(0.0, min(1.0, value / ceiling)) * 8))]


def beside(left: Sequence[Line], right: Sequence[Line], width: int, gap: int = 2) -> list[Line]:
    """Put two blocks side by side, sharing the width evenly."""
    left_width = (width - gap) // 2
    height = max(len(left), len(right))
    empty: Line = ()
    return [
        (
            *fit(left[i] if i < len(left) else empty, left_width),
            Span(" " * gap),
            *(right[i] if i < len(right) else empty),
        )
        for i in range(height)
    ]


def seconds(milliseconds_: float | None) -> float | None:
    """Turn a goal into the unit of figures."""
    return None if milliseconds_ is None else milliseconds_ / 1e3


def milliseconds(seconds_: float | None) -> str:
    """Write a latency in milliseconds without its unit, three digits at most before k."""
    if seconds_ is None:
        return MISSING
    value = seconds_ * 1e3
    if value < 0.995:
        return f"{value:.2f}"
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 99_999.5 else format_count(value)


def percent(ratio: float | None, sign: str = "%") -> str:
    """Write a ratio as whole percent."""
    return MISSING if ratio is None else f"{ratio * 100:.0f}{sign}"


def count(number: float | None) -> str:
    """Write a count or rate shortly."""
    return MISSING if number is None else format_count(number)


def whole(number: float | None) -> str:
    """Write a number of things."""
    return MISSING if number is None else f"{number:.0f}"


def judged(text: str, value: float | None, limit: float | None) -> Span:
    """Colour a value by its goal: `warn` from 80%, `bad` above; marked with `!` as well, since colour is never alone."""
    if value is None or limit is None:
        return Span(text)
    if value > limit:
        return Span(f"!{text}", "bad")
    return Span(f"!{text}", "warn") if value >= 0.8 * limit else Span(text, "good")


def joined(parts: Iterable[Line], gap: str = "  ") -> Line:
    """Join lines into one, with a gap between."""
    out: list[Span] = []
    for part in parts:
        if out:
            out.append(Span(gap))
        out.extend(part)
    return tuple(out)
