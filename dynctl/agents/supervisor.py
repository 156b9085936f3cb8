"""All units of one host: brought to what the slice says, remembered, adopted again, ended in order.

Not here: the life of a single unit (`unit`), HTTP (`server`).
IO: files, processes.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import dynctl
from dynctl.agents import handover, leases
from dynctl.agents.host import processes
from dynctl.agents.host.logs import LogFile
from dynctl.agents.links import Links
from dynctl.agents.programs import (
    AnyProgram,
    MemberProgram,
    RelayProgram,
    RouterProgram,
    make_program,
    of_engine,
)
from dynctl.agents.protocol import AgentStatus, HostSlice, RelayEntry
from dynctl.agents.records import record_of, relay_entry, unit_status
from dynctl.agents.root import Memory, Root, UnitRecord
from dynctl.agents.starting import Settings, Surroundings
from dynctl.agents.unit import Unit
from dynctl.core.deployment import EngineState
from dynctl.core.text import clean, is_name
from dynctl.errors import DynctlError
from dynctl.files import reason

_log = logging.getLogger("dynctl.agent")

_TICK_S = 0.5
_UNITS, _SLICE = "units.json", "slice.json"
_SAVE_PAUSE_S = 0.05


class StaleError(DynctlError):
    """Raised when a newer operator or generation has been here already."""


class Supervisor:
    """The units of one host."""

    def __init__(self, root: Root, mode: str = "none", settings: Settings | None = None) -> None:
        self.root = root
        self.units: dict[str, Unit] = {}
        self.finished = asyncio.Event()
        """Set when a shutdown has ended every unit."""
        self.slice: HostSlice | None = None
        self._mode = mode
        self._settings = settings or Settings()
        self._host: Surroundings
        self._own_log = LogFile(root.log_path("agent"), self._settings.log)
        self._boot = processes.boot_identity()
        self._started_unix_s = time.time()
        self._degraded: dict[str, str] = {}
        self._unwritten: set[str] = set()
        """Files that could not be written; tried again until they are."""
        self._applying = asyncio.Lock()
        self._is_ending = False
        self._is_closing = False
        self._dirty = asyncio.Event()
        self._next_change = asyncio.Event()

    async def run(
        self, body: Callable[["Supervisor"], Awaitable[None]], *, reaps: bool = False
    ) -> None:
        """Take up what an earlier agent left, supervise while `body` runs, then let go of all processes.

        `reaps`: every child of this process is ours, so dead orphans are collected too.
        """
        async with asyncio.TaskGroup() as group:
            self._host = Surroundings(
                root=self.root,
                mode=self._mode,
                settings=self._settings,
                group=group,
                changed=self._changed,
                runs=lambda: [unit.run for unit in self.units.values() if unit.run],
                links=Links(self.root.path / "tls", group, self._look_at_gangs),
                bundle=self._own_bundle(),
            )
            await self._recover()
            saver = group.create_task(self._save_often(), name="save")
            ticker = group.create_task(self._tick(reaps=reaps), name="tick")
            try:
                await body(self)
            finally:
                ticker.cancel()
                for unit in self.units.values():
                    await unit.close()
                await self._host.links.close()
                # Not cancelled: a thread would go on writing beside the last save.
                self._is_closing = True
                self._dirty.set()
                await asyncio.wait([saver])

    # What others ask

    @property
    def host(self) -> Surroundings:
        """What the units share."""
        return self._host

    @property
    def status(self) -> AgentStatus:
        """How everything stands."""
        wanted = self.slice
        return AgentStatus(
            version=dynctl.__version__,
            cluster=wanted.cluster if wanted else "",
            host_name=wanted.host_name if wanted else "",
            generation=wanted.generation if wanted else -1,
            fence=wanted.fence if wanted else 0,
            plan_digest=wanted.plan_digest if wanted else "",
            bundle=self._host.bundle or (wanted.bundle if wanted else ""),
            boot_id=self._boot,
            pid=os.getpid(),
            started_unix_s=self._started_unix_s,
            units=tuple(unit_status(unit) for unit in self.units.values() if not unit.is_aside),
            asides=tuple(unit_status(unit) for unit in self.units.values() if unit.is_aside),
            degraded=tuple(f"{what}: {why}" for what, why in sorted(self._degraded.items())),
        )

    @property
    def relay_table(self) -> tuple[RelayEntry, ...]:
        """The engines as the relay needs them."""
        entries = (relay_entry(unit) for unit in self.units.values())
        return tuple(entry for entry in entries if entry is not None)

    async def wait_change(self, timeout_s: float) -> None:
        """Return at the next change, or when the time is over."""
        event = self._next_change
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return

    # What others wish

    def restart(self, unit_id: str) -> None:
        """Start a unit anew: beside its present process where it can hand over, else after that has ended.

        Raises:
            KeyError: when there is none of that id.
        """
        unit = self.units[unit_id]
        unit.is_held = False
        # A successor on its way is younger than whatever this is about.
        if handover.next_id(unit_id) not in self.units:
            handover.replace_process(self.units, unit, unit.wanted, self._host)

    def hold(self, unit_id: str) -> None:
        """Drain a unit and keep it down until a restart is asked for.

        Raises:
            KeyError: when there is none of that id.
        """
        if (successor := self.units.get(handover.next_id(unit_id))) is not None:
            handover.dismiss(self.units, successor)
        self.units[unit_id].hold()

    async def apply(self, wanted: HostSlice) -> None:
        """Bring the units to what a slice says; returns when that is under way.

        Raises:
            StaleError: when a newer slice or operator has been here, or a shutdown is under way.
            DynctlError: when the slice contradicts itself; nothing is changed.
        """
        async with self._applying:
            self._check_order(wanted)
            programs = self._programs(wanted)
            await self._keep(_SLICE, lambda: self.root.save_slice(wanted))
            if self._is_ending:
                raise StaleError("the agent is shutting down")
            self.slice = wanted
            self._reconcile(programs)

    async def shutdown(self, *, now: bool) -> list[Unit]:
        """End every unit: routers first, then engines, then the relay they were reached by.

        Returns the units that could not be ended.
        """
        self._is_ending = True
        # First of all, so that nothing comes back after a crash or a reboot in between.
        await self._keep(_SLICE, self.root.forget_slice)
        phases: tuple[tuple[str, ...], ...] = (("router",), ("engine", "member"), ("relay",))
        if now:
            phases = (("router", "engine", "member", "relay"),)
        for kinds in phases:
            ending = [unit for unit in self.units.values() if unit.program.kind in kinds]
            for unit in ending:
                unit.is_leaving = True
                unit.stop(now=now)
            while any(_is_ending(unit) for unit in ending if unit in self.units.values()):
                await self.wait_change(1.0)
        left = list(self.units.values())
        if not left:
            self.slice = None
            self.finished.set()
        return left

    # Slices

    def _check_order(self, wanted: HostSlice) -> None:
        have = self.slice
        if self._is_ending:
            raise StaleError("the agent is shutting down", "wait for it, then run `dynctl up`")
        if have is None:
            return
        if have.cluster != wanted.cluster or have.host_name != wanted.host_name:
            raise StaleError(
                f"this agent serves {have.host_name} of cluster {have.cluster}, "
                f"not {clean(wanted.host_name)} of {clean(wanted.cluster)}",
                "run `dynctl down` with the inventory it was started with",
            )
        if wanted.fence < have.fence:
            raise StaleError(
                f"operator number {wanted.fence} was overtaken by {have.fence}",
                "someone else ran dynctl since; look at `dynctl status` and start again",
            )
        if wanted.generation < have.generation:
            raise StaleError(
                f"generation {wanted.generation} is older than {have.generation}",
                "someone else ran dynctl since; look at `dynctl status` and start again",
            )

    def _programs(self, wanted: HostSlice) -> list[AnyProgram]:
        """Make the programs of a slice, checking it as a whole."""
        links = self._host.links
        found: list[AnyProgram] = [of_engine(wish, links) for wish in wanted.engines]
        found += [RouterProgram(wish) for wish in wanted.routers]
        for program in found:
            if not is_name(program.id) or program.id == RelayProgram.id:
                raise DynctlError(f"{clean(program.id)!r} cannot name an engine or router")
        if wanted.relay is not None:
            # First: engines are of no use until they can be reached.
            found.insert(0, RelayProgram(wanted.relay, str(self.root.socket)))
        _check_distinct((p.id for p in found), "unit")
        _check_distinct((port for p in found for port in p.listens_on), "port")
        taken: dict[str, str] = {}
        for program in found:
            taken = leases.grant(taken, program.id, program.gpu_uuids)
        return found

    def _reconcile(self, programs: list[AnyProgram]) -> None:
        wanted = {program.id: program for program in programs}
        for unit in list(self.units.values()):
            program = wanted.get(unit.program.id)
            if unit.id == handover.next_id(unit.program.id):
                if program is None or program.digest != unit.wanted_digest:
                    handover.dismiss(self.units, unit)
            elif unit.id not in wanted and not unit.is_leaving:
                unit.is_leaving = True
                unit.stop()
        for unit_id, program in wanted.items():
            if unit_id not in self.units:
                self.units[unit_id] = Unit(program, self._host)
            unit = self.units[unit_id]
            unit.is_leaving = False
            bundle = self.slice.bundle if self.slice else ""
            if unit.wanted_digest != program.digest or handover.is_outdated(
                unit, bundle, self._host
            ):
                handover.replace_process(self.units, unit, program, self._host)
                continue
            # Nothing happens to what runs; what had failed gets another chance.
            unit.take_deadline(program)
            if not unit.is_held:
                unit.start()
        self._changed()

    # Recovery

    async def _recover(self) -> None:
        """Adopt what still runs, end what nobody knows, then start what is missing.

        With a slice that cannot be read or carried out, what runs goes on running until somebody sends another.
        """
        memory = await self._load_memory()
        for record in memory.units:
            await self._take_up(record, is_same_boot=memory.boot == self._boot)
        known = {unit.run.incarnation for unit in self.units.values() if unit.run}
        await processes.end_strangers(str(self.root.path), known, self._settings.kill_limit_s)
        _clear(self.root.run, known)
        try:
            self.slice = self.root.load_slice()
        except DynctlError as error:
            self._degraded[_SLICE] = error.message
            return
        try:
            programs = self._programs(self.slice) if self.slice else []
        except DynctlError as error:
            self._degraded[_SLICE] = f"cannot be carried out: {error.message}"
            return
        self._reconcile(programs)

    async def _take_up(self, record: UnitRecord, *, is_same_boot: bool) -> None:
        """Adopt one unit; another boot's PIDs mean nothing and are left alone."""
        try:
            program = make_program(record, str(self.root.socket), self._host.links)
        except DynctlError as error:
            self._degraded[record.id] = f"cannot be adopted: {error.message}"
            return
        if program is None:
            return
        unit = Unit(program, self._host, record.id)
        unit.remember(record)
        run = record.run if is_same_boot else None
        if run is not None and (run.identity is None or processes.is_same(run.identity)):
            self.units[record.id] = unit
            unit.adopt(run, record.state)
            _log.info("%s adopted, pid %s", record.id, run.identity and run.identity.pid)
            return
        if run is not None and run.identity is not None:
            await processes.end_group(run.identity, self._settings.kill_limit_s)
        if record.is_held or isinstance(program, MemberProgram):
            # It must know which incarnation it was part of last.
            self.units[record.id] = unit

    async def _load_memory(self) -> Memory:
        try:
            return self.root.load_memory()
        except DynctlError as error:
            self._degraded[_UNITS] = error.message
            return Memory()

    def _own_bundle(self) -> str:
        home = Path(dynctl.__file__).parent.parent
        return home.name if home.parent == self.root.path / "bundles" else ""

    # Memory and log files

    def _changed(self) -> None:
        handover.settle(self.units)
        for unit_id, unit in list(self.units.items()):
            if unit.is_leaving and unit.life.state is EngineState.STOPPED:
                del self.units[unit_id]
        self._host.links.follow([peer for u in self.units.values() for peer in u.program.peers])
        self._dirty.set()
        event, self._next_change = self._next_change, asyncio.Event()
        event.set()

    def _look_at_gangs(self) -> None:
        for unit in list(self.units.values()):
            unit.look_at_gang()

    async def _save_often(self) -> None:
        is_last = False
        while not is_last:
            await self._dirty.wait()
            self._dirty.clear()
            is_last = self._is_closing
            await self._save()
            await asyncio.sleep(0 if is_last else _SAVE_PAUSE_S)

    async def _save(self) -> None:
        memory = Memory(self._boot, tuple(record_of(unit) for unit in self.units.values()))
        await self._keep(_UNITS, lambda: self.root.save_memory(memory))

    async def _keep(self, what: str, write: Callable[[], None]) -> None:
        """Write a file in a thread; a full disk makes the agent degraded, not dead."""
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            if what not in self._unwritten:
                _log.warning("%s: %s", what, error)
            self._degraded[what] = f"cannot be written: {reason(error)}"
            self._unwritten.add(what)
        else:
            self._degraded.pop(what, None)
            self._unwritten.discard(what)

    async def _write_again(self) -> None:
        """A disk that was full may have room: what is remembered must not stay older than what runs."""
        if _UNITS in self._unwritten:
            self._dirty.set()
        if _SLICE in self._unwritten:
            async with self._applying:
                wanted = self.slice
                if wanted is not None and not self._is_ending:
                    await self._keep(_SLICE, lambda: self.root.save_slice(wanted))

    async def _tick(self, *, reaps: bool) -> None:
        """Keep log files bounded, write what could not be written, and collect dead orphans."""
        while True:
            await self._write_again()
            for log in [self._own_log, *(unit.log for unit in self.units.values())]:
                if log.is_too_large:
                    await self._keep("logs", log.rotate)
            if reaps:
                runs = [unit.run for unit in self.units.values() if unit.run]
                processes.reap_orphans({run.identity.pid for run in runs if run.identity})
            await asyncio.sleep(_TICK_S)


def _is_ending(unit: Unit) -> bool:
    """Whether it is worth waiting for; what SIGKILL cannot end is not."""
    return unit.life.state not in (EngineState.STOPPED, EngineState.FAILED)


def _check_distinct(values: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise DynctlError(f"the slice names {what} {value} twice", "check the plan")
        seen.add(value)


def _clear(run: Path, known: set[str]) -> None:
    """Remove socket directories of starts that are no more."""
    for path in run.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in known:
            shutil.rmtree(path, ignore_errors=True)
