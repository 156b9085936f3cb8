"""Taking single engines out of service and bringing them back, through the agents of their hosts. IO: HTTP."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dynctl.agents.client import AgentClient
from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.steps import Tell
from dynctl.errors import DeployError, ExitCode, UsageError
from dynctl.inventory.problems import suggest

POLL_S = 0.25
DRAIN_TIMEOUT_S = 400.0
"""Requests may take two minutes to end, an engine half a minute to stop."""
RETURN_TIMEOUT_S = 1800.0
"""Weights are loaded anew."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine and its host."""

    host_name: str
    unit: UnitStatus

    @property
    def is_drained(self) -> bool:
        """Whether somebody drained it before, and that is done."""
        return self.unit.is_held and self.unit.state is EngineState.STOPPED


def choose(statuses: Mapping[str, AgentStatus], names: Sequence[str]) -> list[Chosen]:
    """The engines that are meant by their own or their hosts' names, or globs of either.

    Raises:
        UsageError: when a name means none.
    """
    engines = [
        Chosen(host_name, unit)
        for host_name, status in statuses.items()
        for unit in status.units
        if unit.kind == "engine"
    ]
    known = [*(each.unit.id for each in engines), *statuses]
    for name in names:
        if not any(_is_meant(each, name) for each in engines):
            raise UsageError(
                f"no engine, and no host with one, is called {clean(name)}",
                suggest(name, known) or "dynctl status lists them",
            )
    return [each for each in engines if any(_is_meant(each, name) for name in names)]


def _is_meant(each: Chosen, name: str) -> bool:
    return fnmatchcase(each.unit.id, name) or fnmatchcase(each.host_name, name)


def what_stays(statuses: Mapping[str, AgentStatus], leaving: Sequence[Chosen]) -> Iterator[str]:
    """Say per deployment and role how many ready engines go on without those that leave."""
    gone = {each.unit.id for each in leaving}
    engines = [u for status in statuses.values() for u in status.units if u.kind == "engine"]
    kinds = {(u.deployment, u.role): None for u in engines if u.id in gone}
    for deployment, role in kinds:
        alike = [u for u in engines if (u.deployment, u.role) == (deployment, role)]
        stay = [u for u in alike if u.state is EngineState.READY and u.id not in gone]
        what = deployment if role == "aggregated" else f"{deployment} {role}"
        if stay:
            yield f"{what}: {len(stay)} of {len(alike)} engines go on"
        else:
            yield f"{what}: no ready engine is left, new requests will be refused"


async def drain(clients: Mapping[str, AgentClient], chosen: Sequence[Chosen], tell: Tell) -> None:
    """Take engines out of service: no new requests, those under way end, then they stop and stay down.

    Raises:
        DeployError: exit 6 when one does not stop.
    """
    for each in chosen:
        await clients[each.host_name].drain(each.unit.id)
    await _wait(clients, chosen, EngineState.STOPPED, tell, DRAIN_TIMEOUT_S)


async def bring_back(
    clients: Mapping[str, AgentClient], chosen: Sequence[Chosen], tell: Tell
) -> None:
    """Start engines again that were drained.

    Raises:
        DeployError: exit 6 when one does not become ready.
    """
    for each in chosen:
        await clients[each.host_name].restart(each.unit.id)
    await _wait(clients, chosen, EngineState.READY, tell, RETURN_TIMEOUT_S)


async def _wait(
    clients: Mapping[str, AgentClient],
    chosen: Sequence[Chosen],
    wanted: EngineState,
    tell: Tell,
    limit_s: float,
) -> None:
    """Tell each change of state until all are as wanted."""
    deadline_s = time.monotonic() + limit_s
    told = {each.unit.id: each.unit.state for each in chosen}
    names = {each.host_name for each in chosen}
    while True:
        left = []
        for name in sorted(names):
            for unit in (await clients[name].status()).units:
                if unit.id not in told:
                    continue
                if unit.state is not told[unit.id]:
                    tell(name, unit.id, unit.state.value)
                    told[unit.id] = unit.state
                if unit.state is not wanted:
                    left.append(f"{name}: {unit.id} is {unit.state.value}{_why(unit)}")
                if unit.state is EngineState.FAILED:
                    raise _not(wanted, left[-1:])
        if not left:
            return
        if time.monotonic() > deadline_s:
            raise _not(wanted, left, f" after {format_seconds(limit_s)}")
        await asyncio.sleep(POLL_S)


def _why(unit: UnitStatus) -> str:
    text = clean(unit.seen or unit.last_error, 300)
    return f": {text}" if text else ""


def _not(wanted: EngineState, left: Sequence[str], when: str = "") -> DeployError:
    return DeployError(
        f"not {wanted.value}{when}:\n  " + "\n  ".join(left),
        "dynctl status shows how it stands, dynctl logs UNIT why",
        code=ExitCode.GATE,
    )
