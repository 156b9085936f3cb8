"""The life of one supervised process as a table: (state, event) → new state and actions.

Not here: processes, sockets, clocks. Times come in as `now_s` (monotonic), chance as `draw`.
Defaults: 1 s doubling to 60 s ±25 %; 5 starts in 10 minutes are enough (Nomad's jitter, systemd's start limit).
Pure.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from dynctl.agents.causes import Cause
from dynctl.core.deployment import EngineState


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how soon a dead process is started again."""

    first_s: float = 1.0
    most_s: float = 60.0
    jitter_ratio: float = 0.25
    max_starts: int = 5
    window_s: float = 600.0

    def delay_s(self, num_failures: int, draw: float) -> float:
        """How long to wait after the `num_failures`-th failure in a row; `draw` from -1 to 1 spreads it."""
        plain = min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return plain * (1 + self.jitter_ratio * draw)


class Event(StrEnum):
    """What may happen to a unit; `EXITED`, `REFUSED`, `HUNG` and `STUCK` come with a cause."""

    START_REQUESTED = "start requested"
    STOP_REQUESTED = "stop requested"
    """Finish what is running, then end."""
    STOP_NOW_REQUESTED = "stop now requested"
    RESTART_REQUESTED = "restart requested"
    ADOPTED = "adopted"
    """A process an earlier agent had started, not known to be ready."""
    ADOPTED_READY = "adopted ready"
    ADOPTED_DRAINING = "adopted draining"
    BECAME_READY = "became ready"
    EXITED = "exited"
    """The process and everything it started are gone."""
    REFUSED = "refused"
    """No process was started."""
    DEADLINE_PASSED = "deadline passed"
    """It was not ready in time."""
    BACKOFF_PASSED = "backoff passed"
    DRAIN_ENDED = "drain ended"
    HUNG = "hung"
    """It is ready and produces nothing."""
    STUCK = "stuck"
    """Not even SIGKILL ended it (uninterruptible sleep)."""


class Action(StrEnum):
    """What the supervisor does next; any of them replaces what it was doing for the unit before."""

    SPAWN = "spawn"
    PROBE = "probe"
    WATCH = "watch"
    SLEEP = "sleep"
    """For `Life.delay_s`, then BACKOFF_PASSED."""
    DRAIN = "drain"
    TERMINATE = "terminate"
    """SIGTERM, later SIGKILL, to the whole group."""
    KILL = "kill"
    REST = "rest"
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Life:
    """Where a unit is in its life."""

    state: EngineState = EngineState.STOPPED
    is_wanted: bool = False
    has_process: bool = False
    starts_s: tuple[float, ...] = ()
    """Recent starts, oldest first."""
    num_failures: int = 0
    """Deaths in a row; a long healthy run clears them."""
    num_restarts: int = 0
    ready_since_s: float | None = None
    delay_s: float = 0.0
    last_error: str = ""
    overdue: Cause | None = None
    """Set when we end a run ourselves because it took too long to start, or hung."""


Step = tuple[Life, Action | None]


def step(
    life: Life,
    event: Event,
    now_s: float,
    *,
    cause: Cause | None = None,
    draw: float = 0.0,
    policy: RestartPolicy = RestartPolicy(),
) -> Step:
    """Return the life after an event and the action that follows, None: go on as before."""
    match event:
        case Event.EXITED | Event.REFUSED:
            assert cause is not None
            return _died(replace(life, has_process=False), cause, now_s, draw, policy)
        case Event.STUCK:
            assert cause is not None
            failed = replace(life, state=EngineState.FAILED, last_error=cause.text)
            return failed, Action.REST
        case Event.START_REQUESTED:
            return _start_requested(replace(life, is_wanted=True), now_s)
        case Event.RESTART_REQUESTED:
            return _restart_requested(replace(life, is_wanted=True), now_s)
        case Event.STOP_REQUESTED | Event.STOP_NOW_REQUESTED:
            is_now = event is Event.STOP_NOW_REQUESTED
            return _stop_requested(replace(life, is_wanted=False), is_now=is_now)
        case Event.ADOPTED | Event.ADOPTED_READY | Event.ADOPTED_DRAINING:
            return _adopted(life, event, now_s)
        case _:
            return _went_on(life, event, now_s, cause)


def _went_on(life: Life, event: Event, now_s: float, cause: Cause | None) -> Step:
    """Progress the supervisor reports; whatever no longer fits the state came too late and is ignored."""
    match (life.state, event):
        case (EngineState.STARTING, Event.BECAME_READY) if life.overdue is None:
            ready = replace(life, state=EngineState.READY, ready_since_s=now_s)
            return ready, Action.WATCH
        case (EngineState.STARTING, Event.DEADLINE_PASSED) | (EngineState.READY, Event.HUNG):
            assert cause is not None
            return replace(life, overdue=cause), Action.KILL
        case (EngineState.BACKOFF, Event.BACKOFF_PASSED):
            return _spawning(replace(life, num_restarts=life.num_restarts + 1), now_s)
        case (EngineState.DRAINING, Event.DRAIN_ENDED):
            return life, Action.TERMINATE
        case _:
            return life, None


def _spawning(life: Life, now_s: float) -> Step:
    starting = replace(
        life,
        state=EngineState.STARTING,
        has_process=True,
        starts_s=(*life.starts_s, now_s)[-32:],
        ready_since_s=None,
        overdue=None,
    )
    return starting, Action.SPAWN


def _start_requested(life: Life, now_s: float) -> Step:
    match life.state:
        case EngineState.STOPPED:
            return _spawning(_forgiven(life), now_s)
        case EngineState.FAILED if not life.has_process:
            return _spawning(_forgiven(life), now_s)
        case _:
            # Draining: it starts again once it is gone. Stuck: nothing may run beside it.
            return life, None


def _restart_requested(life: Life, now_s: float) -> Step:
    match life.state:
        case EngineState.READY:
            return replace(life, state=EngineState.DRAINING), Action.DRAIN
        case EngineState.STARTING:
            return replace(life, state=EngineState.DRAINING), Action.TERMINATE
        case EngineState.BACKOFF:
            return _spawning(_forgiven(life), now_s)
        case _:
            return _start_requested(life, now_s)


def _stop_requested(life: Life, *, is_now: bool) -> Step:
    match life.state:
        case EngineState.READY:
            action = Action.TERMINATE if is_now else Action.DRAIN
            return replace(life, state=EngineState.DRAINING), action
        case EngineState.STARTING:
            # It has served nothing yet, so there is nothing to drain.
            return replace(life, state=EngineState.DRAINING), Action.TERMINATE
        case EngineState.DRAINING:
            return life, Action.TERMINATE if is_now else None
        case EngineState.FAILED if life.has_process:
            return replace(life, state=EngineState.DRAINING), Action.TERMINATE
        case _:
            return replace(life, state=EngineState.STOPPED), Action.REST


def _adopted(life: Life, event: Event, now_s: float) -> Step:
    running = replace(life, has_process=True)
    match event:
        case Event.ADOPTED_READY:
            ready = replace(running, state=EngineState.READY, ready_since_s=now_s)
            return ready, Action.WATCH
        case Event.ADOPTED_DRAINING:
            return replace(running, state=EngineState.DRAINING), Action.DRAIN
        case _:
            starting = replace(running, state=EngineState.STARTING, starts_s=(now_s,))
            return starting, Action.PROBE


def _died(life: Life, cause: Cause, now_s: float, draw: float, policy: RestartPolicy) -> Step:
    """Decide what follows a death, in this order: we ended it; no cure; too often; again later."""
    if life.state not in (EngineState.DRAINING, EngineState.STARTING, EngineState.READY):
        return life, None
    if not life.is_wanted:
        return replace(life, state=EngineState.STOPPED, ready_since_s=None), Action.REST
    if life.state is EngineState.DRAINING:
        return _spawning(_forgiven(life), now_s)
    cause = life.overdue or cause
    was_healthy = life.ready_since_s is not None and now_s - life.ready_since_s >= policy.window_s
    failures = 1 if was_healthy else life.num_failures + 1
    recent = tuple(start for start in life.starts_s if now_s - start < policy.window_s)
    dead = replace(
        life,
        starts_s=recent,
        num_failures=failures,
        ready_since_s=None,
        overdue=None,
        last_error=cause.text,
    )
    if cause.is_final:
        return replace(dead, state=EngineState.FAILED), Action.REST
    if len(recent) >= policy.max_starts:
        minutes = round(policy.window_s / 60)
        text = f"gave up after {len(recent)} starts in {minutes} minutes: {cause.text}"
        return replace(dead, state=EngineState.FAILED, last_error=text), Action.REST
    delay_s = policy.delay_s(failures, draw)
    return replace(dead, state=EngineState.BACKOFF, delay_s=delay_s), Action.SLEEP


def _forgiven(life: Life) -> Life:
    """Drop the history: a person asked for this start, or we ended the last run ourselves."""
    return replace(life, starts_s=(), num_failures=0, last_error="")
