"""The nodes of one simulated engine over several hosts: they meet at rank 0 before it answers, and it needs them all.

As with vLLM's: rank 0 alone serves; it listens at no HTTP address before every other node has come. A node that is lost
stops the engine from making steps, while it goes on saying that it is healthy; a node that loses rank 0 goes on waiting.
IO: sockets.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynctl.errors import EngineError
from dynctl.sim.options import SimOptions

_RETRY_S = 0.1
_GREETING_S = 10.0
_GO, _BEAT = b"go\n", b".\n"
_BEAT_S = 1.0
_UNANSWERED_S = 10.0
"""A node whose host acknowledges nothing for so long is lost."""


class Meeting:
    """Rank 0's side: takes one connection of each other node."""

    def __init__(self, num_others: int, on_lost: Callable[[int], None]) -> None:
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._num_others = num_others
        self._on_lost = on_lost
        self._is_whole = asyncio.Event()
        self._is_over = False

    async def come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep one node's connection until it ends."""
        try:
            async with asyncio.timeout(_GREETING_S):
                text = (await reader.readline()).strip()
        except (OSError, TimeoutError, ValueError):
            text = b""
        rank = int(text) if text.isdigit() else 0
        if not 0 < rank <= self._num_others or rank in self._writers:
            writer.close()
            return
        _give_up_after(writer, _UNANSWERED_S)
        self._writers[rank] = writer
        if len(self._writers) == self._num_others:
            self._begin()
        try:
            await self._beat_until_end(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()
        if self._is_over:
            return
        if self._is_whole.is_set():
            self._on_lost(rank)
        else:
            # It may come again while others are waited for.
            del self._writers[rank]

    async def _beat_until_end(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        end = asyncio.ensure_future(reader.read())
        try:
            while not end.done():
                await asyncio.wait((end,), timeout=_BEAT_S)
                if self._is_whole.is_set():
                    writer.write(_BEAT)
            end.result()
        finally:
            end.cancel()

    def _begin(self) -> None:
        for writer in self._writers.values():
            writer.write(_GO)
        self._is_whole.set()

    async def wait(self) -> None:
        """Return when all have come."""
        await self._is_whole.wait()

    def end(self) -> None:
        """Let all go."""
        self._is_over = True
        for writer in self._writers.values():
            writer.close()


@asynccontextmanager
async def meeting(options: SimOptions, on_lost: Callable[[int], None]) -> AsyncIterator[Meeting]:
    """Listen for the other nodes, as rank 0; `on_lost` is told of each that goes after all had come.

    Raises:
        EngineError: when the address cannot be bound.
    """
    held = Meeting(options.nnodes - 1, on_lost)
    where = f"{options.master_addr}:{options.master_port}"
    try:
        server = await asyncio.start_server(held.come, options.master_addr, options.master_port)
    except OSError as error:
        raise EngineError(f"cannot listen on {where}: {error}") from error
    try:
        yield held
    finally:
        held.end()
        server.close()


async def attend(options: SimOptions, on_ready: Callable[[str], None]) -> None:
    """Be another node than rank 0, for ever: come to the meeting, then wait."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(options.master_addr, options.master_port)
            break
        except OSError:
            await asyncio.sleep(_RETRY_S)
    try:
        writer.write(f"{options.node_rank}\n".encode())
        if await reader.readline() != _GO:
            raise EngineError(f"node 0 does not want node {options.node_rank}")
        on_ready(f"node {options.node_rank} of {options.nnodes}")
        while await reader.readline():
            pass
        # Nobody says that rank 0 is gone: to a node of vLLM it only has nothing to do.
        await asyncio.get_running_loop().create_future()
    except OSError as error:
        raise EngineError(f"node 0 is lost: {error}") from error
    finally:
        writer.close()


def _give_up_after(writer: asyncio.StreamWriter, unanswered_s: float) -> None:
    """Let the kernel end a connection whose other end has gone without a word."""
    connection = writer.get_extra_info("socket")
    timeout_ms = int(unanswered_s * 1e3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
