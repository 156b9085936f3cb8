"""From goals and what was found to steps; a cluster that is as wished gives none. Pure."""

from collections.abc import Mapping

from dynctl.agents.protocol import RELAY_ID, HostSlice, spec_digest
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.deploy.steps import HostGoal, HostState, Step, StepKind


def diff(goals: Mapping[str, HostGoal], states: Mapping[str, HostState]) -> tuple[Step, ...]:
    """List the steps that lead from the states to the goals, per host in the order they are taken."""
    steps: list[Step] = []
    for name in sorted(goals):
        steps += _host_steps(goals[name], states[name])
    for name in sorted(set(states) - set(goals)):
        if states[name].status is not None or states[name].bundles:
            steps.append(
                Step(name, StepKind.RETIRE, "not in the plan: stop and remove", is_disruptive=True)
            )
    return tuple(steps)


def _host_steps(goal: HostGoal, state: HostState) -> list[Step]:
    name = goal.slice.host_name
    steps: list[Step] = []
    if goal.bundle not in state.bundles:
        steps.append(Step(name, StepKind.BUNDLE, f"install {goal.bundle}"))
    stale = [path for path, digest in goal.files if dict(state.files).get(path) != digest]
    if stale:
        steps.append(Step(name, StepKind.FILES, ", ".join(stale)))
    launch = dict(state.launch)
    if state.status is None:
        steps.append(Step(name, StepKind.AGENT, "start"))
    elif launch.get("bundle_path") != goal.bundle_path or launch.get("scope") != goal.scope:
        steps.append(
            Step(name, StepKind.AGENT, f"restart with {goal.bundle}; engines keep running")
        )
    changes = unit_changes(goal.slice, state)
    if changes or steps or _is_behind(goal.slice, state):
        detail = ", ".join(text for text, _ in changes) or "no unit changes"
        if state.status is None and launch:
            detail += "; what still runs of it is taken over"
        steps.append(
            Step(
                name,
                StepKind.SLICE,
                detail,
                is_disruptive=any(disruptive for _, disruptive in changes),
            )
        )
    return steps


def unit_changes(wish: HostSlice, state: HostState) -> list[tuple[str, bool]]:
    """Say for each unit what changes and whether that stops something: `+` new, `~` restart, `-` removed.

    Router and relay follow the agent's code, handing their port over to a successor, which stops nothing. Engines keep
    the code they were started with: their cache is worth more.
    """
    return [(text, disruptive) for _, text, disruptive in _changes(wish, state)]


def undone(wish: HostSlice, state: HostState) -> list[str]:
    """Say what is not as wished though nobody wants it so: what is drained changes once it has come to rest."""
    held = {unit.id for unit in _running(state).values() if unit.is_held}
    return [text for unit_id, text, _ in _changes(wish, state) if unit_id not in held]


def _changes(wish: HostSlice, state: HostState) -> list[tuple[str, str, bool]]:
    """Unit, change, and whether that stops something."""
    wanted, running = _wanted(wish), _running(state)
    found = [(unit_id, f"+{unit_id}", False) for unit_id in wanted if unit_id not in running]
    for unit_id, digest in wanted.items():
        change = _change(running[unit_id], digest, wish) if unit_id in running else None
        if change is not None:
            found.append((unit_id, f"~{unit_id} ({change[0]})", change[1]))
    found += [(unit_id, f"-{unit_id}", True) for unit_id in running if unit_id not in wanted]
    return found


def _change(unit: UnitStatus, digest: str, wish: HostSlice) -> tuple[str, bool] | None:
    """What changes of a unit that is there, and whether that stops something."""
    is_changed = unit.spec_digest != digest
    if unit.is_held and is_changed:
        return "changed; stays drained", False
    if not unit.is_held and _is_down(unit):
        return f"was {unit.state.value}", True
    if unit.kind in ("engine", "member"):
        if is_changed:
            return "changed", True
        deadline_s = next(e.start_deadline_s for e in wish.engines if e.id == unit.id)
        is_other = unit.start_deadline_s != deadline_s
        return ("start deadline; stays as it is", False) if is_other else None
    if unit.is_held or not (is_changed or unit.bundle != wish.bundle):
        return None
    stays = any(r.id == unit.id and unit.url.endswith(f"//{r.listen}") for r in wish.routers)
    hands_over = stays or not is_changed
    why = ("changed" if is_changed else "new code") + hands_over * "; hands its port over"
    return why, not hands_over


def new_units(wish: HostSlice, state: HostState) -> set[str]:
    """Ids of what is wished and not there in any state."""
    return set(_wanted(wish)) - set(_running(state))


def _wanted(wish: HostSlice) -> dict[str, str]:
    """Digest of every unit's specification, by id."""
    wanted = {engine.id: spec_digest(engine) for engine in wish.engines}
    wanted |= {router.id: spec_digest(router) for router in wish.routers}
    if wish.relay is not None:
        wanted[RELAY_ID] = spec_digest(wish.relay)
    return wanted


def _running(state: HostState) -> dict[str, UnitStatus]:
    return {unit.id: unit for unit in state.status.units} if state.status else {}


def _is_down(unit: UnitStatus) -> bool:
    return unit.state in {EngineState.FAILED, EngineState.STOPPED}


def _is_behind(wish: HostSlice, state: HostState) -> bool:
    return state.status is not None and state.status.bundle != wish.bundle
