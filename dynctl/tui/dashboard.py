"""What `dynctl top` is in a terminal, live or from a recording: canvas, keys, drawing, files and clipboard. IO: terminal, files."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dynctl.errors import DynctlError
from dynctl.files import reason
from dynctl.telemetry.trends import Trends
from dynctl.tui import export
from dynctl.tui.draw import Line
from dynctl.tui.frame import FRAME_HEIGHT, compose
from dynctl.tui.keys import press
from dynctl.tui.saving import save
from dynctl.tui.styles import STYLES
from dynctl.tui.view import View

NUM_EVENTS = 200


class Canvas(Widget):
    """Shows lines; redraws only those that changed, which is what keeps a tick cheap over SSH."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Replace what is shown."""
        before, self.lines = self.lines, lines
        changed = [
            Region(0, y, self.size.width, 1)
            for y in range(max(len(lines), len(before)))
            if y >= len(lines) or y >= len(before) or lines[y] != before[y]
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Draw one line; Textual asks for those that need it."""
        spans = self.lines[y] if y < len(self.lines) else ()
        segments = [Segment(span.text, STYLES[span.style]) for span in spans]
        return Strip(segments).adjust_cell_length(self.size.width)


class Dashboard(App[None]):
    """Shows a View and takes keys; who fills it says so by `_latest`."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+c", "quit", "Quit", priority=True)]  # noqa: RUF012 - Textual's declaration
    CSS = "Screen { background: ansi_default; color: ansi_default; }"

    def __init__(self, trends: Trends) -> None:
        super().__init__(ansi_color=True)
        self._latest = View(None, trends)
        self._shown = self._latest
        self.canvas = Canvas()
        self.failure: DynctlError | None = None

    def compose(self) -> ComposeResult:
        """Put the canvas on the screen."""
        yield self.canvas

    def on_mount(self) -> None:
        """Draw what there is."""
        # Textual restores the terminal when it exits, and not when a signal ends the process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._draw()

    def on_unmount(self) -> None:
        """Leave signals as they were."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    def on_key(self, event: events.Key) -> None:
        """Take a key."""
        is_typing = self._latest.choices.is_typing
        self._latest = replace(self._latest, note="")
        if event.key == "q" and not is_typing:
            self.exit()
        elif not is_typing and (act := _ACTIONS.get(event.character or "")):
            self._latest = replace(self._latest, note=act(self))
            self._draw()
        elif is_typing or not self._took(event):
            shown = replace(self._shown, choices=self._latest.choices)
            self._latest = replace(self._latest, choices=press(shown, event.key, event.character))
            self._chosen()
            self._draw()

    def _took(self, event: events.Key) -> bool:  # noqa: ARG002 - for those that have keys of their own
        """Take a key that is no choice of what to show."""
        return False

    def _chosen(self) -> None:
        """Another choice was made."""

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw(event.size.width, event.size.height)

    def _draw(self, width: int | None = None, height: int | None = None) -> None:
        self._shown = self._picture()
        size = self.size
        wide, high = width or size.width, height or size.height
        self._shown = replace(
            self._shown, width=wide, room=max(1, high - FRAME_HEIGHT), note=self._latest.note
        )
        self.canvas.show(compose(self._shown, wide, high))

    def _picture(self) -> View:
        """What to draw now."""
        return self._latest

    def save_text(self) -> str:
        """Write the shown screen into a file; says what came of it."""
        return self._save(".txt", export.text(self._lines()))

    def save_svg(self) -> str:
        """Write the shown screen into a file as a picture; says what came of it."""
        stem = self._stem()
        return self._save(".svg", export.svg(self._lines(), self.size.width, stem))

    def copy_row(self) -> str:
        """Copy the row under the cursor; says what came of it."""
        found = export.row(self._lines())
        if not found:
            return "no row here; Y copies the screen"
        self.copy_to_clipboard(found)
        return "row sent to the terminal's clipboard"

    def copy_screen(self) -> str:
        """Copy the shown screen; says what came of it."""
        self.copy_to_clipboard(export.text(self._lines()))
        return "screen sent to the terminal's clipboard"

    def _lines(self) -> list[Line]:
        """The shown screen, without what is said of the last key."""
        return compose(replace(self._shown, note=""), self.size.width, self.size.height)

    def _stem(self) -> str:
        choices, overview = self._shown.choices, self._shown.overview
        screen = "help" if choices.is_helping else "engine" if choices.opened else choices.screen
        taken = datetime.fromtimestamp(overview.taken_unix_s) if overview else datetime.now()  # noqa: DTZ005, DTZ006 - as shown
        return f"dynctl-top-{screen}-{taken:%Y%m%d-%H%M%S}"

    def _save(self, suffix: str, content: str) -> str:
        try:
            path = save(Path.cwd(), self._stem(), suffix, content)
        except OSError as error:
            return f"not written: {reason(error)}"
        return f"written: {path.name}"


_ACTIONS: dict[str, Callable[[Dashboard], str]] = {
    "e": Dashboard.save_text,
    "S": Dashboard.save_svg,
    "y": Dashboard.copy_row,
    "Y": Dashboard.copy_screen,
}
