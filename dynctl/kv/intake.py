"""What all sources of engines' KV events of one process share: a part of each turn of the event loop, and places for replays.

A request is several turns of the loop, and waits in each for all that is done there. So events are taken in by small parts,
by turns between engines, and when a turn has had its time for them the rest waits for the next one (K19).
Not here: what is taken in. IO: event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

TURN_S = 0.0005
"""Of one turn of the loop, and what is left then of the part under way."""


class ReplaySlots:
    """Lets few readers replay at once; the others wait their turn (K6)."""

    def __init__(self, number: int = 4) -> None:
        self._free = number
        self._holders: set[object] = set()
        self._line: OrderedDict[object, Callable[[], None]] = OrderedDict()

    def enter(self, who: object, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as there is room: at once, or when another leaves."""
        if who in self._holders or self._free:
            if who not in self._holders:
                self._holders.add(who)
                self._free -= 1
            begin()
        else:
            self._line[who] = begin

    def is_waiting(self, who: object) -> bool:
        """Tell whether this one's turn has not come yet."""
        return who in self._line

    def leave(self, who: object) -> None:
        """Make room for the next; one that was not in changes nothing."""
        self._line.pop(who, None)
        if who not in self._holders:
            return
        self._holders.remove(who)
        self._free += 1
        if self._line:
            self.enter(*self._line.popitem(last=False))


class Intake:
    """Who has events to take in stands in line; each turn of the loop lets as many have a go as there is time for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds, finer than the loop's own."""
        self.slots = ReplaySlots()
        self._clock = clock
        self._line: OrderedDict[Callable[[], None], None] = OrderedDict()
        self._turn: asyncio.Handle | None = None

    def ask(self, part: Callable[[], None]) -> None:
        """Have a small part of the work done soon, behind those of all who asked before; who stands in line stays there."""
        self._line[part] = None
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take)

    def leave(self, part: Callable[[], None]) -> None:
        """Have it not done; one that does not stand in line changes nothing."""
        self._line.pop(part, None)

    async def through(self, parts: Iterator[None]) -> None:
        """Have all parts done, each up to where it yields; raises what they raise."""
        done = asyncio.get_running_loop().create_future()

        def part() -> None:
            if done.done():
                return  # cancelled
            try:
                next(parts)
            except StopIteration:
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - who waits is told
                done.set_exception(error)
            else:
                self.ask(part)

        self.ask(part)
        try:
            await done
        finally:
            self.leave(part)

    def _take(self) -> None:
        until_s = self._clock() + TURN_S
        try:
            while self._line:
                self._line.popitem(last=False)[0]()
                if self._clock() >= until_s:
                    break
        finally:
            more = asyncio.get_running_loop().call_soon(self._take) if self._line else None
            self._turn = more
