"""Starts one process: every check that must come before it, and its own directory, environment and log mark.

Not here: what follows a start (`unit`).
IO: processes, files, sockets, NVML.
"""

import asyncio
import os
import secrets
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from dynctl.agents import leases
from dynctl.agents.canary import CanarySettings
from dynctl.agents.causes import Cause
from dynctl.agents.host import gpus, interfaces, ports, processes
from dynctl.agents.host.logs import LogFile, LogLimits
from dynctl.agents.host.processes import Identity
from dynctl.agents.launch import NUM_INTERNAL_PORTS, Launch, Places
from dynctl.agents.lifecycle import RestartPolicy
from dynctl.agents.links import Links
from dynctl.agents.programs import AnyProgram
from dynctl.agents.protocol import EngineWish
from dynctl.agents.root import Root, Run
from dynctl.errors import DynctlError

# Nothing else of the agent's environment reaches what it starts: it may hold an operator's secrets.
_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "CUDA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        # systemd-run --user finds its manager by these.
        *("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of supervision; the defaults are the documented ones."""

    restart: RestartPolicy | None = None
    """Instead of the program's own."""
    drain_grace_s: float = 1.0
    """From leaving the table until the first look whether it is idle: routers must have heard."""
    drain_limit_s: float = 120.0
    now_limit_s: float = 2.0
    """From SIGTERM to SIGKILL when there is no time to drain."""
    kill_limit_s: float = 10.0
    lease_wait_s: float = 300.0
    watch_s: float = 2.0
    """Between looks at an adopted server."""
    canary: CanarySettings = field(default_factory=CanarySettings)
    log: LogLimits = field(default_factory=LogLimits)


@dataclass(slots=True)
class Surroundings:
    """What all units of one agent share."""

    root: Root
    mode: str
    """`none`, `user` or `system`: whether each start gets a systemd scope of its own."""
    settings: Settings
    group: asyncio.TaskGroup
    changed: Callable[[], None]
    runs: Callable[[], list[Run]]
    """All that have a process now."""
    links: Links
    """To the hosts of other members of gangs."""
    gpu_reader: gpus.GpuReader = field(default_factory=gpus.GpuReader)
    leases: dict[str, str] = field(default_factory=dict)
    bundle: str = ""
    """Digest of the code everything is started with; empty: not from a bundle."""


class RefusedError(DynctlError):
    """Raised when nothing was started, with the cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


async def start(
    program: AnyProgram,
    host: Surroundings,
    log: LogFile,
    turn: Callable[[], Awaitable[str]],
    predecessor: str | None = None,
) -> Run:
    """Check, lease, wait for its turn, start; returns the run, not yet ready.

    `turn` returns the incarnation it shall be, empty: a new one.

    `predecessor`: the socket at which the process it follows offers the port it still listens on.

    Raises:
        RefusedError: when something stands against it; nothing was started then.
    """
    problems = program.problems()
    if problems:
        raise RefusedError(Cause("config", "; ".join(problems), is_final=True))
    await _take_leases(program, host)
    if predecessor is None:
        _check_ports(program)
    await _check_gpus(program, host)
    incarnation = await turn() or secrets.token_hex(5)
    try:
        host.root.make_directory(incarnation)
    except OSError as error:
        # Not removed: what is there already may be another start's.
        raise RefusedError(Cause("exit", f"cannot start: {error}")) from error
    try:
        return _spawn(program, host, log, incarnation, predecessor)
    except DynctlError as error:
        host.root.drop_directory(incarnation)
        raise RefusedError(Cause("config", error.message, is_final=True)) from error
    except OSError as error:
        host.root.drop_directory(incarnation)
        # A full disk may be cleared, so this is tried again.
        raise RefusedError(Cause("exit", f"cannot start: {error}")) from error


def _spawn(
    program: AnyProgram,
    host: Surroundings,
    log: LogFile,
    incarnation: str,
    predecessor: str | None,
) -> Run:
    root = host.root
    internal_port = _internal_port(program, host)
    places = Places(
        root=str(root.path),
        directory=str(root.run / incarnation),
        python=sys.executable,
        incarnation=incarnation,
        internal_port=internal_port,
        interface=_interface(program),
    )
    launch = program.launch(places, predecessor)
    identity = None
    if launch.argv:
        log.mark_start(f"--- dynctl: {program.id} starts, incarnation {incarnation}")
        env = _environment(launch, os.environ, root)
        scope = f"dynctl-{program.id[:100]}-{incarnation}.scope"
        identity = processes.spawn(launch.argv, env, log.path, incarnation, scope, host.mode)
    return Run(
        incarnation,
        launch.at,
        identity,
        internal_port,
        time.time(),
        bundle=host.bundle,
        argv=launch.argv,
    )


def _interface(program: AnyProgram) -> str:
    """The network interface over which an engine reaches its other members; empty: it has none."""
    wish = program.wish
    if not isinstance(wish, EngineWish) or wish.gang is None:
        return ""
    return interfaces.name_of(wish.data_address)


def _internal_port(program: AnyProgram, host: Surroundings) -> int:
    wish = program.wish
    wished = getattr(wish, "internal_port", None)
    if wished is not None:
        return int(wished)
    if not program.needs_internal_ports:
        return 0
    taken = {
        run.internal_port + number for run in host.runs() for number in range(NUM_INTERNAL_PORTS)
    }
    # The same unit looks in the same place first, so that its ports rarely change.
    return ports.free_run(NUM_INTERNAL_PORTS, taken, zlib.crc32(program.id.encode()))


def _environment(launch: Launch, agent_env: Mapping[str, str], root: Root) -> dict[str, str]:
    """Compose a child's environment: little of ours, then the program's, secrets read now."""
    env = {name: value for name, value in agent_env.items() if name in _INHERITED}
    if launch.has_bundle and "PYTHONPATH" in agent_env:
        env["PYTHONPATH"] = agent_env["PYTHONPATH"]
    env["PYTHONUNBUFFERED"] = "1"
    env[processes.ROOT_TAG] = str(root.path)
    return env | {name: root.resolve(value) for name, value in launch.env}


async def _take_leases(program: AnyProgram, host: Surroundings) -> None:
    """Wait for units that are on their way out; the slice was checked, so nobody else holds them."""
    deadline_s = time.monotonic() + host.settings.lease_wait_s
    while taken := leases.holders(host.leases, program.id, program.gpu_uuids):
        if time.monotonic() > deadline_s:
            uuid, holder = next(iter(taken.items()))
            raise RefusedError(Cause("gpu", f"GPU {uuid} is still leased to {holder}"))
        await asyncio.sleep(0.05)
    host.leases = leases.grant(host.leases, program.id, program.gpu_uuids)


def _check_ports(program: AnyProgram) -> None:
    for port in program.listens_on:
        owners = ports.owners(port)
        if owners:
            text = f"port {port} is held by {', '.join(map(str, owners))}"
            raise RefusedError(Cause("port", text, is_final=True))


async def _check_gpus(program: AnyProgram, host: Surroundings) -> None:
    """Refuse GPUs that are not there, or that processes other than ours hold."""
    if not program.gpu_uuids:
        return
    reading = await host.gpu_reader.read()
    known = {sample.uuid for sample in reading.samples}
    missing = [uuid for uuid in program.gpu_uuids if uuid not in known]
    if program.needs_gpus and missing:
        why = reading.error or (f"lost GPUs: {reading.lost}" if reading.lost else "NVML lists none")
        if known and not reading.lost:
            why = f"this host has {', '.join(sorted(known))}"
        raise RefusedError(
            Cause("gpu", f"GPU {missing[0]} is not on this host ({why})", is_final=True)
        )
    if not reading.holders:
        return
    own: set[int] = set()
    for run in host.runs():
        if run.identity is not None:
            own.update(processes.members(run.identity))
    foreign = gpus.foreign_holders(reading, program.gpu_uuids, own)
    if foreign:
        text = f"GPU {foreign[0].uuid} is in use by {gpus.describe(foreign)}"
        raise RefusedError(Cause("gpu", text, is_final=True))


def own_pids(identity: Identity | None) -> list[int]:
    """The processes of one start; empty for an adopted server."""
    return [] if identity is None else processes.members(identity)
