"""The shown screen as text or as an SVG picture, and the row under its cursor. Pure."""

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dynctl.tui.draw import Line, plain
from dynctl.tui.styles import STYLES

CURSOR = "▸"
_FONT = re.compile(r"\s*@font-face \{[^}]*\}")


def text(lines: Sequence[Line]) -> str:
    """Write lines without styles and trailing blanks."""
    return "\n".join(plain(found).rstrip() for found in lines) + "\n"


def row(lines: Sequence[Line]) -> str:
    """Write the row under the cursor; empty when the screen has none."""
    chosen = next((found for found in lines if plain(found).startswith(CURSOR)), ())
    return plain(chosen).removeprefix(CURSOR).strip()


def svg(lines: Sequence[Line], width: int, title: str) -> str:
    """Draw lines as a picture of a terminal that loads nothing from elsewhere."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor"
    )
    for found in lines:
        drawn = Text.assemble(*((span.text, STYLES[span.style]) for span in found))
        console.print(drawn, no_wrap=True, overflow="crop", crop=True)
    return _FONT.sub("", console.export_svg(title=title))
