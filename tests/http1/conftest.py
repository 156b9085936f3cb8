"""A pair of sockets speaking raw bytes to a server, on both event loops."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from dynctl.http1.server import Exchange, ServerLimits, serve


def echo(exchange: Exchange) -> None:
    """Answer with what was asked."""
    request = exchange.request
    exchange.respond(200, request.method.encode() + b" " + request.target + b" " + request.body)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function to its end on each event loop; leftover tasks fail the test."""

    def run_on_loop(main: Callable[[], Awaitable[object]]) -> object:
        async def guarded() -> object:
            faults: list[dict] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            async with asyncio.timeout(150):
                result = await main()
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left: {left}"
            assert not faults, faults
            return result

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())

    return run_on_loop


@asynccontextmanager
async def serving(handler=echo, **options):
    """A server on a loopback port, closed without grace."""
    options.setdefault("host", "127.0.0.1")
    options.setdefault("port", 0)
    limits = options.pop("limits", None) or ServerLimits(linger_s=0.4)
    server = await serve(handler, limits=limits, **options)
    try:
        yield server
    finally:
        await server.close(0)


async def converse(port: int, *pieces: bytes, shut: bool = False) -> bytes:
    """Send pieces, each as an own segment, and read until the server closes or is done."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if shut:
            writer.write_eof()
        answer = bytearray()
        while data := await asyncio.wait_for(reader.read(65536), 60):
            answer += data
        return bytes(answer)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
def server_at():
    """The context manager `serving`."""
    return serving


@pytest.fixture
def talk():
    """The coroutine function `converse`."""
    return converse
