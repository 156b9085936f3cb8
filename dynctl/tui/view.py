"""What the screen is made from: figures, trends, events, and what the person at the keyboard chose. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dynctl.telemetry.events import Event
from dynctl.telemetry.figures import DeploymentFigures, EngineFigures, Overview
from dynctl.telemetry.history import Trends


@dataclass(frozen=True, slots=True)
class Choices:
    """What the person chose; kept over snapshots."""

    cursor: int = 0
    """Row of the engine table."""
    sort: int = 0
    """Index into SORTS."""
    is_reversed: bool = False
    filter: str = ""
    is_typing: bool = False
    """The filter is being typed."""
    is_paused: bool = False
    is_helping: bool = False
    deployment: int = 0
    """Which deployment the top lines show."""


@dataclass(frozen=True, slots=True)
class View:
    """One picture. `overview` is None until the first snapshot."""

    overview: Overview | None
    trends: Trends
    events: tuple[Event, ...] = ()
    choices: Choices = field(default_factory=Choices)

    @property
    def deployment(self) -> DeploymentFigures | None:
        """The deployment the top lines show."""
        shown = self.overview.deployments if self.overview else ()
        return shown[self.choices.deployment % len(shown)] if shown else None

    def engines(self) -> list[EngineFigures]:
        """The engines to list: filtered and sorted."""
        chosen = self.choices
        listed = [
            e for e in (self.overview.engines if self.overview else ()) if matches(e, chosen.filter)
        ]
        key = SORTS[chosen.sort][1]
        if key is None:
            return listed[::-1] if chosen.is_reversed else listed
        known = [e for e in listed if key(e) is not None]
        unknown = [e for e in listed if key(e) is None]
        # Figures that are not known come last either way.
        return sorted(known, key=key, reverse=not chosen.is_reversed) + unknown  # type: ignore[arg-type]


def tokens_s(engine: EngineFigures) -> float | None:
    """The tokens an engine is there for: of prompts when it only prefills, else generated ones."""
    return engine.prompt_tokens_s if engine.role == "prefill" else engine.output_tokens_s


Key = Callable[[EngineFigures], float | None]

SORTS: tuple[tuple[str, Key | None], ...] = (
    ("pool", None),
    ("RUN", lambda e: e.running),
    ("WAIT", lambda e: e.waiting),
    ("KV%", lambda e: e.kv_usage_ratio),
    ("HIT%", lambda e: e.hit_ratio),
    ("TTFT99", lambda e: e.ttft.p99_s if e.ttft else None),
    ("ITL99", lambda e: e.itl.p99_s if e.itl else None),
    ("TOK/S", tokens_s),
    ("UTIL", lambda e: e.gpu_util_ratio),
    ("AGE", lambda e: e.age_s),
)
"""Orders of the engine table, largest first."""


def matches(engine: EngineFigures, wanted: str) -> bool:
    """Tell whether an engine passes a filter: words that all occur; `!word` must not; `host=x`, `role=x`, `state=x`."""
    fields = {
        "engine": engine.id,
        "host": engine.host_name,
        "role": engine.role,
        "pool": engine.role,
        "state": engine.state,
        "deployment": engine.deployment,
    }
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
