"""A long answer of an origin, read piece by piece as it comes; a reader that is slow slows the sender.

Not here: connections (`upstream`), what the pieces mean. IO: sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Self, TypeVar

from dynctl.http1.message import Header
from dynctl.http1.upstream import Call, Upstream, UpstreamError

T = TypeVar("T")

_MAX_WAITING = 64
"""Pieces of a long answer not yet taken; with more the sender has to wait."""


class Pieces:
    """A long answer, piece by piece as it comes; iterate over it."""

    def __init__(self, silence_s: float, target: str) -> None:
        self._queue: asyncio.Queue[bytes | UpstreamError | None] = asyncio.Queue()
        self._silence_s = silence_s
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._full_since_s: float | None = None
        self._is_paused = False
        self.status: asyncio.Future[int] = self._loop.create_future()
        self.call: Call | None = None

    @property
    def behind_s(self) -> float:
        """For how long more has been waiting than is taken."""
        return 0.0 if self._full_since_s is None else self._loop.time() - self._full_since_s

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Tell the status."""
        del headers
        if not self.status.done():
            self.status.set_result(status)

    def on_data(self, data: bytes) -> None:
        """Keep a piece."""
        self._queue.put_nowait(data)
        if self._queue.qsize() >= _MAX_WAITING and not self._is_paused:
            self._is_paused = True
            if self._full_since_s is None:
                self._full_since_s = self._loop.time()
            if self.call is not None:
                self.call.pause()

    def on_end(self) -> None:
        """Keep the end."""
        self._queue.put_nowait(None)

    def on_error(self, error: UpstreamError) -> None:
        """Tell the error: at once before the status, else after the pieces before it."""
        if not self.status.done():
            self.status.set_exception(error)
        else:
            self._queue.put_nowait(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Wait for the next piece.

        Raises:
            UpstreamError: when the answer breaks or falls silent.
        """
        piece = await _within(self._queue.get(), self._silence_s, self._target)
        if self._full_since_s is not None and self._queue.empty():
            if not self._is_paused:
                self._full_since_s = None
            elif self.call is not None:
                self.call.resume()  # what the sender has kept back comes only now
            self._is_paused = False
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, UpstreamError):
            raise piece
        return piece


@asynccontextmanager
async def open_stream(
    upstream: Upstream, target: str, silence_s: float, headers: Iterable[Header] = ()
) -> AsyncIterator[Pieces]:
    """GET a long answer and give its pieces as they come; silence beyond `silence_s` is an error.

    On a connection of its own: one from the pool may lead to a server that has handed its port over.

    Raises:
        UpstreamError: when it does not begin with 200, breaks, or falls silent.
    """
    pieces = Pieces(silence_s, target)
    pieces.call = call = upstream.send("GET", target, headers, b"", pieces, on_new_connection=True)
    try:
        status = await _within(pieces.status, silence_s, target)
        if status != 200:
            raise UpstreamError("status", f"{target}: status {status}")
        yield pieces
    finally:
        call.cancel()
        if pieces.status.done() and not pieces.status.cancelled():
            pieces.status.exception()  # seen, also when nobody waited for it


async def _within(wait: Awaitable[T], silence_s: float, target: str) -> T:
    try:
        async with asyncio.timeout(silence_s):
            return await wait
    except TimeoutError as error:
        text = f"{target}: nothing for {silence_s:g} s"
        raise UpstreamError("timeout", text) from error
