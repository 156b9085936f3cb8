"""Runs one router from its configuration until told to stop: sources, entrance, drain. IO: sockets, signals."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Self

import zmq

from dynctl.errors import RouterError
from dynctl.http1.handover import Offer, take_over
from dynctl.http1.server import raise_file_limit
from dynctl.kv.intake import Intake
from dynctl.router.config import RouterConfig
from dynctl.router.desk import Desk
from dynctl.router.prober import Prober
from dynctl.router.processes import Place, Processes
from dynctl.router.server import Entrance, bind_error
from dynctl.router.shared_books import SharedBooks
from dynctl.router.sources.direct import DirectSource
from dynctl.router.sources.relay import RelaySource, relay_context
from dynctl.router.tokens import load_tokenizer
from dynctl.router.warming import Warmer

log = logging.getLogger("dynctl.router")


_LOOK_S = 0.02
_IDLE_S = 5.0
"""After a hand-over: a client that asks nothing for so long is let go."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Unix sockets of one router, by path; None: it has none of that kind."""

    admin: str | None = None
    offer: str | None = None
    """Where it offers its port to a successor."""
    predecessor: str | None = None
    """Where the router whose port it takes over offers it."""


class Router:
    """A running router; use it as a context manager. Started means listening."""

    def __init__(
        self,
        config: RouterConfig,
        sockets: Sockets = Sockets(),
        place: Place | None = None,
    ) -> None:
        """`place`: among the processes of one port."""
        self._config = config
        self._place = place
        self._sockets = sockets
        self._offer: Offer | None = None
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.port = 0
        """Where clients connect."""
        self.desk: Desk

    async def __aenter__(self) -> Self:
        """Open the entrance and begin to watch engines; a successor first watches, then opens when it can serve.

        Raises:
            RouterError: when tokenizer, certificate or port cannot be used, or nobody hands a port over.
            DynctlError: when the policy does not exist.
        """
        config = self._config
        tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
        if tokenizer is None:
            log.warning(
                "no tokenizer: requests are routed by blocks of text, not by what engines say they hold"
            )
        self.desk = desk = Desk(config, tokenizer)
        place = self._place
        if place is not None:
            desk.books = SharedBooks(place.books, place.process, place.num_processes, desk.workers)
        entrance = Entrance(desk, place)
        self._entrance = entrance
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open(self) -> None:
        entrance, sockets = self._entrance, self._sockets
        self._zmq = zmq.Context()
        if sockets.predecessor is None:
            if sockets.admin is not None:
                await entrance.open_admin(sockets.admin)
            self.port = await entrance.open()
            self._watch = asyncio.create_task(self._watch_engines(), name="sources")
        else:
            self._watch = asyncio.create_task(self._watch_engines(), name="sources")
            # The agent bounds it: a successor that is not ready in time is ended.
            while not self._is_ready() and not self._watch.done():  # noqa: ASYNC110 - it follows from many things
                await asyncio.sleep(_LOOK_S)
            self.port = await entrance.open(await _taken(sockets.predecessor))
        if sockets.offer is not None:
            self._offer = Offer(sockets.offer, entrance.descriptors)
        if sockets.predecessor is not None and sockets.admin is not None:
            # Last of all: once it says there that it is ready, another may follow it.
            await entrance.open_admin(sockets.admin)

    def _is_ready(self) -> bool:
        return self.desk.can_serve() and not self.desk.awaits()

    async def __aexit__(self, *_: object) -> None:
        """Cut what is still under way and close everything; `drain` first for a polite end."""
        await self._close()

    async def _close(self) -> None:
        if self._offer is not None:
            self._offer.close()
        await self.desk.close(0.0)
        await self._entrance.close(0.0)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            if not self._watch.cancelled():
                self._watch.result()
        if self._zmq is not None:
            self._zmq.term()

    async def drain(self) -> None:
        """Take no more requests and let those under way end, within the configured time.

        With a successor at the port, clients first go over to it: none is refused.
        """
        limit_s = self._config.settings.drain_s
        if self._offer is not None and self._offer.is_taken:
            await self._entrance.retire(_IDLE_S, limit_s)
            # Who is still there has had the time of a drain.
            limit_s = 0.0
        self.desk.is_draining = True
        await self.desk.close(limit_s)

    async def failed(self) -> None:
        """Wait until watching the engines ends, which it only does by a fault of our own; raises it."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def _watch_engines(self) -> None:
        config, desk = self._config, self.desk
        tokenizer, settings = desk.tokens.tokenizer, config.settings
        assert self._zmq is not None
        context = relay_context(config.tls) if config.relays and config.tls else None
        intake = Intake()
        async with asyncio.TaskGroup() as group:
            if self._place is None or self._place.process == 0:
                group.create_task(Prober(desk).run(), name="probes")
                group.create_task(Warmer(desk).run(), name="warming")
            if desk.decision_log is not None:
                group.create_task(desk.decision_log.run(), name="decision log")
            for relay in config.relays:
                assert context is not None
                source = RelaySource(
                    relay, context, desk.fleet, config.deployment, tokenizer, settings, intake
                )
                group.create_task(source.run(), name=f"relay:{relay.host_name}")
            for engine in config.engines:
                direct = DirectSource(
                    engine, desk.fleet, desk.hashers, tokenizer, settings, self._zmq, intake
                )
                group.create_task(direct.run(), name=f"engine:{engine.id}")


async def _taken(predecessor: str) -> list[socket.socket]:
    try:
        return await take_over(predecessor)
    except OSError as error:
        raise RouterError(f"cannot take the port over at {predecessor}: {error}") from error


async def run_router(
    config: RouterConfig, sockets: Sockets, started: Callable[[int], None]
) -> None:
    """Run until SIGTERM or SIGINT, then drain; SIGQUIT, or Ctrl-C again, ends answers with an error at once.

    `started` gets the port once it is open.

    Raises:
        DynctlError: when it cannot start.
    """
    raise_file_limit()
    loop = asyncio.get_running_loop()
    stop, cut = asyncio.Event(), asyncio.Event()

    def interrupted() -> None:
        (cut if stop.is_set() else stop).set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    # Said twice it means no more: an agent that took over from another says it again.
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def told_to_cut() -> None:
        stop.set()
        cut.set()

    loop.add_signal_handler(signal.SIGQUIT, told_to_cut)
    if config.workers == 1:
        async with Router(config, sockets) as router:
            started(router.port)
            await _serve(router, stop, cut)
        return
    try:
        async with (
            Processes(config) as processes,
            Router(processes.config, Sockets(admin=sockets.admin), processes.place) as router,
        ):
            started(router.port)
            await _first(stop.wait(), router.failed())
            processes.drain()
            await _serve(router, stop, cut)
            if cut.is_set():
                processes.cut()
    except OSError as error:
        raise bind_error(config, error) from error


async def run_sibling(config: RouterConfig, place: Place, lifeline: int) -> None:
    """Run one more process of a port until the first one lets go of the lifeline, or a signal comes; then drain.

    Raises:
        DynctlError: when it cannot start.
    """
    raise_file_limit()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # A Ctrl-C at the terminal reaches all of them, and the first one lets the others drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_reader(lifeline, stop.set)
    try:
        async with Router(config, place=place) as router:
            await _serve(router, stop, asyncio.Event())
    finally:
        loop.remove_reader(lifeline)


async def _serve(router: Router, stop: asyncio.Event, cut: asyncio.Event) -> None:
    await _first(stop.wait(), router.failed())
    log.info("draining %d requests", len(router.desk.flights))
    await _first(router.drain(), cut.wait())


async def _first(*waits: Coroutine[None, None, object]) -> None:
    """Wait until one ends, and end the others; raises what the first one raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()
