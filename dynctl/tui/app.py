"""`dynctl top` of what happens now: owns the workers that watch and ask. IO: terminal, clock."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from dynctl.core.text import clean
from dynctl.errors import DynctlError
from dynctl.telemetry.answers import Asks
from dynctl.telemetry.events import BAD, Event
from dynctl.telemetry.figures import Goals
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.recorder import Recorder
from dynctl.telemetry.watch import Watched
from dynctl.tui.catalog import screen_of
from dynctl.tui.dashboard import NUM_EVENTS, Dashboard
from dynctl.tui.messages import Answered, SnapshotTaken
from dynctl.tui.view import View

ASK_PERIOD_S = 2.0
"""How often the shown screen asks what snapshots do not hold."""
BLURRED_EVERY = 5
"""Of so many snapshots one is drawn while the terminal is not looked at."""

Snapshots = Callable[[], AbstractAsyncContextManager[Watched]]


class TopApp(Dashboard):
    """The dashboard of a running cluster."""

    def __init__(
        self,
        snapshots: Snapshots,
        goals: Goals | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self._ledger = Ledger(goals)
        super().__init__(self._ledger.trends)
        self._snapshots = snapshots
        self._clock = clock
        self._recorder = recorder
        self._watched: Watched | None = None
        self._has_asks = asyncio.Event()
        self._answered = Asks()
        """What the newest answers were asked for, …"""
        self._held = Asks()
        """… and those of a held picture."""
        self._asked = Asks()
        """What the screen needed when it was last looked at."""
        self._is_blurred = False
        self._num_taken = 0

    def on_mount(self) -> None:
        """Start watching."""
        super().on_mount()
        self.run_worker(self._watch(), name="watch")
        self.run_worker(self._inquire(), name="inquire")

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
            self._asked = asks = self._asks()
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
        self._note_recording(overview.taken_unix_s)
        events_ = self._ledger.events.newest(NUM_EVENTS)
        self._latest = replace(self._latest, overview=overview, events=events_)
        self._num_taken += 1
        if is_first:
            self._has_asks.set()
        if not self._is_blurred or self._num_taken % BLURRED_EVERY == 0:
            self._draw()

    def _note_recording(self, unix_s: float) -> None:
        """Say whether it is recorded; that it ended is an event."""
        if self._recorder is None:
            return
        failure = self._recorder.failure
        told = "✕ rec" if failure else "◉ rec"
        if failure and told != self._latest.recording:
            text = f"ended: {clean(failure)}"
            self._ledger.events.note(Event(unix_s, BAD, "recording", text))
        self._latest = replace(self._latest, recording=told)

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

    def _chosen(self) -> None:
        asks = self._asks()
        if asks != self._asked:
            self._asked = asks
            self._has_asks.set()

    def _picture(self) -> View:
        choices, asks = self._latest.choices, self._asks()
        if not choices.is_paused:
            return self._latest
        if not self._shown.choices.is_paused:
            self._held = asks
            return replace(self._latest, trends=self._ledger.trends.copy())
        # The figures stand still; cursor, filter and sort go on working on them.
        held = replace(self._shown, choices=choices)
        if asks not in (Asks(), self._held) and asks == self._answered:
            # What another screen needs was not asked before it was shown.
            latest = self._latest
            held = replace(held, answers=latest.answers, traces=latest.traces)
            self._held = asks
        return held
