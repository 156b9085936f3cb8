"""Whose turn it is among those who wait: by class, in a class by how long they can wait, then by arrival.

Whoever waits rises by one class every `ageing_s`, beyond the highest too. So nobody is overtaken by what comes more than
(classes between the two + 1) × `ageing_s` later: nobody starves. Not here: how many may wait, when somebody's time is over
(`admission`), clocks (times are passed in). Pure.
"""

import heapq
from bisect import bisect_left, insort
from typing import Generic, TypeVar

T = TypeVar("T")

CLASSES = ("high", "normal", "low")
"""The most urgent first; a class's level is its position. Levels below 0 are of those who have waited for long."""

NORMAL = CLASSES.index("normal")


class Turns(Generic[T]):
    """Waiting items in the order of their turns; each is in it once."""

    def __init__(self, ageing_s: float) -> None:
        """`ageing_s` 0: nobody rises, and a class waits for as long as a higher one brings work."""
        self._ageing_s = ageing_s
        self._order: list[tuple[int, float, float, int, T]] = []
        """Sorted: level, until when it waits, arrival, number, item."""
        self._entries: dict[T, tuple[int, float, float, int, T]] = {}
        self._rises: list[tuple[float, int, T]] = []
        """A heap: when who rises; of those who left too, until then."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: T, level: int, arrived_s: float, until_s: float) -> None:
        """Let an item wait; time that has passed since its arrival counts."""
        self._num_added += 1
        self._put((level, until_s, arrived_s, self._num_added, item))
        if self._ageing_s:
            heapq.heappush(self._rises, (arrived_s + self._ageing_s, self._num_added, item))

    def remove(self, item: T) -> None:
        """Take an item out; no error when it is not in."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def in_order(self, now_s: float) -> list[T]:
        """Everybody, by turn."""
        self._rise(now_s)
        return [entry[4] for entry in self._order]

    def position(self, item: T, now_s: float) -> int:
        """Whose turn it is first, is 1; 0: it is not in."""
        self._rise(now_s)
        entry = self._entries.get(item)
        return 0 if entry is None else bisect_left(self._order, entry) + 1

    def last_below(self, level: int, now_s: float) -> T | None:
        """Who goes last, where that is of a lower class by now."""
        self._rise(now_s)
        entry = self._order[-1] if self._order else None
        return entry[4] if entry is not None and entry[0] > level else None

    def _put(self, entry: tuple[int, float, float, int, T]) -> None:
        insort(self._order, entry)
        self._entries[entry[4]] = entry

    def _rise(self, now_s: float) -> None:
        while self._rises and self._rises[0][0] <= now_s:
            at_s, number, item = heapq.heappop(self._rises)
            entry = self._entries.get(item)
            if entry is None or entry[3] != number:
                continue
            self.remove(item)
            self._put((entry[0] - 1, *entry[1:]))
            heapq.heappush(self._rises, (at_s + self._ageing_s, number, item))
