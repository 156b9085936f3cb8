"""Runs one simulated engine in the foreground: sockets up, signals, drain, sockets down.

Not here: routes, flags. IO: sockets, signals, stdout.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress

import uvloop

from dynctl.errors import EngineError
from dynctl.files import reason
from dynctl.http1.server import Server, ServerLimits, serve
from dynctl.sim.api.control import Control
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.faults import Faults
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
    text, faults = TextModel(model_dir(options)), Faults(options.fault)
    ranks = [SimEngine(options, text, rank, faults) for rank in range(options.data_parallel_size)]
    api = Api(*ranks)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
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
