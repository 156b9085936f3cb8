"""Taking the steps: bundles and files first on all hosts at once, then slices, then waiting until all is ready.

Stops at the first failure and says what was done; every step can be taken again. IO: ssh, HTTP.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl.agents.client import AgentClient
from dynctl.agents.programs import EngineProgram
from dynctl.agents.protocol import MEMBER_CERTIFICATE, AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.awaited import awaited, emptied, is_idle_router
from dynctl.deploy.bundle import Bundle, Target, make_bundle
from dynctl.deploy.diff import undone
from dynctl.deploy.goals import Goals
from dynctl.deploy.launch import start_agent
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.reach import reach_agents
from dynctl.deploy.remove import take_down
from dynctl.deploy.routed import Routing
from dynctl.deploy.steps import HostState, Step, StepKind, Tell
from dynctl.errors import ConnectError, DeployError, DynctlError, ExitCode
from dynctl.remote.fleet import Fleet
from dynctl.remote.outcomes import failures_of
from dynctl.remote.port import Remote

READY_TIMEOUT_S = 1800.0
"""Loading weights from a cold disk takes this long at most, unless an engine is given longer (`start_deadline_s`)."""
HEARTBEAT_S = 10.0
POLL_S = 0.25
_MAX_TOLD = 8
"""Units that are named each time it is told what is waited for."""
LOST_S = 15.0
"""An agent that died is started again by systemd within a few seconds; what does not answer for longer is lost."""
_TELLING = frozenset({ExitCode.TRUST, ExitCode.UNKNOWN, ExitCode.LOCKED, ExitCode.GATE})
"""Codes that say more than that some hosts failed. A refusal does not: steps were taken before it."""
MAX_TOKENIZER_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Work:
    """What a deploy works with."""

    inventory: Inventory
    fleet: Fleet
    seats: Mapping[str, Seat]
    goals: Goals
    states: Mapping[str, HostState]
    tell: Tell


async def apply(work: Work, steps: Sequence[Step], fence: int) -> dict[str, AgentStatus]:
    """Take the steps and wait until every unit is ready.

    Raises:
        DeployError: exit 3 when some hosts failed, 6 when a unit does not become ready; says what was done.
    """
    wanted = {name: [s for s in steps if s.host_name == name] for name in work.goals.hosts}
    bundles = await _bundles(work, steps)

    async def prepare(entry: HostEntry, remote: Remote) -> None:
        for step in wanted[entry.name]:
            if step.kind is not StepKind.SLICE:
                started = time.monotonic()
                await _prepare_step(work, step, entry, remote, bundles)
                work.tell(
                    entry.name,
                    step.kind.value,
                    f"ok  {step.detail}  {format_seconds(time.monotonic() - started)}",
                )

    _raise_failures(work, await work.fleet.map(prepare, list(wanted)), "prepared")
    retired = sorted({step.host_name for step in steps if step.kind is StepKind.RETIRE})
    _raise_failures(
        work, await take_down(work.inventory, work.fleet, work.tell, hosts=retired), "cleared"
    )
    async with reach_agents(work.inventory, work.fleet, list(wanted)) as found:
        _raise_failures(work, found, "reached")
        clients = {n: client for n, client in found.items() if isinstance(client, AgentClient)}
        # Asked now: an agent that did not answer before has been started anew and knows its own.
        had = [(await client.status()).generation for client in clients.values()]
        generation = 1 + max(had, default=0)

        async def send(entry: HostEntry, _: Remote) -> None:
            for step in wanted[entry.name]:
                if step.kind is StepKind.SLICE:
                    await _send_slice(work, step, clients[entry.name], generation, fence)

        _raise_failures(work, await work.fleet.map(send, list(wanted)), "told what to run")
        return await wait_ready(clients, work.goals, work.tell)


async def wait_ready(
    clients: Mapping[str, AgentClient], goals: Goals, tell: Tell
) -> dict[str, AgentStatus]:
    """Wait until every unit of every host is as wished and ready, and routers send requests to every engine.

    Tells each change and, every 10 s, what is waited for: since when, for how long at most, and what it was last seen
    to lack.

    Raises:
        DeployError: exit 6 when a unit failed for good, stayed what it was, is not reached by its router, or time ran out; 3
            when an agent is lost.
    """
    started = last_told = time.monotonic()
    told: dict[tuple[str, str], UnitStatus] = {}
    limits = _limits_s(goals)
    rounds, routing = Rounds(clients, tell), Routing(clients, tell)
    while True:
        statuses = await rounds.ask()
        units = awaited(statuses)
        now = time.monotonic()
        if _tell_changes(units, told, tell):
            last_told = now
        _refuse_failed(units)
        waiting = [(name, u) for name, u in units if u.state is not EngineState.READY]
        if not waiting:
            _refuse_unchanged(statuses, goals)
            if not await routing.is_lacking(statuses):
                _tell_lasting(statuses, tell)
                await _tell_findings(clients, statuses, tell)
                return statuses
        else:
            routing.begin_anew()
        _refuse_late(waiting, limits, now - started)
        if waiting and now - last_told > HEARTBEAT_S:
            for name, unit in waiting[:_MAX_TOLD]:
                passed = f"{format_seconds(now - started)} of {format_seconds(limits[unit.id])}"
                tell(name, unit.id, f"{unit.state.value}, {passed}{_seen(unit)}")
            if len(waiting) > _MAX_TOLD:
                tell("", "wait", f"and {len(waiting) - _MAX_TOLD} more, see dynctl status")
            last_told = now
        await asyncio.sleep(POLL_S)


def _limits_s(goals: Goals) -> Mapping[str, float]:
    """How long each engine may be waited for; routers and relays as long as the most patient one.

    A process that is late is ended and started again by its agent, which says when it gives up. A server that is not
    ours is asked without end: there nobody else gives up.
    """
    limits: dict[str, float] = {}
    for goal in goals.hosts.values():
        for wish in goal.slice.engines:
            program = EngineProgram(wish)
            is_ours = program.engine.capabilities.is_process
            limits[wish.id] = max(program.deadline_s, READY_TIMEOUT_S if is_ours else 0.0)
    longest_s = max([READY_TIMEOUT_S, *limits.values()])
    return defaultdict(lambda: longest_s, limits)


def _refuse_late(
    waiting: Sequence[tuple[str, UnitStatus]], limits: Mapping[str, float], passed_s: float
) -> None:
    late = [(name, unit) for name, unit in waiting if passed_s > limits[unit.id]]
    if not late:
        return
    lines = [
        f"{name}: {unit.id} is not ready after {format_seconds(passed_s)}{_seen(unit)}"
        for name, unit in late
    ]
    raise DeployError(
        "\n  ".join(lines),
        f"dynctl logs {late[0][1].id}; its agent goes on, so look again with dynctl status. "
        "engine.start_deadline_s in the inventory gives engines longer",
        code=ExitCode.GATE,
    )


def _seen(unit: UnitStatus) -> str:
    """What a unit that is not ready was last found to lack, else why it last ended."""
    text = clean(unit.seen or unit.last_error, 300)
    return f": {text}" if text else ""


def _tell_lasting(statuses: Mapping[str, AgentStatus], tell: Tell) -> None:
    """Tell what stays as it is though all is ready: agents that cannot do all of their work, what somebody drained."""
    empty = emptied(statuses.values())
    for name, status in statuses.items():
        for text in status.degraded:
            tell(name, "agent", f"degraded: {text}")
        for unit in status.units:
            if unit.is_held:
                tell(name, unit.id, f"stays drained; dynctl drain --undo {unit.id} brings it back")
            elif is_idle_router(unit, empty):
                tell(name, unit.id, "answers nobody: all engines of its deployment are drained")


async def _tell_findings(
    clients: Mapping[str, AgentClient], statuses: Mapping[str, AgentStatus], tell: Tell
) -> None:
    """Tell what routers find wrong with engines: those serve, but not by what they have cached."""
    empty = emptied(statuses.values())
    for name, status in statuses.items():
        for unit in status.units:
            if unit.kind != "router" or unit.is_held or is_idle_router(unit, empty):
                continue
            try:
                found = json.loads(await clients[name].ask_router(unit.id, "/findings"))
            except DynctlError as error:
                tell(name, unit.id, f"does not say what it finds of engines: {error.message}")
                continue
            for one in found:
                subject = f"{one['engine']}: " if one["engine"] else ""
                text = f"degraded: {subject}{one['text']} ({one['cause']}); {one['hint']}"
                tell(name, unit.id, clean(text, 400))


def _tell_changes(
    units: Sequence[tuple[str, UnitStatus]], told: dict[tuple[str, str], UnitStatus], tell: Tell
) -> bool:
    """Tell every change of state since the last look, and who took over; return whether there was one.

    `told` keeps track by host and id: every host has its relay, and an engine that moves is for a while on two.
    """
    is_news = False
    for name, unit in units:
        # What was ready before anybody looked is no news.
        last = told.get((name, unit.id))
        was = last.state if last else EngineState.READY
        if was is not unit.state:
            tell(name, unit.id, _state_text(unit))
            is_news = True
        elif last and last.incarnation != unit.incarnation and _has_followed(name, unit, told):
            tell(name, unit.id, "ready: the new one took over")
            is_news = True
        told[name, unit.id] = unit
    return is_news


def _has_followed(name: str, unit: UnitStatus, told: Mapping[tuple[str, str], UnitStatus]) -> bool:
    """Whether a unit's process was told of while it was still to take over."""
    return any(
        host == name and seen.beside == unit.id and seen.incarnation == unit.incarnation
        for (host, _), seen in told.items()
    )


def _refuse_failed(units: Sequence[tuple[str, UnitStatus]]) -> None:
    for name, unit in units:
        if unit.state is EngineState.FAILED:
            raise DeployError(
                f"{name}: {unit.id} failed: {clean(unit.last_error, 300) or 'no reason given'}",
                f"dynctl logs {unit.id}; then correct it and run dynctl up again, or dynctl down",
                code=ExitCode.GATE,
            )


class Rounds:
    """Asks all agents again and again; one that is away for a moment counts as it was."""

    def __init__(self, clients: Mapping[str, AgentClient], tell: Tell) -> None:
        self._clients, self._tell = clients, tell
        self._last: dict[str, AgentStatus] = {}
        self._lost_since_s: dict[str, float] = {}

    async def ask(self) -> dict[str, AgentStatus]:
        """Return what every agent says, or said last.

        Raises:
            DeployError: exit 3 when one did not answer for long.
        """
        while True:
            for name, client in self._clients.items():
                try:
                    self._last[name] = await client.status()
                except ConnectError as error:
                    self._miss(name, error)
                else:
                    self._lost_since_s.pop(name, None)
            if len(self._last) == len(self._clients):
                return dict(self._last)
            await asyncio.sleep(POLL_S)

    def _miss(self, name: str, error: ConnectError) -> None:
        now_s = time.monotonic()
        if name not in self._lost_since_s:
            self._lost_since_s[name] = now_s
            self._tell(name, "agent", "does not answer; waiting for it to come back")
        if now_s - self._lost_since_s[name] > LOST_S:
            raise DeployError(
                f"{name}: the agent was lost meanwhile: "
                f"{error.message.removeprefix('no agent answers: ')}",
                "dynctl up starts it again and goes on from there; if it is lost again, its last words are in "
                "logs/agent.log of dynctl's directory on that host",
                code=ExitCode.PARTIAL,
            )


def _refuse_unchanged(statuses: Mapping[str, AgentStatus], goals: Goals) -> None:
    """All runs: then what is not as wished has a successor that failed."""
    for name, status in statuses.items():
        left = undone(goals.hosts[name].slice, HostState(name, status=status))
        if left:
            errors = [unit.last_error for unit in status.units if unit.last_error]
            raise DeployError(
                f"{name}: {left[0]}: {clean(errors[0], 300) if errors else 'not carried out'}",
                "what ran before goes on; dynctl logs shows why, then run dynctl up again",
                code=ExitCode.GATE,
            )


def _state_text(unit: UnitStatus) -> str:
    error = (
        f"  {clean(unit.last_error, 200)}"
        if unit.last_error and unit.state is not EngineState.READY
        else ""
    )
    return f"{unit.state.value}{error}"


async def _bundles(work: Work, steps: Sequence[Step]) -> dict[Target, Bundle]:
    needed = {work.goals.targets[s.host_name] for s in steps if s.kind is StepKind.BUNDLE}
    bundles = {}
    for target in sorted(needed, key=lambda t: t.tag):
        started = time.monotonic()
        bundles[target] = await make_bundle(target)
        text = (
            f"{bundles[target].digest} for {target.tag}, {bundles[target].num_bytes / 1e6:.1f} MB"
        )
        work.tell("", "bundle", f"{text}  {format_seconds(time.monotonic() - started)}")
    return bundles


async def _prepare_step(
    work: Work, step: Step, entry: HostEntry, remote: Remote, bundles: Mapping[Target, Bundle]
) -> None:
    seat = work.seats[entry.name]
    if step.kind is StepKind.BUNDLE:
        await _install(seat, remote, bundles[work.goals.targets[entry.name]])
    elif step.kind is StepKind.FILES:
        await _put_files(work, entry.name, remote)
    elif step.kind is StepKind.AGENT:
        note = await start_agent(work.inventory, seat, remote, work.goals.hosts[entry.name].bundle)
        if note:
            work.tell(entry.name, "agent", note)


async def _install(seat: Seat, remote: Remote, bundle: Bundle) -> None:
    root = seat.place.root
    await remote.put(f"{root}/.dynctl-root", b"made by dynctl\n")
    await remote.put(f"{root}/incoming/{bundle.digest}.tar.gz", bundle.path)
    answer = await call(
        remote, seat.python, "install", {"root": root, "digest": bundle.digest}, PROGRAM_TIMEOUT_S
    )
    if "error" in answer:
        raise DeployError(
            f"{remote.name}: {clean(answer['error'])}", "free some space and run dynctl up again"
        )


async def _put_files(work: Work, host_name: str, remote: Remote) -> None:
    root = work.seats[host_name].place.root
    found = dict(work.states[host_name].files)
    wanted = dict(work.goals.hosts[host_name].files)
    await remote.put(f"{root}/.dynctl-root", b"made by dynctl\n")
    for path, content in work.goals.content[host_name].items():
        if found.get(path) != wanted[path]:
            await remote.put(f"{root}/{path}", content)
    for path, copy in work.goals.copies.get(host_name, {}).items():
        if found.get(path) != copy.digest:
            content = await work.fleet.remote(copy.source_host).get(
                copy.source_path, MAX_TOKENIZER_BYTES
            )
            await remote.put(f"{root}/{path}", content)


async def _send_slice(
    work: Work, step: Step, client: AgentClient, generation: int, fence: int
) -> None:
    goal = work.goals.hosts[step.host_name]
    state = work.states[step.host_name]
    status = await client.put_slice(replace(goal.slice, generation=generation, fence=fence))
    work.tell(step.host_name, "slice", f"ok  {step.detail}")
    changed = {path for path, digest in goal.files if dict(state.files).get(path) != digest}
    was = {unit.id: unit for unit in state.status.units} if state.status else {}
    for unit in status.units:
        before = was.get(unit.id)
        is_same = before is not None and before.incarnation == unit.incarnation
        # A restart would bring back what somebody drained; it reads its files when it is brought back.
        if (is_same and not unit.is_held) and (
            unit.state is EngineState.FAILED or any(_reads(unit, path) for path in changed)
        ):
            await client.restart(unit.id)


def _reads(unit: UnitStatus, path: str) -> bool:
    """Whether a unit reads a managed file at its start, so that a changed one needs a restart."""
    if path == "tls/ca.crt":
        return unit.kind in {"relay", "router"}
    if path.startswith(f"tls/{MEMBER_CERTIFICATE}."):
        return False  # read at each connection
    if path.startswith("tls/server-"):
        return unit.kind == "router" and path.startswith(f"tls/server-{unit.deployment}.")
    if path.startswith("tls/"):
        return unit.kind == ("relay" if path.startswith("tls/host.") else "router")
    directory, _, name = path.partition("/")
    if directory == "secrets":
        return unit.kind == "engine" and name.startswith(f"{unit.deployment}.")
    return unit.kind == "router" and name.startswith(f"{unit.deployment}/")


def _raise_failures(work: Work, results: Mapping[str, object], what: str) -> None:
    failures = failures_of(results)
    if not failures:
        return
    for name, error in failures.items():
        work.tell(name, "FAILED", error.message + (f"  hint: {error.hint}" if error.hint else ""))
    done = sorted(set(results) - set(failures))
    first = next(iter(failures.values()))
    raise DeployError(
        f"{len(failures)} of {len(results)} hosts failed ({', '.join(failures)}); {what}: {', '.join(done) or 'none'}. "
        f"First cause: {first.message}",
        first.hint or "correct it and run dynctl up again: steps that are done are not repeated",
        code=first.exit_code if first.exit_code in _TELLING else ExitCode.PARTIAL,
    )
