"""Which units ought to be ready, for all who ask that: `up`, which waits for them, and `status`. Pure."""

from collections.abc import Iterable, Mapping

from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus


def awaited(statuses: Mapping[str, AgentStatus]) -> list[tuple[str, UnitStatus]]:
    """Every unit with its host that is to become ready.

    Not a predecessor that lets its last requests end, an engine that somebody drained, a router left without engines
    by that, or a part of an engine that another host leads: that is ready when all of it is. One that failed tells why.
    """
    empty = emptied(statuses.values())
    return [
        (name, unit)
        for name, status in statuses.items()
        for unit in (*status.units, *status.asides)
        if not (unit.beside and unit.state is EngineState.DRAINING)
        and not (unit.is_held or is_idle_router(unit, empty))
        and not (unit.kind == "member" and unit.state is not EngineState.FAILED)
    ]


def waiting_for_unseen(statuses: Iterable[AgentStatus]) -> list[UnitStatus]:
    """Routers of which nobody can tell whether they ought to be ready before the other hosts were asked as well.

    They start, and no engine of theirs in service was seen: whether others have some, drained or not, decides.
    """
    units = [unit for status in statuses for unit in status.units]
    served = {unit.deployment for unit in units if unit.kind == "engine" and not unit.is_held}
    is_open = [unit for unit in units if unit.kind == "router" and unit.deployment not in served]
    return [unit for unit in is_open if unit.state is EngineState.STARTING]


def emptied(statuses: Iterable[AgentStatus]) -> set[str]:
    """Deployments whose engines were all drained by somebody."""
    engines = [unit for status in statuses for unit in status.units if unit.kind == "engine"]
    served = {unit.deployment for unit in engines if not unit.is_held}
    return {unit.deployment for unit in engines} - served


def is_idle_router(unit: UnitStatus, empty: set[str]) -> bool:
    """Whether a unit is a router of an `emptied` deployment; one that failed would not serve with engines either."""
    is_router = unit.kind == "router" and unit.state is not EngineState.FAILED
    return is_router and unit.deployment in empty
