"""The way to one engine: which connection pool, which path, which extra fields; and long answers read piece by piece.

IO: sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from dynctl.errors import UsageError
from dynctl.http1.message import Header
from dynctl.http1.upstream import (
    Address,
    Call,
    Response,
    ResponseSink,
    Upstream,
    UpstreamError,
    UpstreamLimits,
)

T = TypeVar("T")

_JSON = (b"content-type", b"application/json")

_RELAY_IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Route:
    """How requests reach one engine incarnation."""

    upstream: Upstream
    prefix: str = ""
    """Before the engine's own path, without a slash at the end."""
    headers: tuple[Header, ...] = ()
    """Sent with every request."""
    is_relayed: bool = False
    """A relay is in between; it marks answers of its own."""
    _starts: dict[str, bytes] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Heads by path, written once."""

    def send(self, path: str, request_id: str, body: bytes, sink: ResponseSink) -> Call:
        """POST a JSON body; the id is ours."""
        start = self._starts.get(path)
        if start is None:
            headers = (_JSON, *self.headers)
            start = self.upstream.prepare("POST", self.prefix + path, headers)
            self._starts[path] = start
        return self.upstream.post(start, request_id, body, sink)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = 5.0
    ) -> Response:
        """Make a control request.

        Raises:
            UpstreamError: when there is no whole answer in time.
        """
        headers = (_JSON, *self.headers) if body else self.headers
        return await self.upstream.fetch(method, self.prefix + path, headers, body, timeout_s)


def parse_url(url: str) -> tuple[Address, str]:
    """Split an engine's URL into an address and a path prefix.

    Raises:
        UsageError: when it is neither `http://host:port` nor `unix:/path`.
    """
    if url.startswith("unix:"):
        path = url[5:]
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if path:
            return Address(path=path), ""
    if url.startswith("http://"):
        authority, _, prefix = url[7:].partition("/")
        host, _, port = authority.rpartition(":")
        if not host:
            host, port = authority, "80"
        if host and port.isdecimal() and 0 < int(port) < 65536 and "@" not in host:
            prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
            return Address(host=host.strip("[]"), port=int(port)), prefix.removesuffix("/v1")
    raise UsageError(
        f"engine URL {url!r} is not understood", "write http://HOST:PORT or unix:/path/to.sock"
    )


def limits(connect_timeout_s: float, *, is_relay: bool = False) -> UpstreamLimits:
    """Bounds of a pool towards one engine or relay.

    A relay keeps idle connections for a minute, and a new one costs a TLS handshake: half of that is kept here.
    """
    bounds = UpstreamLimits(max_connections=4096, connect_timeout_s=connect_timeout_s)
    return replace(bounds, idle_timeout_s=_RELAY_IDLE_S) if is_relay else bounds


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
        if self._queue.qsize() >= _MAX_WAITING and self._full_since_s is None:
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
            self._full_since_s = None
            if self.call is not None:
                self.call.resume()
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

    On a connection of its own: one from the pool may lead to a relay that has handed its port over.

    Raises:
        UpstreamError: when it does not begin with 200, breaks, or falls silent.
    """
    pieces = Pieces(silence_s, target)
    pieces.call = call = upstream.send("GET", target, headers, b"", pieces, on_new_connection=True)
    try:
        status = await _within(pieces.status, silence_s, target)
        if status != 200:
            raise UpstreamError("status", f"{target}: status {status}", before_first_byte=False)
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
        raise UpstreamError("timeout", text, before_first_byte=False) from error
