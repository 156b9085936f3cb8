"""One supervised unit: carries out what `lifecycle` decides, and tells it what happened.

At most one chore runs at a time (start, probe, watch, wait, drain, end); a new action replaces it. A chore returns the
event it ends with. Not here: which units there are (`supervisor`), checks before a start (`starting`).
IO: processes, sockets.
"""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from dynctl.agents import ask, leases
from dynctl.agents.canary import until_hung, until_silent
from dynctl.agents.causes import Cause, classify
from dynctl.agents.host import processes
from dynctl.agents.host.logs import LogFile
from dynctl.agents.host.processes import Watched
from dynctl.agents.lifecycle import Action, Event, Life, step
from dynctl.agents.programs import AnyProgram, EngineProgram, MemberProgram
from dynctl.agents.root import Facts, Run, UnitRecord
from dynctl.agents.starting import RefusedError, Surroundings, own_pids, start
from dynctl.core.deployment import EngineState
from dynctl.core.text import clean
from dynctl.core.units import format_seconds

_log = logging.getLogger("dynctl.agent")

Outcome = tuple[Event, Cause | None] | None
Chore = Callable[[], Coroutine[None, None, Outcome]]

_NUM_CAUSE_LINES = 200
_FIRST_PROBE_S = 0.05
_LAST_PROBE_S = 1.0
_NUM_MISSES = 3
"""Looks an adopted server may miss before it counts as gone."""
_ENDS = frozenset((Action.DRAIN, Action.TERMINATE, Action.KILL))


class Unit:
    """One engine, router or relay."""

    def __init__(self, program: AnyProgram, host: Surroundings, unit_id: str = "") -> None:
        self.id = unit_id or program.id
        """The program's, unless another process of it is the unit of that name (`handover`)."""
        self.program = program
        self.run: Run | None = None
        self.life = Life()
        self.is_held = False
        """Drained by a person."""
        self.is_leaving = False
        """No longer in the slice: forgotten once it is stopped."""
        self.seen = ""
        """What it was last found to lack while it starts."""
        self.is_waiting = False
        """It would start now, were the others of its gang there."""
        self.last_incarnation = ""
        self.predecessor: str | None = None
        """Socket at which the process it is to follow offers its port."""
        self.log = LogFile(host.root.log_path(program.id), host.settings.log)
        self._host = host
        self._next: AnyProgram | None = None
        self._watched: Watched | None = None
        self._burial: Chore | None = None
        """What is done since its leader died, and goes on whatever is asked meanwhile: nothing else tells of that again."""
        self._chore: asyncio.Task[None] | None = None
        self._is_now = False

    def __repr__(self) -> str:
        pid = self.run.identity.pid if self.run and self.run.identity else None
        return f"<Unit {self.id} {self.life.state} pid={pid}>"

    @property
    def is_aside(self) -> bool:
        """Whether it takes over from, or has handed over to, the unit of its program's name."""
        return self.id != self.program.id

    @property
    def wanted(self) -> AnyProgram:
        """What it runs or will run next."""
        return self._next or self.program

    @property
    def wanted_digest(self) -> str:
        """The specification of that."""
        return self.wanted.digest

    def start(self) -> None:
        """Let it run, also after it failed."""
        self._handle(Event.START_REQUESTED)

    def stop(self, *, now: bool = False) -> None:
        """Let it end, after what it is doing unless `now`."""
        self._is_now = self._is_now or now
        self._handle(Event.STOP_NOW_REQUESTED if now else Event.STOP_REQUESTED)

    def restart(self) -> None:
        """End it as in `stop`, then start it again."""
        self.is_held = False
        self._is_now = False
        self._handle(Event.RESTART_REQUESTED)

    def change(self, program: AnyProgram) -> None:
        """Run something else under the same id; what is drained runs it once it is brought back."""
        self._next = program
        if self.is_held:
            self._host.changed()
        else:
            self.restart()

    def take_deadline(self, program: AnyProgram) -> None:
        """Go on with a program of the same specification that may give a start another time."""
        if program.start_deadline_s == self.wanted.start_deadline_s:
            return
        if self._next is not None:
            self._next = program
            return
        self.program = program
        if self.life.state is EngineState.STARTING and self._is_probed():
            self._do(Action.PROBE)

    def _is_probed(self) -> bool:
        """Whether something runs that is neither dead nor being ended for a passed deadline."""
        run = self.run
        lives = run is not None and (run.identity is None or self._watched is not None)
        return lives and self.life.overdue is None

    def hold(self) -> None:
        """Drain it and keep it down until a restart is asked for."""
        self.is_held = True
        self.stop()

    def remember(self, record: UnitRecord) -> None:
        """Be what an earlier agent had noted, without its process."""
        self.is_held = record.is_held
        self.log.start_offset = record.log_offset
        self.last_incarnation = record.last_incarnation
        self.life = Life(is_wanted=not record.is_held, num_restarts=record.num_restarts)

    def adopt(self, run: Run, state: EngineState) -> None:
        """Take over the process an earlier agent had started, where it was."""
        self.run = run
        self.last_incarnation = run.incarnation
        self._host.leases = leases.grant(self._host.leases, self.program.id, self.program.gpu_uuids)
        self._watch_process()
        events = {
            EngineState.READY: Event.ADOPTED_READY,
            EngineState.DRAINING: Event.ADOPTED_DRAINING,
        }
        self._handle(events.get(state, Event.ADOPTED))

    def look_at_gang(self) -> None:
        """End it when the others of its gang are found to have gone on without it, or ended."""
        run, state = self.run, self.life.state
        if run is None or self.life.overdue is not None:
            return
        events = {EngineState.STARTING: Event.DEADLINE_PASSED, EngineState.READY: Event.HUNG}
        if state in events and (cause := self.program.apart(run.incarnation)) is not None:
            self._handle(events[state], cause)

    async def close(self) -> None:
        """Let go of it; whatever runs goes on running."""
        chore, self._chore = self._chore, None
        if chore is not None:
            chore.cancel()
            await asyncio.wait([chore])
        if self._watched is not None:
            self._watched.close()

    # From decisions to chores

    def _handle(self, event: Event, cause: Cause | None = None) -> None:
        policy = self._host.settings.restart or self.program.policy
        draw = random.uniform(-1, 1)  # noqa: S311 - spreads restarts, no secret
        before = self.life
        self.life, action = step(
            before, event, time.monotonic(), cause=cause, draw=draw, policy=policy
        )
        if before.state is not self.life.state:
            is_news = cause is not None and before.state is not EngineState.DRAINING
            why = f": {self.life.last_error}" if is_news else ""
            _log.info("%s %s -> %s%s", self.id, before.state, self.life.state, why)
        if action is not None:
            self._do(action)
        self._host.changed()

    def _do(self, action: Action) -> None:
        chores = {
            Action.SPAWN: self._start,
            Action.PROBE: self._probe,
            Action.WATCH: self._watch,
            Action.SLEEP: self._sleep,
            Action.DRAIN: self._drain,
            Action.TERMINATE: self._terminate,
            Action.KILL: self._kill,
        }
        if self._burial is None or action not in _ENDS:
            self._replace_chore(chores.get(action), action)
        elif self._chore is None:
            self._replace_chore(self._burial, None)

    def _replace_chore(self, work: Chore | None, action: Action | None) -> None:
        if self._chore is not None:
            self._chore.cancel()
        self._chore = None
        if work is not None:
            name = f"{action or 'bury'}:{self.id}"
            self._chore = self._host.group.create_task(self._guarded(work, action), name=name)

    async def _guarded(self, work: Chore, action: Action | None) -> None:
        """Run a chore and hand on its outcome; a fault of ours ends in a state, not in a dead agent."""
        try:
            outcome = await work()
        except Exception as error:  # noqa: BLE001 - one unit's fault must not end the others' supervisor
            _log.exception("%s: %s failed", self.id, action)
            cause = Cause("internal", f"internal error: {clean(repr(error))}", is_final=True)
            outcome = (Event.DRAIN_ENDED if action is Action.DRAIN else Event.STUCK, cause)
            if action is Action.WATCH:
                outcome = None
        if self._chore is asyncio.current_task():
            self._chore = None
            if outcome is not None:
                self._handle(*outcome)

    # Chores

    async def _start(self) -> Outcome:
        if self._next is not None:
            self.program, self._next = self._next, None
        self._is_now = False
        try:
            run = await start(self.program, self._host, self.log, self._turn, self.predecessor)
        except RefusedError as error:
            self._release()
            return Event.REFUSED, error.cause
        self.run = run
        self.last_incarnation = run.incarnation
        self._watch_process()
        self._host.changed()
        return await self._probe()

    async def _turn(self) -> str:
        """Wait until the others of its gang are there, telling them that it is."""
        if not self.program.peers:
            return ""
        self.is_waiting = True
        self._host.changed()
        try:
            return await self.program.turn(self.last_incarnation, self._note_waiting)
        finally:
            self.is_waiting = False

    async def _probe(self) -> Outcome:
        """Ask until it is ready or the deadline passes; the time it waits for others does not count."""
        program, run = self.program, self.run
        assert run is not None
        limit_s = max(1.0, program.deadline_s - max(0.0, time.time() - run.started_unix_s))
        try:
            while (facts := await self._ask_until_ready(run, limit_s)) is None:
                if not await program.is_waiting(run):
                    return Event.DEADLINE_PASSED, self._overdue()
                limit_s = program.deadline_s
        except ask.UnfitError as error:
            hint = f" ({error.hint})" if error.hint else ""
            text = error.message + hint
            return Event.DEADLINE_PASSED, Cause("config", text, is_final=True)
        self.run, self.seen = replace(run, facts=facts), ""
        return Event.BECAME_READY, None

    async def _ask_until_ready(self, run: Run, limit_s: float) -> Facts | None:
        wait_s = _FIRST_PROBE_S
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    facts = await self.program.check(
                        run, partial(own_pids, run.identity), self._note_seen
                    )
                    if facts is not None:
                        return facts
                    await asyncio.sleep(wait_s)
                    wait_s = min(_LAST_PROBE_S, wait_s * 1.3)
        except TimeoutError:
            return None

    def _note_waiting(self, text: str) -> None:
        self.seen = text

    def _note_seen(self, text: str) -> None:
        run = self.run
        if run is not None and run.identity is None:
            self.seen = f"{run.at.url}: {text}"
            return
        last = self.log.last_lines(1, this_start=True)
        self.seen = text + (f"; its last line: {clean(last[0], 200)}" if last else "")

    def _overdue(self) -> Cause:
        what = "no token" if self.run is not None and self.run.identity is None else "not ready"
        seen = f"; last seen: {self.seen}" if self.seen else ""
        text = f"{what} within {format_seconds(self.program.deadline_s)}{seen}"
        return Cause("deadline", text)

    async def _watch(self) -> Outcome:
        """A process is watched by its pidfd, an engine for progress, others for answers; an adopted server is asked, too."""
        run = self.run
        assert run is not None
        if run.identity is not None:
            settings = self._host.settings.canary
            if isinstance(self.program, MemberProgram):
                # Its process is watched, and so is its gang: there is nothing to ask it.
                await asyncio.Event().wait()
                return None
            if isinstance(self.program, EngineProgram):
                return Event.HUNG, await until_hung(self.program, run, settings)
            return Event.HUNG, await until_silent(run, settings)
        misses = 0
        while misses < _NUM_MISSES:
            await asyncio.sleep(self._host.settings.watch_s)
            misses = 0 if await ask.answers(run.at) else misses + 1
        return self._parted(Cause("exit", f"{run.at.url} no longer answers"))

    async def _sleep(self) -> Outcome:
        await asyncio.sleep(self.life.delay_s)
        return Event.BACKOFF_PASSED, None

    async def _drain(self) -> Outcome:
        """Wait until nothing runs there; it has left the relay's table already."""
        settings, run = self._host.settings, self.run
        assert run is not None
        if run.identity is None:
            return Event.DRAIN_ENDED, None
        try:
            async with asyncio.timeout(settings.drain_limit_s):
                await asyncio.sleep(settings.drain_grace_s)
                while not await self.program.is_idle(run):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            _log.warning("%s still had requests when its drain time was over", self.id)
        return Event.DRAIN_ENDED, None

    async def _terminate(self) -> Outcome:
        """SIGTERM to the leader, which ends its own children in order; what is left gets SIGKILL."""
        run = self.run
        if run is None:
            self._release()
            return Event.EXITED, Cause("exit", "stopped before it had started")
        if run.identity is None:
            return self._parted(Cause("exit", "left alone"))
        limit_s = self._host.settings.now_limit_s if self._is_now else self.program.stop_limit_s
        number = self.program.now_signal if self._is_now else signal.SIGTERM
        processes.send([run.identity.pid], number)
        await asyncio.sleep(limit_s)
        _log.warning("%s did not end within %g s of SIGTERM", self.id, limit_s)
        return await self._kill()

    async def _kill(self) -> Outcome:
        """SIGKILL to all of it. Its end is noticed by the watch, which replaces this chore."""
        run = self.run
        if run is None or run.identity is None:
            return self._parted(Cause("exit", "left alone"))
        left = await processes.end_group(run.identity, self._host.settings.kill_limit_s)
        if left:
            return self._stuck(left)
        return None

    async def _bury(self, exit_status: int | None) -> Outcome:
        """After the leader's death: end what it left behind, and only then say that it is gone."""
        run = self.run
        assert run is not None
        assert run.identity is not None
        left = await processes.end_group(run.identity, self._host.settings.kill_limit_s)
        if left:
            return self._stuck(left)
        lines = self.log.last_lines(_NUM_CAUSE_LINES, this_start=True)
        was_ready = self.life.ready_since_s is not None
        return self._parted(classify(exit_status, lines, was_ready=was_ready))

    # Parts of chores

    def _watch_process(self) -> None:
        run = self.run
        if run is None or run.identity is None:
            return
        watched = Watched(run.identity)
        self._watched = watched

        def gone(future: asyncio.Future[int | None]) -> None:
            if self._watched is watched and not future.cancelled():
                self._watched = None
                self._burial = partial(self._bury, future.result())
                self._replace_chore(self._burial, None)

        watched.gone.add_done_callback(gone)

    def _parted(self, cause: Cause) -> Outcome:
        self._release()
        return Event.EXITED, cause

    def _release(self) -> None:
        """Give back what one start held."""
        self._burial = None
        self._host.leases = leases.release(self._host.leases, self.program.id)
        self.seen = ""
        if self.run is not None:
            self._host.root.drop_directory(self.run.incarnation)
            self.run = None

    def _stuck(self, left: list[int]) -> Outcome:
        pids = ", ".join(map(str, left))
        text = f"process {pids} does not end, not even by SIGKILL (waiting for a device or disk)"
        return Event.STUCK, Cause("stuck", text, is_final=True)
