"""Runs one simulated engine in the foreground: sockets up, signals, drain, sockets down.

Not here: routes, flags. IO: sockets, signals, stdout.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

import uvloop

from dynctl.errors import EngineError
from dynctl.files import reason
from dynctl.http1.server import Server, ServerLimits, serve
from dynctl.sim.api.control import Control
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.faults import Faults
from dynctl.sim.nodes import attend, meeting
from dynctl.sim.options import SimOptions, model_dir, split_address
from dynctl.sim.text import TextModel

_CLOSE_GRACE_S = 0.5
_LIMITS = ServerLimits(idle_timeout_s=3600.0)
"""Routers keep connections to engines open."""


def run_engine(options: SimOptions, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` takes the address once it answers.

    Raises:
        EngineError: when an address cannot be bound or the tokenizer is unusable.
    """
    uvloop.run(serve_engine(options, on_ready))


async def serve_engine(options: SimOptions, on_ready: Callable[[str], None]) -> None:
    """Serve on the running loop until SIGTERM or SIGINT.

    Raises:
        EngineError: as `run_engine`.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if options.headless:
        await _unless(ended, attend(options, on_ready))
        return
    text, faults = TextModel(model_dir(options)), Faults(options.fault)
    ranks = [SimEngine(options, text, rank, faults) for rank in range(options.data_parallel_size)]
    if options.nnodes == 1:
        await _serve_ranks(options, ranks, ended, on_ready)
        return
    async with meeting(options, lambda _: ranks[0].part()) as others:
        if await _unless(ended, others.wait()):
            await _serve_ranks(options, ranks, ended, on_ready)


async def _unless(ended: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do it, unless the engine is told to end before; tells whether it was done."""
    task = asyncio.ensure_future(work)
    end = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for each in (task, end):
            each.cancel()
        await asyncio.wait((task, end))


async def _serve_ranks(
    options: SimOptions,
    ranks: Sequence[SimEngine],
    ended: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    api = Api(*ranks)
    servers: list[Server] = []
    try:
        for rank in ranks:
            await rank.start()
        servers.append(await _listen(options, api))
        if options.control is not None:
            servers.append(await _bind(Control(*ranks).handle, path=options.control))
        on_ready(
            options.uds
            or f"http://{split_address('--listen', options.listen or '')[0]}:{servers[0].port}"
        )
        await ended.wait()
        api.is_draining = True
        await _drain(ranks, options.shutdown_timeout)
    finally:
        for rank in ranks:
            await rank.close()
        for server in servers:
            await server.close(_CLOSE_GRACE_S)


async def _drain(ranks: Iterable[SimEngine], timeout_s: float) -> None:
    """Let requests under way end, for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for rank in ranks:
                await rank.wait_until_idle()


async def _listen(options: SimOptions, api: Api) -> Server:
    if options.uds is not None:
        return await _bind(api.handle, path=options.uds)
    host, port = split_address("--listen", options.listen or "")
    return await _bind(api.handle, host=host, port=port)


async def _bind(
    handler: Callable[..., None],
    *,
    host: str | None = None,
    port: int | None = None,
    path: str | None = None,
) -> Server:
    try:
        return await serve(handler, host=host, port=port, path=path, limits=_LIMITS)
    except OSError as error:
        where = path or f"{host}:{port}"
        raise EngineError(
            f"cannot listen on {where}: {reason(error)}", "choose another address or path"
        ) from error
