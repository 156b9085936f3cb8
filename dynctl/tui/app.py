"""The Textual app of `dynctl top`: owns the one watch worker, keys and the canvas. IO: terminal, clock."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dynctl.core.snapshot import Snapshot
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError
from dynctl.telemetry.ledger import Ledger
from dynctl.tui.draw import Line
from dynctl.tui.keys import press
from dynctl.tui.messages import SnapshotTaken
from dynctl.tui.screens.overview import compose
from dynctl.tui.view import View

Snapshots = Callable[[], AbstractAsyncContextManager[AsyncIterator[Snapshot]]]
NUM_EVENTS = 20

STYLES = {
    "": Style(),
    "dim": Style(dim=True),
    "title": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "cursor": Style(reverse=True),
}


class Canvas(Widget):
    """Shows lines; redraws only those that changed, which is what keeps a tick cheap over SSH."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Replace what is shown."""
        before, self._lines = self._lines, lines
        changed = [
            Region(0, y, self.size.width, 1)
            for y in range(max(len(lines), len(before)))
            if y >= len(lines) or y >= len(before) or lines[y] != before[y]
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Draw one line; Textual asks for those that need it."""
        spans = self._lines[y] if y < len(self._lines) else ()
        segments = [Segment(span.text, STYLES[span.style]) for span in spans]
        return Strip(segments).adjust_cell_length(self.size.width)


class TopApp(App[None]):
    """The dashboard."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+c", "quit", "Quit", priority=True)]  # noqa: RUF012 - Textual's declaration
    CSS = "Screen { background: ansi_default; color: ansi_default; }"

    def __init__(
        self,
        snapshots: Snapshots,
        slo: Slo | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ansi_color=True)
        self._snapshots = snapshots
        self._clock = clock
        self._ledger = Ledger(slo)
        self._latest = View(None, self._ledger.trends)
        self._shown = self._latest
        self.canvas = Canvas()
        self.failure: DynctlError | None = None

    def compose(self) -> ComposeResult:
        """Put the canvas on the screen."""
        yield self.canvas

    def on_mount(self) -> None:
        """Start watching."""
        # Textual restores the terminal when it exits, and not when a signal ends the process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.run_worker(self._watch(), name="watch", exclusive=True)
        self._draw()

    def on_unmount(self) -> None:
        """Leave signals as they were."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    async def _watch(self) -> None:
        try:
            async with self._snapshots() as snapshots:
                async for snapshot in snapshots:
                    self.post_message(SnapshotTaken(snapshot, self._clock()))
        except DynctlError as error:
            # Told after the terminal is restored, by whoever ran the app.
            self.failure = error
            self.exit()

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        """Take a snapshot in, also while the picture is held."""
        overview = self._ledger.take(message.snapshot, message.now_s)
        events_ = self._ledger.events.newest(NUM_EVENTS)
        self._latest = replace(self._latest, overview=overview, events=events_)
        self._draw()

    def on_key(self, event: events.Key) -> None:
        """Take a key."""
        choices = self._latest.choices
        if event.key == "q" and not choices.is_typing:
            self.exit()
            return
        changed = press(choices, event.key, event.character, len(self._shown.engines()))
        self._latest = replace(self._latest, choices=changed)
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw(event.size.width, event.size.height)

    def _draw(self, width: int | None = None, height: int | None = None) -> None:
        choices = self._latest.choices
        if not choices.is_paused:
            self._shown = self._latest
        elif not self._shown.choices.is_paused:
            self._shown = replace(self._latest, trends=self._ledger.trends.copy())
        else:
            # The figures stand still; cursor, filter and sort go on working on them.
            self._shown = replace(self._shown, choices=choices)
        size = self.size
        self.canvas.show(compose(self._shown, width or size.width, height or size.height))
