"""Which hosts can measure NIXL: those whose engine environment has it, started as an engine would be. IO: hosts."""

from collections.abc import Sequence

from dynctl.agents.engines.vllm import UCX_TCP_PORTS, net_devices
from dynctl.core.hardware import GpuState, Host
from dynctl.core.inventory import EngineSpec, HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.errors import CommandError, DynctlError
from dynctl.linktest.answers import LookSaid, parse
from dynctl.linktest.onhost import program
from dynctl.linktest.pair import Seat
from dynctl.linktest.view import Unmeasured
from dynctl.planner.placement import Group, near_nics
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote, expand

_LOOK_TIMEOUT_S = 30.0
_PASSED_ON = ("UCX_", "NIXL_", "CUDA_", "LD_LIBRARY_PATH")
"""Of the engine's own variables, those that change how it transfers; the others may be secrets."""


async def find_nixl(
    inventory: Inventory, hosts: Sequence[Host], fleet: Fleet
) -> tuple[dict[str, Seat], list[Unmeasured]]:
    """Look into the engine environments of all hosts; return who can measure NIXL, and why others cannot."""
    engine = next((d.engine for d in inventory.deployments if d.engine.python), None)
    if engine is None or engine.python is None:
        reason = "no deployment names an engine's Python (deployments[].engine.python)"
        return {}, [Unmeasured("", "nixl", reason)]
    wanted = engine.python

    async def look(_: HostEntry, remote: Remote) -> LookSaid:
        return await _look(remote, expand(remote.home, wanted))

    by_name = {host.name: host for host in hosts}
    seats: dict[str, Seat] = {}
    unmeasured = []
    for name, said in (await fleet.map(look, list(by_name))).items():
        if isinstance(said, DynctlError):
            unmeasured.append(Unmeasured(name, "nixl", said.message))
        elif said.nixl is None:
            unmeasured.append(Unmeasured(name, "nixl", f"nixl is missing in {wanted}"))
        else:
            seat = _seat(by_name[name], fleet.remote(name), engine, has_cuda=said.num_gpus > 0)
            seats[name] = seat
            if not seat.wish["has_gpu"]:
                unmeasured.append(Unmeasured(name, "nixl-vram", _why_no_gpu(seat.host, said)))
    if len(seats) == 1:
        unmeasured.append(Unmeasured("", "nixl", f"only {next(iter(seats))} has nixl"))
    return seats, unmeasured


async def _look(remote: Remote, python: str) -> LookSaid:
    done = await remote.run(program("nixl_look", python, {}, _LOOK_TIMEOUT_S))
    if done.exit_status == 127:
        raise CommandError(f"there is no {python}")
    if not done.is_ok:
        said = clean(done.stderr.decode(errors="replace")[-300:])
        raise CommandError(f"{python} ended with status {done.exit_status}: {said}")
    return parse(remote.name, done.stdout.strip(), LookSaid)


def _seat(host: Host, remote: Remote, engine: EngineSpec, *, has_cuda: bool) -> Seat:
    at = _free_gpu(host) if has_cuda else None
    gpu = None if at is None else host.gpus[at]
    env = {
        "UCX_LOG_LEVEL": "info",
        "UCX_PROTO_INFO": "y",
        "UCX_TCP_PORT_RANGE": UCX_TCP_PORTS,
        "CUDA_VISIBLE_DEVICES": "" if gpu is None else gpu.uuid,
    }
    nics = () if at is None else near_nics(Group(host, (at,)))
    if nics:
        # As engines get it: the devices next to the GPU that are up.
        env["UCX_NET_DEVICES"] = net_devices(nics)
    env |= {name: value for name, value in engine.env if name.startswith(_PASSED_ON)}
    python = expand(remote.home, engine.python or "")
    return Seat(host, remote, python, tuple(sorted(env.items())), {"has_gpu": gpu is not None})


def _free_gpu(host: Host) -> int | None:
    """Where a GPU is that nobody uses: the test takes some of its memory and of its bandwidth."""
    free = (
        at
        for at, gpu in enumerate(host.gpus)
        if not gpu.is_simulated and gpu.state is GpuState.FREE and not gpu.processes
    )
    return next(free, None)


def _why_no_gpu(host: Host, said: LookSaid) -> str:
    if not any(not gpu.is_simulated for gpu in host.gpus):
        return "no GPU"
    return "no GPU is free" if said.num_gpus else "the CUDA driver shows this user no GPU"
