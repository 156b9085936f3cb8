"""What the screen is made from: figures, courses, events, answers, and what the person at the keyboard chose. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dynctl.core.workload import Slo
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.events import Event
from dynctl.telemetry.figures import DeploymentFigures, EngineFigures, Overview
from dynctl.telemetry.recording import Playing
from dynctl.telemetry.traces import Trace, engine_of
from dynctl.telemetry.trends import WINDOWS, Trends, Window


@dataclass(frozen=True, slots=True)
class Place:
    """Where the person is on one screen."""

    cursor: int = 0
    """Row of its table."""
    sort: int = 0
    """Which of its orders."""
    is_reversed: bool = False
    filter: str = ""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the person chose; kept over snapshots."""

    screen: str = "overview"
    opened: str = ""
    """The engine that is looked at on its own; empty: none."""
    place: Place = field(default_factory=Place)
    left: Mapping[str, Place] = field(default_factory=dict)
    """Where the person was on other screens."""
    window: int = 1
    """Index into WINDOWS."""
    metric: int = 0
    """Which figure a plot or heat map shows."""
    deployment: int = 0
    """Which deployment the top lines show."""
    is_typing: bool = False
    """The filter is being typed."""
    is_paused: bool = False
    is_helping: bool = False

    def at(self, screen: str) -> "Choices":
        """Go to a screen, back to where the person was on it."""
        if screen == self.screen:
            return replace(self, opened="")
        left = {**self.left, self.screen: self.place}
        return replace(
            self, screen=screen, opened="", left=left, place=left.get(screen, Place()), metric=0
        )

    def placed(self, **changed: int | bool | str) -> "Choices":
        """Change where the person is on this screen."""
        return replace(self, place=replace(self.place, **changed))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class View:
    """One picture. `overview` is None until the first snapshot."""

    overview: Overview | None
    trends: Trends
    events: tuple[Event, ...] = ()
    choices: Choices = field(default_factory=Choices)
    answers: Answers | None = None
    """To what the screen asked beyond snapshots; None: nothing came yet."""
    traces: tuple[Trace, ...] = ()
    """Requests seen while somebody looked, newest first."""
    width: int = 80
    room: int = 21
    """Lines a screen has."""
    playing: Playing | None = None
    """Where in a recording this is; None: it is now."""
    recording: str = ""
    """How the recording of this goes; empty: there is none."""
    note: str = ""
    """What came of the last key, shown until the next one."""

    @property
    def deployment(self) -> DeploymentFigures | None:
        """The deployment the top lines show."""
        shown = self.overview.deployments if self.overview else ()
        return shown[self.choices.deployment % len(shown)] if shown else None

    @property
    def window(self) -> Window:
        """How far back plots go."""
        return WINDOWS[self.choices.window]

    def slo_of(self, deployment: str) -> Slo:
        """The goals of a deployment."""
        return self.overview.slo_of(deployment) if self.overview else Slo()

    @property
    def slo(self) -> Slo:
        """The goals of the deployment the top lines show."""
        return self.deployment.slo if self.deployment else Slo()

    def engine(self, engine_id: str) -> EngineFigures | None:
        """Find an engine."""
        known = self.overview.engines if self.overview else ()
        return next((engine for engine in known if engine.id == engine_id), None)

    def engines(self) -> list[EngineFigures]:
        """The engines to list: filtered and sorted."""
        place = self.choices.place
        known = self.overview.engines if self.overview else ()
        listed = [e for e in known if passes(engine_fields(e), place.filter)]
        return in_order(listed, SORTS[place.sort % len(SORTS)][1], is_reversed=place.is_reversed)

    def requests(self) -> list[Trace]:
        """The requests of the shown deployment that pass the filter, newest first."""
        known = self.overview.engines if self.overview else ()
        name = self.deployment.name if self.deployment else ""
        mine = {engine.id for engine in known if engine.deployment == name}
        wanted = self.choices.place.filter
        return [
            trace
            for trace in self.traces
            if engine_of(trace.engine, mine) in mine and passes(trace_fields(trace), wanted)
        ]


Key = Callable[[EngineFigures], float | None]

SORTS: tuple[tuple[str, Key | None], ...] = (
    ("pool", None),
    ("RUN", lambda e: e.running),
    ("WAIT", lambda e: e.waiting),
    ("KV%", lambda e: e.kv_usage_ratio),
    ("HIT%", lambda e: e.hit_ratio),
    ("TTFT99", lambda e: e.ttft.p99_s if e.ttft else None),
    ("ITL99", lambda e: e.itl.p99_s if e.itl else None),
    ("TOK/S", lambda e: e.tokens_s),
    ("UTIL", lambda e: e.gpu_util_ratio),
    ("AGE", lambda e: e.age_s),
)
"""Orders of the engine table, largest first."""


def in_order(
    listed: Iterable[EngineFigures], key: Key | None, *, is_reversed: bool
) -> list[EngineFigures]:
    """Sort, largest first; figures that are not known come last either way."""
    if key is None:
        return list(listed)[::-1] if is_reversed else list(listed)
    keyed = [(key(engine), engine) for engine in listed]
    known = [(value, engine) for value, engine in keyed if value is not None]
    known.sort(key=lambda one: one[0], reverse=not is_reversed)
    return [engine for _, engine in known] + [engine for value, engine in keyed if value is None]


def engine_fields(engine: EngineFigures) -> Mapping[str, str]:
    """What a filter looks at in an engine."""
    return {
        "engine": engine.id,
        "host": engine.host_name,
        "role": engine.role,
        "pool": engine.role,
        "state": engine.state,
        "deployment": engine.deployment,
    }


def trace_fields(trace: Trace) -> Mapping[str, str]:
    """What a filter looks at in a request."""
    return {
        "id": trace.id,
        "engine": f"{trace.prefill} {trace.engine}",
        "key": trace.route_key,
        "state": trace.outcome or "runs",
        "link": trace.link,
        "path": trace.path,
    }


def passes(fields: Mapping[str, str], wanted: str) -> bool:
    """Tell whether a row passes a filter: words that all occur; `!word` must not; `host=x` looks at one field."""
    for term in wanted.lower().split():
        is_inverse = term.startswith("!")
        key, equals, value = term.removeprefix("!").partition("=")
        if equals and key in fields:
            found = value in fields[key].lower()
        else:
            found = any(term.removeprefix("!") in text.lower() for text in fields.values())
        if found == is_inverse:
            return False
    return True
