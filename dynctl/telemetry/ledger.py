"""Everything remembered while watching: samples, trends, events; turns each snapshot into an Overview. Pure."""

from dynctl.core.snapshot import Snapshot
from dynctl.telemetry.alarms import EngineWatch
from dynctl.telemetry.events import EventLog
from dynctl.telemetry.figures import Goals, Overview, summarize
from dynctl.telemetry.goals import GoalWatch
from dynctl.telemetry.history import History
from dynctl.telemetry.traces import TraceBook
from dynctl.telemetry.trends import Trends, trend_values


class Ledger:
    """Feed it every snapshot, also while nobody looks."""

    __slots__ = (
        "_engine_watch",
        "_goal_watch",
        "_goals",
        "_history",
        "events",
        "requests",
        "trends",
    )

    def __init__(self, goals: Goals | None = None) -> None:
        self._goals = goals or {}
        self._history = History()
        self._goal_watch = GoalWatch()
        self._engine_watch = EngineWatch()
        self.trends = Trends()
        self.events = EventLog()
        self.requests = TraceBook()

    def take(self, snapshot: Snapshot, now_s: float) -> Overview:
        """Take in a snapshot made at `now_s` (monotonic) and say what it shows."""
        self._history.add(snapshot, now_s)
        self.events.add(snapshot)
        overview = summarize(snapshot, self._history, self._goals)
        for event in (
            *self._goal_watch.add(overview, now_s),
            *self._engine_watch.add(overview, now_s),
        ):
            self.events.note(event)
        self.trends.push(trend_values(overview), now_s)
        return overview

    def copy(self) -> "Ledger":
        """Return one that goes on by itself, to come back to this moment."""
        found = Ledger(self._goals)
        found._history, found._goal_watch = self._history.copy(), self._goal_watch.copy()
        found._engine_watch = self._engine_watch.copy()
        found.trends, found.events = self.trends.copy(), self.events.copy()
        found.requests = self.requests.copy()
        return found
