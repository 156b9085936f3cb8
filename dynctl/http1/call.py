"""One request to an origin under way, and what its receiver must offer. No sockets here.

A call ends exactly once: by `on_end`, by `on_error`, or silently by `cancel`.
IO: none of its own; a call reaches its connection.
"""

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from dynctl.errors import DynctlError
from dynctl.http1.message import Header

if TYPE_CHECKING:
    from dynctl.http1.connection import Connection
    from dynctl.http1.upstream import Upstream


class UpstreamError(DynctlError):
    """Raised when an origin gave no proper answer; `on_error` receives it as a value."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """`connect`, `closed`, `protocol` or `timeout`."""


class ReceiverError(UpstreamError):
    """Given to a receiver that raised: it is its own code that failed, not the origin."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class ResponseSink(Protocol):
    """Who receives an answer. The last call is exactly one of `on_end` and `on_error`.

    One that raises, wherever it does, hears of it: its last call is then `on_error` with a `ReceiverError`.
    """

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Take status and fields (names in lower case)."""

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body, chunk framing removed."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_error(self, error: UpstreamError) -> None:
        """There will be no (more) answer."""


class _Nobody:
    """Receives nothing: the call is over."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Ignore it."""

    def on_data(self, data: bytes) -> None:
        """Ignore it."""

    def on_end(self) -> None:
        """Ignore it."""

    def on_error(self, error: UpstreamError) -> None:
        """Ignore it."""


_NOBODY: Final = _Nobody()

_NEVER: Final = 1 << 60


class Call:
    """One request under way."""

    __slots__ = (
        "_body",
        "_connection",
        "_ends_tick",
        "_head",
        "_is_over",
        "_is_safe",
        "_pool",
        "_task",
        "gathers",
        "has_received",
        "heard_tick",
        "is_paused",
        "sink",
        "was_reused",
    )

    def __init__(
        self, pool: "Upstream", head: bytes, body: bytes, sink: ResponseSink, is_safe: bool
    ) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._is_safe = is_safe
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self.heard_tick = 0
        """The pool's sweep during which the origin was last heard."""
        self._ends_tick = _NEVER
        """The sweep that ends the call, whatever is heard."""
        self.sink = sink
        self.has_received = False
        self.was_reused = False
        """The connection had served another call before."""
        self.is_paused = False
        self.gathers = False
        """Where pieces follow each other within `UpstreamLimits.gather_s`, those of such a time come as one."""

    def cancel(self) -> None:
        """Close the connection so that the origin sees it; no callback comes afterwards."""
        if self._is_over:
            return
        self._is_over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
            self._pool.forget(connection)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._pool.settle(self)
        self._take_sink()

    def pause(self) -> None:
        """Stop reading the answer: the receiver is behind."""
        self.is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def let_go(self) -> None:
        """Hear no more: the receiver has all it wants.

        Where the answer ends within `UpstreamLimits.end_timeout_s` its connection serves again; else it is closed.
        """
        if not self._is_over:
            self._take_sink()
            self._ends_tick = self._pool.tick + self._pool.num_end_ticks

    def resume(self) -> None:
        """Read on."""
        self.is_paused = False
        self.heard_tick = self._pool.tick
        if self._connection is not None:
            self._connection.resume()

    # For pool and connection

    def _take_sink(self) -> ResponseSink:
        """Let go of the receiver, which mostly holds this call: a cycle for the collector at every request otherwise."""
        sink, self.sink = self.sink, _NOBODY
        return sink

    @property
    def is_over(self) -> bool:
        """Ended, failed or cancelled."""
        return self._is_over

    def is_late(self, tick: int, oldest_tick: int) -> bool:
        """Whether the origin owes bytes and gave none since the sweep `oldest_tick`, or was to have ended by now."""
        is_silent = self.heard_tick < oldest_tick and not self.is_paused
        return (is_silent or tick >= self._ends_tick) and self._connection is not None

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """Note the task that opens a connection for this call."""
        self._task = task

    def ride(self, connection: "Connection") -> None:
        """Send the request on a connection."""
        self._task = None
        self._connection = connection
        self.was_reused = not connection.is_fresh
        self.heard_tick = self._pool.tick
        connection.carry(self, self._head, self._body)
        if self.is_paused:
            connection.pause()

    def end(self) -> None:
        """Report a complete answer."""
        if not self._is_over:
            self._is_over = True
            self._connection = None
            self._pool.settle(self)
            sink = self._take_sink()
            try:
                sink.on_end()
            except Exception as error:  # noqa: BLE001 - one broken receiver must not harm the pool
                self._pool.receiver_failed(sink, error)

    def fail(self, kind: str, message: str, connection: "Connection | None" = None) -> None:
        """Report a failure, or try again where that cannot do a thing twice."""
        if self._is_over:
            return
        self._connection = self._task = None
        is_stale = kind == "closed" and self.was_reused and not self.has_received
        if is_stale and self._is_safe and connection is not None:
            self._pool.open_for(self)
            return
        self._is_over = True
        self._pool.settle(self)
        sink = self._take_sink()
        try:
            sink.on_error(UpstreamError(kind, f"{self._pool.address}: {message}"))
        except Exception as error:  # noqa: BLE001 - one broken receiver must not harm the pool
            self._pool.receiver_failed(sink, error)

    def expire(self) -> None:
        """Give up on a silent origin."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
            self._pool.forget(connection)
        self.fail("timeout", "the origin went silent")
