"""Taking single engines out of service and bringing them back, through the agents of their hosts. IO: HTTP."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dynctl import registry
from dynctl.agents.client import AgentClient
from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import Inventory
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.apply import READY_TIMEOUT_S, Rounds
from dynctl.deploy.reach import NotHereError
from dynctl.deploy.routed import Routing
from dynctl.deploy.steps import Tell
from dynctl.errors import DeployError, DynctlError, ExitCode, UsageError
from dynctl.inventory.problems import suggest
from dynctl.remote.outcomes import failures_of

POLL_S = 0.25
DRAIN_TIMEOUT_S = 400.0
"""Requests may take two minutes to end, an engine half a minute to stop."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine and its hosts."""

    host_name: str
    unit: UnitStatus
    others: tuple[str, ...] = ()
    """Hosts with parts of it, beside the one that leads."""

    @property
    def is_drained(self) -> bool:
        """Whether somebody drained it before, and that is done."""
        return self.unit.is_held and self.unit.state is EngineState.STOPPED


def unreached(
    found: Mapping[str, AgentClient | DynctlError], names: Sequence[str]
) -> dict[str, DynctlError]:
    """The hosts that are meant and cannot be asked, with why; of those that globs mean not where nothing of the cluster runs."""
    return {
        host_name: error
        for host_name, error in failures_of(found).items()
        if host_name in names
        or (
            any(fnmatchcase(host_name, name) for name in names)
            and not isinstance(error, NotHereError)
        )
    }


def choose(
    statuses: Mapping[str, AgentStatus], names: Sequence[str], silent: Sequence[str] = ()
) -> list[Chosen]:
    """The engines that are meant by their own or their hosts' names, or globs of either.

    `silent` are the hosts that cannot be asked: a glob may mean one of them alone.

    Raises:
        UsageError: when a name means none.
    """
    parts: dict[str, list[str]] = {}
    for host_name, status in statuses.items():
        for unit in status.units:
            if unit.kind == "member":
                parts.setdefault(unit.leader, []).append(host_name)
    engines = [
        Chosen(host_name, unit, tuple(parts.get(unit.id, ())))
        for host_name, status in statuses.items()
        for unit in status.units
        if unit.kind == "engine"
    ]
    known = [*(each.unit.id for each in engines), *statuses]
    for name in names:
        if any(_is_meant(each, name) for each in engines):
            continue
        if any(fnmatchcase(host_name, name) for host_name in silent):
            continue
        # The nearest name would be another engine's: the one that is meant may be where nobody answers.
        hint = f"it may be on {', '.join(silent)}, not reached now" if silent else ""
        raise UsageError(
            f"no engine, and no host with one, is called {clean(name)}",
            hint or suggest(name, known) or "dynctl status lists them",
        )
    return [each for each in engines if any(_is_meant(each, name) for name in names)]


def _is_meant(each: Chosen, name: str) -> bool:
    return any(fnmatchcase(one, name) for one in (each.unit.id, each.host_name, *each.others))


def what_stays(statuses: Mapping[str, AgentStatus], leaving: Sequence[Chosen]) -> Iterator[str]:
    """Say per deployment and role how many ready engines go on without those that leave."""
    gone = {each.unit.id for each in leaving}
    engines = [u for status in statuses.values() for u in status.units if u.kind == "engine"]
    stay = [u for u in engines if u.state is EngineState.READY and u.id not in gone]
    generating = {u.deployment for u in stay if u.role != "prefill"}
    kinds = {(u.deployment, u.role): None for u in engines if u.id in gone}
    for deployment, role in kinds:
        num_all = sum((u.deployment, u.role) == (deployment, role) for u in engines)
        num_stay = sum((u.deployment, u.role) == (deployment, role) for u in stay)
        what = deployment if role == "aggregated" else f"{deployment} {role}"
        if num_stay:
            yield f"{what}: {num_stay} of {num_all} engines go on"
        elif deployment in generating:
            yield f"{what}: no ready engine is left, decode engines will compute prompts themselves"
        else:
            yield f"{what}: no ready engine is left, new requests will be refused"


def taking_part(statuses: Mapping[str, AgentStatus], chosen: Sequence[Chosen]) -> set[str]:
    """Name the hosts that matter to some engines: their own, and those of the routers that send requests to them."""
    deployments = {each.unit.deployment for each in chosen}
    return {each.host_name for each in chosen} | {
        name
        for name, status in statuses.items()
        for unit in status.units
        if unit.kind == "router" and unit.deployment in deployments
    }


async def drain(
    clients: Mapping[str, AgentClient], chosen: Sequence[Chosen], tell: Tell
) -> dict[str, DynctlError]:
    """Take engines out of service: no new requests, those under way end, then they stop and stay down.

    Returns why hosts could not be told to; what others were told is waited for.

    Raises:
        DeployError: exit 6 when one does not stop, 3 when an agent is lost meanwhile.
    """
    told, failures = await _each(
        chosen, lambda each: clients[each.host_name].drain(each.unit.id), tell
    )
    limits_s = {each.unit.id: DRAIN_TIMEOUT_S for each in told}
    await _wait(clients, told, EngineState.STOPPED, tell, limits_s)
    return failures


async def bring_back(
    clients: Mapping[str, AgentClient],
    chosen: Sequence[Chosen],
    tell: Tell,
    deadlines_s: Mapping[str, float],
) -> dict[str, DynctlError]:
    """Start engines again that were drained; `deadlines_s` says how long a start may take, by deployment.

    `clients` are those of hosts that are `taking_part`: none of them may be lost meanwhile. Returns why hosts could not be
    told to; what others were told is waited for, until routers send requests to it.

    Raises:
        DeployError: exit 6 when one does not become ready or is not reached, 3 when an agent is lost meanwhile.
    """
    told, failures = await _each(
        chosen, lambda each: clients[each.host_name].restart(each.unit.id), tell
    )
    limits_s = {
        each.unit.id: max(READY_TIMEOUT_S, deadlines_s.get(each.unit.deployment, 0.0))
        for each in told
    }
    await _wait(clients, told, EngineState.READY, tell, limits_s)
    asked = {name: client for name, client in clients.items() if name not in failures}
    await _until_used(asked, told, tell)
    return failures


def start_deadlines_s(wanted: Inventory) -> dict[str, float]:
    """How long a start may take, by deployment: as the inventory says, else as the kind of engine does."""
    return {
        each.name: registry.load(
            "dynctl.agents.engines", each.engine.kind, "ENGINE"
        ).capabilities.deadline_s(each.engine.start_deadline_s)
        for each in wanted.deployments
    }


async def _each(
    chosen: Sequence[Chosen], order: Callable[[Chosen], Awaitable[object]], tell: Tell
) -> tuple[list[Chosen], dict[str, DynctlError]]:
    """Give the order for each engine; return those whose agents took it, and why hosts failed.

    A host that fails is told at once, gets no more orders and does not hold up the others.
    """
    told: list[Chosen] = []
    failures: dict[str, DynctlError] = {}
    for each in chosen:
        if each.host_name in failures:
            continue
        try:
            await order(each)
        except DynctlError as error:
            is_part = any(other.host_name == each.host_name for other in told)
            tell(each.host_name, each.unit.id, f"FAILED  {error.message}")
            failures[each.host_name] = DynctlError(
                f"{each.host_name}: {each.unit.id}: {error.message}",
                error.hint,
                code=ExitCode.PARTIAL if is_part else error.exit_code,
            )
        else:
            told.append(each)
    return told, failures


async def _wait(
    clients: Mapping[str, AgentClient],
    chosen: Sequence[Chosen],
    wanted: EngineState,
    tell: Tell,
    limits_s: Mapping[str, float],
) -> None:
    """Tell each change of state until all are as wanted."""
    started_s = time.monotonic()
    told = {(each.host_name, each.unit.id): each.unit.state for each in chosen}
    rounds = Rounds({each.host_name: clients[each.host_name] for each in chosen}, tell)
    while True:
        units = {(n, u.id): u for n, status in (await rounds.ask()).items() for u in status.units}
        left: dict[str, str] = {}
        for (name, unit_id), before in told.items():
            unit = units.get((name, unit_id))
            if unit is None:
                raise _not(wanted, [f"{name}: {unit_id} is no longer there"])
            if unit.state is not before:
                tell(name, unit_id, unit.state.value)
                told[name, unit_id] = unit.state
            if unit.state is not wanted:
                left[unit_id] = f"{name}: {unit_id} is {unit.state.value}{_why(unit)}"
            if unit.state is EngineState.FAILED:
                raise _not(wanted, [left[unit_id]])
        if not left:
            return
        passed_s = time.monotonic() - started_s
        if any(passed_s > limits_s[unit_id] for unit_id in left):
            raise _not(wanted, list(left.values()), f" after {format_seconds(passed_s)}")
        await asyncio.sleep(POLL_S)


async def _until_used(
    clients: Mapping[str, AgentClient], chosen: Sequence[Chosen], tell: Tell
) -> None:
    """Wait until routers send requests to engines that are ready."""
    routing = Routing(clients, tell, {each.unit.id for each in chosen})
    rounds = Rounds(clients, tell)
    while await routing.is_lacking(await rounds.ask()):  # noqa: ASYNC110 - routers are other processes
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
