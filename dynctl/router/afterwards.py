"""What is done for a request once its client has what it waits for: after the event loop has slept, or before anybody looks.

Who reads an answer on the same processor runs only when this process has nothing left to do. Not here: what is to be done.
What fails there is a fault of ours that no client is to see. IO: an event loop timer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from dynctl.router.metrics import Counter

log = logging.getLogger("dynctl.router")


_KEEP_S: Final = 0.002
"""Until books are kept that nobody has asked for."""


class Keeper(Protocol):
    """A request with books to keep."""

    def keep(self) -> None:
        """Keep them."""


class Afterwards:
    """The requests of one router whose books are still to be kept, oldest first; `close` it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, faults: Counter) -> None:
        """`faults` counts books that could not be kept."""
        self._loop = loop
        self._faults = faults
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
            self.guard(left.pop(0).keep)

    def guard(self, keep: Callable[..., None], *args: object) -> bool:
        """Keep something in the books of one request; whatever fails is counted, and harms no other. Whether it went well."""
        try:
            keep(*args)
        except Exception:  # whatever it is, the next in turn is not to suffer from it
            log.exception("the books of a request could not be kept in full")
            self._faults.add()
            return False
        return True

    def close(self) -> None:
        """Keep all that are left, and stop the timer."""
        self.keep()
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.keep()
