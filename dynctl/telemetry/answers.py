"""What may be asked beyond snapshots, how much of it, and what came of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynctl.telemetry.traces import Told

UnitName = tuple[str, str]
"""Host and unit: every host has a relay and an agent of the same name."""


@dataclass(frozen=True, slots=True)
class Asks:
    """What a screen needs beyond snapshots."""

    num_decisions: int = 0
    """The newest of every router."""
    hits: bool = False
    """Sums since routers' starts."""
    logs: tuple[UnitName, ...] = ()
    commands: tuple[UnitName, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of it; what was not asked or failed is absent."""

    decisions: tuple[Told, ...] = ()
    hits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By router: sums since its start, by name."""
    logs: Mapping[UnitName, tuple[str, ...]] = field(default_factory=dict)
    """The last lines, not cleaned."""
    commands: Mapping[UnitName, str] = field(default_factory=dict)
    """What units were started with, not cleaned; empty: not known."""
    failures: Mapping[str | UnitName, str] = field(default_factory=dict)
    """By router or log: why it could not be asked."""


MOST_DECISIONS = 60
LEAST_DECISIONS = 10
CANDIDATES = 600
"""Over all decisions of one look: a router writes out every candidate of each."""


def num_decisions(num_engines: int) -> int:
    """How many decisions to ask of each router at a look: it answers between its requests, and must not be kept from them."""
    return max(LEAST_DECISIONS, min(MOST_DECISIONS, CANDIDATES // max(1, num_engines)))
