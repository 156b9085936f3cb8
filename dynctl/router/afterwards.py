"""What is done for a request once its client has what it waits for: after the event loop has slept, or before anybody looks.

Who reads an answer on the same processor runs only when this process has nothing left to do. Not here: what is to be done.
IO: an event loop timer.
"""

import asyncio
from typing import Final, Protocol

_KEEP_S: Final = 0.002
"""Until books are kept that nobody has asked for."""


class Keeper(Protocol):
    """A request with books to keep."""

    def keep(self) -> None:
        """Keep them."""


class Afterwards:
    """The requests of one router whose books are still to be kept, oldest first; `close` it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left: list[Keeper] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, keeper: Keeper) -> None:
        """Keep a request's books soon."""
        self._left.append(keeper)
        if self._timer is None:
            self._timer = self._loop.call_later(_KEEP_S, self._on_timer)

    def keep(self) -> None:
        """Keep all that are left, now."""
        left = self._left
        while left:
            left.pop(0).keep()

    def close(self) -> None:
        """Keep all that are left, and stop the timer."""
        self.keep()
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.keep()
