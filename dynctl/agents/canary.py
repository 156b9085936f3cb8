"""Notices what lives and does not work: an engine that answers `/health` and produces nothing, a router that is frozen.

An engine that makes progress is left alone. One that is idle is asked for a single token from time to time and must give
it soon, twice in a row; one that has requests and makes no step for long is taken for hung without being asked, since a
question would only wait behind them. A router or relay that gives no answer at all for long is hung, too. Where the host
itself is starved, or the agent was frozen, nothing is concluded.
Not here: what follows (`lifecycle`). IO: sockets.
"""

import asyncio
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace

from dynctl.agents import ask
from dynctl.agents.causes import Cause
from dynctl.agents.programs import EngineProgram, EngineRank
from dynctl.agents.root import Run
from dynctl.core.units import format_seconds
from dynctl.errors import ProbeError
from dynctl.http1.upstream import UpstreamError

_NUM_MISSES = 2
_FIRST_ANSWER_S = 15.0
"""While nobody knows how fast this engine is."""
_SLOWER = 3.0
"""An answer may take so many times the usual one."""
_LATE_S = 1.0
"""A timer of ours that is later than this says that the host gives nobody time."""
_FIGURES_S = 5.0
"""A look at an engine's figures takes no longer."""
_HEALTH_S = 2.0
_NUM_SILENT = 3
"""However long nothing was heard, so many looks in a row must have shown it."""


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """How soon a hung engine is noticed: two looks and two answers, 14 s, when it is idle."""

    look_s: float = 4.0
    """Between looks at its figures."""
    answer_s: float = 3.0
    """The shortest time within which a token must come."""
    cpu_answer_s: float = 30.0
    """As above where engines share processors."""
    stall_s: float = 120.0
    """How long requests may be under way without a step of the engine."""
    silence_s: float = 60.0
    """How long a router or relay may give no answer."""


@dataclass(slots=True)
class Silence:
    """For how long there was no sign of life, as seen by looks that came in time.

    A late look says that the agent itself got no time: stopped, starved or suspended. What it looks at may have fared
    alike, so that the count begins anew.
    """

    limit_s: float
    passed_s: float = 0.0
    num_looks: int = 0

    def end(self) -> None:
        """Begin anew: there was a sign of life, or nobody could have seen one."""
        self.passed_s, self.num_looks = 0.0, 0

    def add(self, took_s: float) -> bool:
        """Count a look that was in time and showed nothing; tells whether it has been silent for long."""
        self.passed_s += took_s
        self.num_looks += 1
        return self.num_looks >= _NUM_SILENT and self.passed_s > self.limit_s


async def until_hung(program: EngineProgram, run: Run, settings: CanarySettings) -> Cause:
    """Return once any rank of an engine is taken for hung, with why; for ever while all work."""
    ranks = program.ranks
    if len(ranks) == 1:
        return await until_rank_hung(ranks[0], run, settings)
    watches = [
        asyncio.create_task(until_rank_hung(rank, run, settings), name=f"canary:{rank.number}")
        for rank in ranks
    ]
    try:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        number = next(number for number, watch in enumerate(watches) if watch.done())
        cause = watches[number].result()
        return replace(cause, text=f"rank {number} {cause.text}")
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def until_rank_hung(program: EngineRank, run: Run, settings: CanarySettings) -> Cause:
    """Return once a rank is taken for hung, with why; for ever while it works."""
    floor_s = settings.answer_s if program.wish.device == "gpu" else settings.cpu_answer_s
    answers_s: deque[float] = deque(maxlen=9)
    seen, stall, misses = "", Silence(settings.stall_s), 0
    while True:
        if await _slept_late(settings.look_s):
            stall.end()
            misses = 0
            continue
        before_s = time.monotonic()
        mark, is_busy = await _look(program, run)
        took_s = time.monotonic() - before_s
        if mark != seen or took_s > _FIGURES_S + _LATE_S:
            stall.end()
            seen, misses = mark, 0
            continue
        is_long = stall.add(settings.look_s + took_s)
        if is_busy:
            if is_long:
                text = f"made no step for {format_seconds(settings.stall_s)} though requests run"
                return Cause("hang", f"hung: {text}")
            continue
        while misses < _NUM_MISSES:
            usual_s = statistics.median(answers_s) if answers_s else 0.0
            limit_s = (
                max(floor_s, _SLOWER * usual_s) if answers_s else max(floor_s, _FIRST_ANSWER_S)
            )
            answer_s = await _ask(program, run, limit_s)
            if answer_s is None:
                misses += 1
                continue
            misses = 0
            answers_s.append(answer_s)
            break
        else:
            text = f"idle, and gave no token within {format_seconds(limit_s)}, twice"
            return Cause("hang", f"hung: {text}")


async def until_silent(run: Run, settings: CanarySettings) -> Cause:
    """Return once a router or relay has given no answer for long, whatever it would have been; for ever while it does."""
    silence = Silence(settings.silence_s)
    while True:
        if await _slept_late(settings.look_s):
            silence.end()
            continue
        before_s = time.monotonic()
        has_answered = await _answers(run)
        took_s = time.monotonic() - before_s
        if has_answered or took_s > _HEALTH_S + _LATE_S:
            silence.end()
        elif silence.add(settings.look_s + took_s):
            text = f"gave no answer for {format_seconds(settings.silence_s)}"
            return Cause("hang", f"hung: {text}")


async def _answers(run: Run) -> bool:
    try:
        await ask.ask(run.at, "GET", "/health", timeout_s=_HEALTH_S)
    except UpstreamError:
        return False
    return True


async def _slept_late(seconds: float) -> bool:
    before_s = time.monotonic()
    await asyncio.sleep(seconds)
    return time.monotonic() - before_s > seconds + _LATE_S


async def _look(program: EngineRank, run: Run) -> tuple[str, bool]:
    """Return a mark that differs when the engine has made a step, and whether it has requests."""
    try:
        sample, steps = await program.look(run)
    except (UpstreamError, ProbeError):
        return "", False
    plain = replace(sample, age_s=0.0)
    return f"{plain}{steps}", bool(sample.running or sample.waiting)


async def _ask(program: EngineRank, run: Run, limit_s: float) -> float | None:
    """Return how long a token took; None: it did not come, though the host had time for it."""
    before_s = time.monotonic()
    has_come = await program.says_token(run, limit_s)
    took_s = time.monotonic() - before_s
    if has_come or took_s > limit_s + _LATE_S:
        return min(took_s, limit_s)
    return None
