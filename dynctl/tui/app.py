"""The Textual app of `dynctl top`: owns the workers that watch and ask, keys and the canvas. IO: terminal, clock."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

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
from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.ledger import Ledger
from dynctl.tui.catalog import screen_of
from dynctl.tui.draw import Line
from dynctl.tui.frame import FRAME_HEIGHT, compose
from dynctl.tui.keys import press
from dynctl.tui.messages import Answered, SnapshotTaken
from dynctl.tui.view import View

NUM_EVENTS = 200
ASK_PERIOD_S = 2.0
"""How often the shown screen asks what snapshots do not hold."""
BLURRED_EVERY = 5
"""Of so many snapshots one is drawn while the terminal is not looked at."""


class Watched(Protocol):
    """Snapshots one after another, and answers to what a screen needs beyond them."""

    def __aiter__(self) -> AsyncIterator[Snapshot]:
        """Begin."""
        ...

    async def answer(self, asks: Asks) -> Answers:
        """Ask; what fails is told in the answers."""
        ...


Snapshots = Callable[[], AbstractAsyncContextManager[Watched]]

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
        self._watched: Watched | None = None
        self._has_asks = asyncio.Event()
        self._answered = Asks()
        """What the newest answers were asked for, …"""
        self._held = Asks()
        """… and those of a held picture."""
        self._is_blurred = False
        self._num_taken = 0
        self.canvas = Canvas()
        self.failure: DynctlError | None = None

    def compose(self) -> ComposeResult:
        """Put the canvas on the screen."""
        yield self.canvas

    def on_mount(self) -> None:
        """Start watching."""
        # Textual restores the terminal when it exits, and not when a signal ends the process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.run_worker(self._watch(), name="watch")
        self.run_worker(self._inquire(), name="inquire")
        self._draw()

    def on_unmount(self) -> None:
        """Leave signals as they were."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    async def _watch(self) -> None:
        try:
            async with self._snapshots() as watched:
                self._watched = watched
                async for snapshot in watched:
                    self.post_message(SnapshotTaken(snapshot, self._clock()))
        except DynctlError as error:
            # Told after the terminal is restored, by whoever ran the app.
            self.failure = error
            self.exit()

    async def _inquire(self) -> None:
        """Ask what the shown screen needs, again and again, and at once when another one is shown."""
        while True:
            asks = self._asks()
            if self._watched is not None and asks != Asks():
                self.post_message(Answered(asks, await self._watched.answer(asks)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_PERIOD_S):
                    await self._has_asks.wait()
            self._has_asks.clear()

    def _asks(self) -> Asks:
        return screen_of(self._latest.choices).asks(self._latest)

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        """Take a snapshot in, also while the picture is held."""
        overview = self._ledger.take(message.snapshot, message.now_s)
        is_first = self._latest.overview is None
        events_ = self._ledger.events.newest(NUM_EVENTS)
        self._latest = replace(self._latest, overview=overview, events=events_)
        self._num_taken += 1
        if is_first:
            self._has_asks.set()
        if not self._is_blurred or self._num_taken % BLURRED_EVERY == 0:
            self._draw()

    def on_answered(self, message: Answered) -> None:
        """Take in what routers and agents answered."""
        self._answered = message.asks
        self._latest = replace(self._latest, answers=message.answers)
        if message.answers.decisions:
            self._ledger.requests.add(message.answers.decisions)
            self._latest = replace(self._latest, traces=self._ledger.requests.newest())
        if not self._is_blurred:
            self._draw()

    def on_app_blur(self) -> None:
        """Draw less often while nobody looks; terminals that do not tell are always looked at."""
        self._is_blurred = True

    def on_app_focus(self) -> None:
        """Draw what is known by now."""
        self._is_blurred = False
        self._draw()

    def on_key(self, event: events.Key) -> None:
        """Take a key."""
        if event.key == "q" and not self._latest.choices.is_typing:
            self.exit()
            return
        asked = self._asks()
        shown = replace(self._shown, choices=self._latest.choices)
        self._latest = replace(self._latest, choices=press(shown, event.key, event.character))
        if self._asks() != asked:
            self._has_asks.set()
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw(event.size.width, event.size.height)

    def _draw(self, width: int | None = None, height: int | None = None) -> None:
        choices, asks = self._latest.choices, self._asks()
        if not choices.is_paused:
            self._shown = self._latest
        elif not self._shown.choices.is_paused:
            self._shown = replace(self._latest, trends=self._ledger.trends.copy())
            self._held = asks
        else:
            # The figures stand still; cursor, filter and sort go on working on them.
            self._shown = replace(self._shown, choices=choices)
            if asks not in (Asks(), self._held) and asks == self._answered:
                # What another screen needs was not asked before it was shown.
                latest = self._latest
                self._shown = replace(self._shown, answers=latest.answers, traces=latest.traces)
                self._held = asks
        size = self.size
        wide, high = width or size.width, height or size.height
        self._shown = replace(self._shown, width=wide, room=max(1, high - FRAME_HEIGHT))
        self.canvas.show(compose(self._shown, wide, high))
