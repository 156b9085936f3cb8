"""Reading less often what comes faster than anybody can read it: pieces that follow each other at once go on as one.

A read and a write cost more than what is in them, in this process, in the kernel and at the client. Engines that generate
a token every few milliseconds are not held up: nothing waits unless the read before was a moment ago.
IO: an event loop timer; it pauses connections.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynctl.http1.connection import Connection


class Gatherer:
    """The connections of one pool that are not read for a moment; `close` it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gather_s: float) -> None:
        """`gather_s`: how soon after a read the next is put off, and for how long; 0: never."""
        self._loop = loop
        self._now_s = loop.time
        self._gather_s = gather_s
        self._paused: list[Connection] = []
        self._timer: asyncio.TimerHandle | None = None

    def heard(self, connection: "Connection") -> None:
        """Note a read whose successor may wait."""
        now_s = self._now_s()
        if now_s - connection.heard_s >= self._gather_s:
            connection.heard_s = now_s
            return
        connection.pause()
        self._paused.append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._gather_s, self._read_on)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _read_on(self) -> None:
        self._timer = None
        paused, self._paused = self._paused, []
        now_s = self._now_s()
        for connection in paused:
            # What came meanwhile is read at once, and the next is put off again.
            connection.heard_s = now_s
            connection.read_on()
