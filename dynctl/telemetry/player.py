"""Goes through a recording as time passes, or as somebody steps and jumps: a Look at each place. IO: files through the tape, clock.

At every place figures, courses and events are what `top` would have shown had it begun an hour before. Not here: keys, drawing.
"""

import asyncio
import contextlib
import itertools
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace

from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.look import Look
from dynctl.telemetry.recording import NOT_RECORDED, Asked, Playing
from dynctl.telemetry.tape import Tape

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
LEAST_WAIT_S = 0.1
"""Between two looks, however fast it goes."""
LATEST_S = 0.5
"""Looks that come later than this are not made up for."""
GAP_S = 5.0
"""Where nothing was recorded for longer, no more is waited than this."""
NEAR_S = 60.0
"""No farther ahead than this, one goes on; else one begins anew there."""
MARK_S = 30.0
"""So often what is known is kept, to come back to it, …"""
MAX_MARKS = 14
"""… those that are nearest: more than five minutes around a place."""
WHOLE_S = 400.0
"""Before a place so much is read whole: the plot of five minutes, and the minute behind its first percentile; …"""
PAST_S = 3700.0
"""… and so much with a snapshot in ten seconds, as courses of an hour keep them."""
COARSE_S = 10.0
BREATH_S = 0.02
"""Reading ahead, keys are looked at this often."""
MAX_EVENTS = 200
NO_TIME_S = 0.5
"""Snapshots are farther apart, and their two clocks never differ by so much from one to the next."""
MARKED_S = 70.0
"""Of what is read to get to a place the end so long before it is known as well as the place itself."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What was known at a snapshot."""

    at: int
    look: Look
    asked: Asked | None

    def copy(self) -> "_Mark":
        """One that goes on by itself."""
        return replace(self, look=Look(self.look.overview, self.look.ledger.copy()))


class Player:
    """Where in a recording somebody is: `looks` yields each new place, the others say where to go."""

    def __init__(self, tape: Tape, at_s: float | None = None, speed: float = 1.0) -> None:
        self._tape = tape
        self._goal: int | None = 0 if at_s is None else tape.first_from(at_s)
        """The snapshot to go to, counted among snapshots."""
        self._at = self._goal or 0
        self._speed = speed
        self._is_playing = True
        self._is_hunting = False
        self._ahead_s = 0.0
        self._ledger = Ledger(tape.header.goals)
        self._asked: Asked | None = None
        self._look: Look | None = None
        self._marks: list[_Mark] = []
        self._has_order = asyncio.Event()

    @property
    def playing(self) -> Playing:
        """Where it is."""
        first_s, last_s = self._time_s(0), self._time_s(self._last)
        return Playing(
            at_s=self._time_s(self._at) - first_s,
            until_s=last_s - first_s,
            speed=self._speed,
            is_playing=self._is_playing and self._at < self._last,
            is_seeking=self._goal is not None or self._is_hunting,
        )

    def toggle(self) -> None:
        """Hold, or go on; at the end from the beginning."""
        if self._at >= self._last:
            self._goal, self._is_playing = 0, True
        else:
            self._is_playing = not self._is_playing
        self._has_order.set()

    def change_speed(self, steps: int) -> None:
        """Go faster or slower."""
        nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self._speed))
        self._speed = SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + steps))]
        self._has_order.set()

    def step(self, count: int) -> None:
        """Go so many looks on or back, and hold there."""
        self._is_playing = False
        self._go(self._place + count)

    def jump(self, seconds: float) -> None:
        """Go so far on or back."""
        at_s = self._time_s(self._place) + seconds
        found = self._tape.first_from(at_s)
        if seconds < 0 and found and self._time_s(found) > at_s:
            found -= 1
        self._go(found)

    def hunt(self) -> None:
        """Go on to the next event, or to the end where there is none, and hold there."""
        self._is_playing, self._is_hunting = False, True
        self._has_order.set()

    def hunt_back(self) -> None:
        """Go back to the event before this place, if one is known, and hold there."""
        self._is_playing = False
        if self._look is not None:
            now_unix_s = self._look.overview.taken_unix_s
            events = self._look.ledger.events.newest(MAX_EVENTS)
            away_s = [now_unix_s - one.unix_s for one in events if one.unix_s < now_unix_s]
            if away_s:
                self._go(self._tape.first_from(self._time_s(self._at) - min(away_s) - NO_TIME_S))

    def answer(self, asks: Asks) -> Answers:
        """What of a screen's questions was recorded; the rest is told to be missing."""
        failures: dict[str | tuple[str, str], str] = dict.fromkeys(
            (*asks.logs, *asks.commands), NOT_RECORDED
        )
        if self._asked is None:
            return Answers(failures=failures)
        failures.update(self._asked.failures)
        return Answers(hits=self._asked.hits, failures=failures)

    async def looks(self) -> AsyncIterator[Look]:
        """Yield what is known at each place, until the reader has enough."""
        while True:
            if self._goal is not None:
                self._is_hunting = False
                await self._reach(self._goal)
            elif self._is_hunting:
                await self._reach_event()
            elif self._is_playing and self._at < self._last:
                if not await self._play():
                    continue
            else:
                await self._has_order.wait()
                self._has_order.clear()
                continue
            if self._look is not None:
                yield self._look

    def all_looks(self) -> Iterator[Look]:
        """Yield every look from where it is to the end, as fast as they can be read; not to be mixed with `looks`."""
        begin, self._goal = self._at, None
        for number in self._way_anew(begin):
            self._feed(number)
        assert self._look is not None
        yield self._look
        for number in range(self._tape.snapshots[begin] + 1, len(self._tape.times_s)):
            if self._feed(number):
                yield self._look

    @property
    def _last(self) -> int:
        return len(self._tape.snapshots) - 1

    @property
    def _place(self) -> int:
        """Where it is, or will be."""
        return self._at if self._goal is None else self._goal

    def _time_s(self, snapshot: int) -> float:
        return self._tape.times_s[self._tape.snapshots[snapshot]]

    def _go(self, snapshot: int) -> None:
        self._goal = max(0, min(self._last, snapshot))
        self._has_order.set()

    async def _play(self) -> bool:
        """Wait until the next snapshot is due, and take in those that are by then; tells whether nothing came between."""
        loop = asyncio.get_running_loop()
        begun_s, now_s = loop.time(), self._time_s(self._at)
        gap_s = min(self._time_s(self._at + 1) - now_s, GAP_S)
        wait_s = max(LEAST_WAIT_S, (gap_s - self._ahead_s) / self._speed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._has_order.wait()
                self._has_order.clear()
                self._ahead_s = 0.0
                return False
        # A program that was stopped meanwhile goes on where it was.
        passed_s = min(loop.time() - begun_s, wait_s + LATEST_S)
        due_s = now_s + self._ahead_s + passed_s * self._speed
        target = self._at + 1
        while target < self._last and self._time_s(target + 1) <= due_s:
            target += 1
        for number in range(self._tape.snapshots[self._at] + 1, self._tape.snapshots[target] + 1):
            self._feed(number)
        self._at = target
        # What time is left counts for the next one, unless reading cannot keep up.
        self._ahead_s = max(0.0, min(due_s - self._time_s(target), LEAST_WAIT_S * self._speed))
        return True

    async def _reach(self, goal: int) -> None:
        """Go to a snapshot, from the nearest place before it of which everything is known, or from an hour before it."""
        loop = asyncio.get_running_loop()
        breathed_s = loop.time()
        way: Iterable[int] | None = self._way_from_near(goal)
        for number in self._way_anew(goal) if way is None else way:
            self._feed(number, self._time_s(goal) - MARKED_S)
            if loop.time() - breathed_s > BREATH_S:
                await asyncio.sleep(0)
                breathed_s = loop.time()
                if self._goal != goal:
                    # Somebody wants to be elsewhere by now: what was read so far is of no place.
                    self._look = None
                    return
        self._at, self._ahead_s = goal, 0.0
        if self._goal == goal:
            self._goal = None

    async def _reach_event(self) -> None:
        """Go on until something happens, the end comes, or somebody wants to be elsewhere."""
        loop = asyncio.get_running_loop()
        breathed_s = loop.time()
        known = self._ledger.events.newest(1)
        entries = self._tape.snapshots
        for number in range(entries[self._at] + 1, entries[self._last] + 1):
            if self._feed(number):
                self._at += 1
                if self._ledger.events.newest(1) != known:
                    break
            if loop.time() - breathed_s > BREATH_S:
                await asyncio.sleep(0)
                breathed_s = loop.time()
                if self._goal is not None or self._is_playing:
                    break
        self._is_hunting, self._ahead_s = False, 0.0

    def _way_from_near(self, goal: int) -> range | None:
        """Begin where one is, or from a mark, whichever is nearer; return the entries to read from there."""
        here = [] if self._look is None else [_Mark(self._at, self._look, self._asked)]
        near = [
            mark
            for mark in (*self._marks, *here)
            if mark.at <= goal and self._time_s(goal) - self._time_s(mark.at) <= NEAR_S
        ]
        if not near:
            return None
        best = max(near, key=lambda mark: mark.at)
        # What goes on must not change what is kept.
        mark = best if here and best.at == self._at else best.copy()
        if mark.look is not self._look:
            self._look, self._ledger, self._asked = mark.look, mark.look.ledger, mark.asked
        entries = self._tape.snapshots
        return range(entries[mark.at] + 1, entries[goal] + 1)

    def _way_anew(self, goal: int) -> Iterator[int]:
        """Forget everything; return the entries to read so that everything is known at a snapshot."""
        self._ledger, self._asked = Ledger(self._tape.header.goals), None
        end = self._tape.snapshots[goal]
        end_s = self._tape.times_s[end]
        whole = bisect_left(self._tape.times_s, end_s - WHOLE_S)
        return itertools.chain(self._coarse(end_s - PAST_S, whole), range(whole, end + 1))

    def _coarse(self, since_s: float, end: int) -> Iterator[int]:
        """A snapshot in ten seconds, up to an entry."""
        read_s = -COARSE_S
        for snapshot in range(self._tape.first_from(since_s), len(self._tape.snapshots)):
            number = self._tape.snapshots[snapshot]
            if number >= end:
                return
            if self._tape.times_s[number] - read_s >= COARSE_S:
                read_s = self._tape.times_s[number]
                yield number

    def _feed(self, number: int, mark_from_s: float = 0.0) -> bool:
        """Take an entry in, and keep what is known then from a time on; tells whether it is a snapshot."""
        entry = self._tape.entry(number)
        if entry.asked is not None:
            self._asked = entry.asked
            self._ledger.requests.add(entry.asked.decisions)
        if entry.snapshot is None:
            return False
        overview = self._ledger.take(entry.snapshot, entry.at_s)
        self._look = Look(overview, self._ledger)
        if entry.at_s >= mark_from_s:
            self._mark(number, entry.at_s)
        return True

    def _mark(self, number: int, at_s: float) -> None:
        """Keep what is known, unless something near is kept; of too many the farthest goes."""
        away_s = [abs(self._time_s(mark.at) - at_s) for mark in self._marks]
        if self._look is None or min(away_s, default=MARK_S) < MARK_S:
            return
        if len(self._marks) == MAX_MARKS:
            del self._marks[away_s.index(max(away_s))]
        at = bisect_left(self._tape.snapshots, number)
        self._marks.append(_Mark(at, self._look, self._asked).copy())
