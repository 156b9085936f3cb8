"""What changed between snapshots and deserves a line: lost hosts, dead, restarted and failed units, findings. Pure."""

from collections import deque
from dataclasses import dataclass

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.snapshot import HostSnapshot, RouterSample, Snapshot
from dynctl.core.text import clean

BAD = "!"
NOTE = "·"

_TROUBLE = {EngineState.BACKOFF, EngineState.FAILED}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event list."""

    unix_s: float
    mark: str
    """`!` for trouble, `·` for news."""
    subject: str
    """Host or unit."""
    text: str


class EventLog:
    """The last events, newest first; fed with every snapshot."""

    __slots__ = ("_events", "_findings", "_hosts", "_units")

    def __init__(self, length: int = 200) -> None:
        self._events: deque[Event] = deque(maxlen=length)
        self._hosts: dict[str, str] = {}
        self._findings: dict[str, tuple[tuple[str, str], ...]] = {}
        """By router: what it last found."""
        self._units: dict[str, UnitStatus] = {}

    def copy(self) -> "EventLog":
        """Return one that goes on by itself."""
        found = EventLog()
        found._events = self._events.copy()
        found._hosts, found._units = self._hosts.copy(), self._units.copy()
        found._findings = self._findings.copy()
        return found

    def add(self, snapshot: Snapshot) -> None:
        """Compare with what was known and note what changed; on the first look only trouble is news."""
        for host in snapshot.hosts:
            self._look_at_host(snapshot.taken_unix_s, host)
            for unit in host.units:
                self._look_at_unit(snapshot.taken_unix_s, unit)
            for router in host.routers:
                self._look_at_findings(snapshot.taken_unix_s, router)

    def newest(self, count: int) -> tuple[Event, ...]:
        """Return up to `count` events, newest first."""
        return tuple(self._events)[:count]

    def note(self, event: Event) -> None:
        """Add what somebody else noticed."""
        self._events.appendleft(event)

    def _note(self, unix_s: float, mark: str, subject: str, text: str) -> None:
        self.note(Event(unix_s, mark, clean(subject, 40), clean(text)))

    def _look_at_host(self, unix_s: float, host: HostSnapshot) -> None:
        before = self._hosts.get(host.host_name, "")
        if host.error and not before:
            self._note(unix_s, BAD, host.host_name, host.error)
        elif before and not host.error:
            self._note(unix_s, NOTE, host.host_name, "answers again")
        self._hosts[host.host_name] = host.error

    def _look_at_findings(self, unix_s: float, router: RouterSample) -> None:
        before = self._findings.get(router.id, ())
        self._findings[router.id] = router.findings
        for engine, cause in router.findings:
            if (engine, cause) not in before:
                text = f"{cause} found by its router: dynctl explain hits"
                self._note(unix_s, BAD, engine or router.id, text)
        for engine, cause in before:
            if (engine, cause) not in router.findings:
                self._note(unix_s, NOTE, engine or router.id, f"{cause} is over")

    def _look_at_unit(self, unix_s: float, unit: UnitStatus) -> None:
        before = self._units.get(unit.id)
        self._units[unit.id] = unit
        if before is not None and unit == before:
            return
        why = f": {unit.last_error}" if unit.last_error else ""
        if unit.state in _TROUBLE:
            if before is None or before.state != unit.state:
                waits = (
                    "waits before its next start"
                    if unit.state == EngineState.BACKOFF
                    else "gave up"
                )
                self._note(unix_s, BAD, unit.id, f"{waits}{why}")
            return
        if before is None:
            return
        if unit.num_restarts > before.num_restarts:
            self._note(unix_s, BAD, unit.id, f"restarted ({unit.num_restarts} in all){why}")
        elif unit.state != before.state:
            self._note(unix_s, NOTE, unit.id, f"{before.state} → {unit.state}")
