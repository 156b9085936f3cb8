"""Everything remembered while watching: samples, trends, events; turns each snapshot into an Overview. Pure."""

from dynctl.core.snapshot import Snapshot
from dynctl.core.workload import Slo
from dynctl.telemetry.events import EventLog
from dynctl.telemetry.figures import Overview, summarize
from dynctl.telemetry.history import History
from dynctl.telemetry.traces import TraceBook
from dynctl.telemetry.trends import Trends, trend_values


class Ledger:
    """Feed it every snapshot, also while nobody looks."""

    __slots__ = ("_history", "_slo", "events", "requests", "trends")

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo or Slo()
        self._history = History()
        self.trends = Trends()
        self.events = EventLog()
        self.requests = TraceBook()

    def take(self, snapshot: Snapshot, now_s: float) -> Overview:
        """Take in a snapshot made at `now_s` (monotonic) and say what it shows."""
        self._history.add(snapshot, now_s)
        self.events.add(snapshot)
        overview = summarize(snapshot, self._history, self._slo)
        self.trends.push(trend_values(overview), now_s)
        return overview
