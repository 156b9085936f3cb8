"""Looks at one engine's figures now and then: does it sleep, is its cache empty though its events do not say so?

Not here: what that is judged by (`kv.emptied`). IO: sockets (through http1), timers.
"""

import asyncio
import logging

from dynctl.agents.relay.kv_source import KvSource
from dynctl.core.text import clean
from dynctl.errors import ProbeError
from dynctl.http1.upstream import Upstream, UpstreamError
from dynctl.kv.emptied import LOOK_S, CacheWatch, read_figures

_log = logging.getLogger("dynctl.relay")


async def watch_cache(
    upstream: Upstream, source: KvSource, engine_id: str, look_s: float = LOOK_S
) -> None:
    """Empty the source whenever the engine's cache is, until cancelled; an engine that does not answer says nothing."""
    watch, loop = CacheWatch(), asyncio.get_running_loop()
    while True:
        await asyncio.sleep(look_s)
        try:
            answer = await upstream.fetch("GET", "/metrics", timeout_s=look_s)
            if answer.status != 200:
                continue
            figures = read_figures(answer.body.decode("utf-8", "replace"))
        except (UpstreamError, ProbeError) as error:
            _log.debug("the figures of %s: %s", clean(engine_id), clean(str(error)))
            continue
        # At every look as long as it lasts: events of before may still have been under way.
        if watch.is_empty(figures, loop.time()) and source.empty():
            _log.warning("%s has dropped its cache and does not say so", clean(engine_id))
