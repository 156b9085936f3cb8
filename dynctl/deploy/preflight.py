"""Everything that would stop `up`, looked for on all hosts at once before anything is changed. IO: ssh."""

from collections.abc import Mapping
from dataclasses import dataclass

from dynctl.agents.protocol import RELAY_ID, HostSlice
from dynctl.core.hardware import GpuState, Topology
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.core.units import MIB
from dynctl.deploy.diff import new_units
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.steps import HostGoal, HostState
from dynctl.errors import DynctlError
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote
from dynctl.router.config import split_listen

ROOM_BYTES = 256 * MIB
"""A bundle (about 45 MB unpacked), its archive, logs and state."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that would stop `up`."""

    host_name: str
    text: str
    hint: str


async def preflight(
    fleet: Fleet,
    goals: Mapping[str, HostGoal],
    states: Mapping[str, HostState],
    seats: Mapping[str, Seat],
    topology: Topology,
) -> list[Problem]:
    """Check ports, disk, paths and GPUs of what would be started; running units are left out."""

    async def check(entry: HostEntry, remote: Remote) -> list[Problem]:
        goal, state, seat = goals[entry.name], states[entry.name], seats[entry.name]
        fresh = new_units(goal.slice, state)
        wish = {
            "root": seat.place.root,
            "needed_bytes": 0 if goal.bundle in state.bundles else ROOM_BYTES,
            "ports": _ports(goal.slice, fresh),
            "paths": _paths(goal.slice, fresh, seat.place.root),
        }
        found = await call(remote, seat.python, "preflight", wish, PROGRAM_TIMEOUT_S)
        return [Problem(entry.name, clean(p["text"], 300), clean(p["hint"], 300)) for p in found]

    problems: list[Problem] = []
    for name, result in (await fleet.map(check, list(goals))).items():
        if isinstance(result, DynctlError):
            problems.append(Problem(name, result.message, result.hint or ""))
        else:
            problems += result
    for name, goal in goals.items():
        problems += _gpu_problems(goal.slice, new_units(goal.slice, states[name]), topology)
    return problems


def _ports(slice_: HostSlice, fresh: set[str]) -> list[tuple[str, int]]:
    ports: list[tuple[str, int]] = []
    if slice_.relay is not None and RELAY_ID in fresh:
        ports.append((slice_.relay.listen_host, slice_.relay.port))
    ports += [split_listen(unit.listen) for unit in slice_.routers if unit.id in fresh]
    ports += [
        (engine.data_address, port)
        for engine in slice_.engines
        if engine.id in fresh
        for port in engine.side_channel_ports
    ]
    ports += [
        (engine.gang.master_address, engine.gang.master_port)
        for engine in slice_.engines
        if engine.id in fresh and engine.gang is not None and not engine.gang.rank
    ]
    return [(host, port) for host, port in ports if port != 0]


def _paths(slice_: HostSlice, fresh: set[str], root: str) -> list[tuple[str, str]]:
    paths: set[tuple[str, str]] = set()
    for router in slice_.routers:
        tokenizer = router.config.get("tokenizer")
        # What lies under our own root is put there before the router starts.
        if router.id in fresh and tokenizer and not tokenizer.startswith(f"{root}/"):
            paths.add((f"{tokenizer}/tokenizer.json", "the router's"))
    for engine in slice_.engines:
        if engine.id not in fresh:
            continue
        if engine.python is not None:
            paths.add((engine.python, "the engine's Python"))
        if engine.kind == "vllm":
            paths.add((f"{engine.model}/config.json", "the model's"))
    return sorted(paths)


def _gpu_problems(slice_: HostSlice, fresh: set[str], topology: Topology) -> list[Problem]:
    gpus = {gpu.uuid: gpu for gpu in topology.host(slice_.host_name).gpus}
    problems = []
    for engine in slice_.engines:
        for planned in engine.gpus if engine.id in fresh else ():
            gpu = gpus.get(planned.uuid)
            if gpu is None:
                text = f"{engine.id} is planned on GPU {planned.uuid}, which is not there"
                problems.append(Problem(slice_.host_name, text, "plan again: dynctl plan"))
            elif gpu.state is not GpuState.FREE:
                held = f", held by {gpu.holders}" if gpu.holders else ""
                text = f"GPU {gpu.index} ({gpu.uuid}) is {gpu.state.value}{held}"
                problems.append(
                    Problem(
                        slice_.host_name,
                        text,
                        "end that process, or plan again without this GPU: dynctl plan",
                    )
                )
    return problems
