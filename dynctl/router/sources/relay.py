"""A host's relay: its table of engines, watched; one stream of KV deltas per running engine.

A relay that does not answer makes its engines unreachable, not dead: books and blocks stay until it says otherwise.
IO: sockets (mutual TLS).
"""

import asyncio
import logging
import ssl
from collections.abc import Iterator

import msgspec

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.text import clean, is_name
from dynctl.http1.stream import open_stream
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.kv.intake import Intake
from dynctl.kv.ranks import rank_headers
from dynctl.kv.reader import BEHIND_S, trust_text
from dynctl.kv.wire import (
    ALL_MEDIA,
    FrameReader,
    Heartbeat,
    Snapshot,
    SourceHealth,
    WireError,
)
from dynctl.router.config import RelayTarget, Settings, TlsFiles
from dynctl.router.seen import NOT_YET
from dynctl.router.sources.feed import KvFeed, LostError
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.layout import is_caching
from dynctl.router.sources.parity import check_parity
from dynctl.router.sources.route import Route, limits
from dynctl.router.sources.split import num_ranks, worker_ids, workers_of
from dynctl.router.tokens import ModelTokenizer

log = logging.getLogger("dynctl.router")

_SILENCE_S = 6.0
"""The relay speaks at least every 2 s."""

_RETRY_S = 0.25
_MAX_RETRY_S = 2.0
_NO_EVENTS_RETRY_S = 10.0
_BROKEN_TRUST = 0.5
"""While the stream is broken: what was cached most probably still is."""
_MAX_LINE_BYTES = 4 * 1024**2

_decode_table = msgspec.json.Decoder(list[EngineInfo]).decode


def relay_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the TLS context towards relays: only the cluster's CA is believed, and we show our certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    return context


class RelaySource:
    """One relay; `run` until cancelled."""

    def __init__(
        self,
        target: RelayTarget,
        context: ssl.SSLContext,
        fleet: Fleet,
        deployment: str,
        tokenizer: ModelTokenizer | None,
        settings: Settings,
        intake: Intake | None = None,
    ) -> None:
        """`intake`: of all engines of this router."""
        address = Address(
            host=target.address,
            port=target.port,
            ssl=context,
            server_hostname=target.host_name,
        )
        self._name = target.host_name
        self._address = address
        self._limits = limits(settings.connect_timeout_s, is_relay=True)
        self._upstream = Upstream(address, self._limits)
        """Of the streams: tables and KV deltas."""
        self._engines: dict[str, Upstream] = {}
        """Of requests, by worker: so those of one connection, and their answers, have the same head."""
        self._leaving: list[Upstream] = []
        """Of workers the table no longer names, while requests are under way on them."""
        self._fleet = fleet
        self._deployment = deployment
        self._tokenizer = tokenizer
        self._intake = intake or Intake()
        self._known: dict[str, EngineInfo] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._is_up = False
        fleet.silent[self._name] = NOT_YET

    async def run(self) -> None:
        """Watch the relay for ever."""
        retry_s = _RETRY_S
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    if await self._watch(group):
                        retry_s = _RETRY_S
                    await asyncio.sleep(retry_s)
                    retry_s = min(retry_s * 2, _MAX_RETRY_S)
        finally:
            for upstream in (self._upstream, *self._engines.values(), *self._leaving):
                await upstream.close()

    async def _watch(self, group: asyncio.TaskGroup) -> bool:
        """Follow one connection's table; True when there was at least one line."""
        was_up = False
        rest = b""
        try:
            async with open_stream(self._upstream, "/v1/engines", _SILENCE_S) as pieces:
                async for piece in pieces:
                    lines, rest = _split_lines(rest + piece)
                    if lines:
                        # Only the newest table counts.
                        self._update(_decode_table(lines[-1]), group)
                        was_up = self._is_up = True
        except (
            UpstreamError,
            WireError,
            msgspec.MsgspecError,
            RecursionError,
        ) as error:
            self._failed(str(error), was_up=was_up)
        return was_up

    def _failed(self, reason: str, *, was_up: bool) -> None:
        """After a broken watch the next attempt tells; when that fails too, the way is down."""
        if was_up:
            return
        if self._is_up:
            log.warning("relay %s does not answer: %s", clean(self._name), clean(reason))
        self._is_up = False
        self._fleet.silent[self._name] = reason
        for name in self._engines:
            if self._fleet.owns(self._name, name):
                self._fleet.unreachable(name)

    def _update(self, infos: list[EngineInfo], group: asyncio.TaskGroup) -> None:
        mine = {
            info.id: info
            for info in infos
            if _is_sound(info) and (not self._deployment or info.deployment == self._deployment)
        }
        for engine_id in [engine_id for engine_id in self._known if engine_id not in mine]:
            self._stop(engine_id)
        names = {name for info in mine.values() for name in worker_ids(info.id, num_ranks(info))}
        for name in [name for name in self._engines if name not in names]:
            self._fleet.lost(self._name, name)
            self._leaving.append(self._engines.pop(name))
        self._close_left(group)
        for engine_id, info in mine.items():
            before = self._known.get(engine_id)
            if info == before and self._is_up:
                continue
            self._take(info, group, before)
        self._known = mine
        self._fleet.silent.pop(self._name, None)

    def _take(self, info: EngineInfo, group: asyncio.TaskGroup, before: EngineInfo | None) -> None:
        workers = workers_of(info)
        routes = [self._route(info, rank, worker.id) for rank, worker in enumerate(workers)]
        for worker, route in zip(workers, routes, strict=True):
            self._fleet.saw(self._name, worker, route)
        if not all(self._fleet.owns(self._name, worker.id) for worker in workers):
            return
        if before is not None and before.incarnation != info.incarnation:
            self._stop(info.id)
        if info.state is EngineState.READY and info.id not in self._tasks:
            tasks = [group.create_task(self._follow(info), name=f"kv:{info.id}")]
            for worker, route in zip(workers, routes, strict=True):
                engine = (worker.id, worker.incarnation, worker.model)
                parity = check_parity(self._fleet, route, engine, self._tokenizer)
                tasks += [
                    group.create_task(parity, name=f"parity:{worker.id}"),
                    group.create_task(self._ask(worker, route), name=f"layout:{worker.id}"),
                ]
            self._tasks[info.id] = tasks

    def _route(self, info: EngineInfo, rank: int, name: str) -> Route:
        upstream = self._engines.get(name)
        if upstream is None:
            upstream = self._engines[name] = Upstream(self._address, self._limits)
        stamp = (b"x-dynctl-incarnation", info.incarnation.encode())
        headers = (stamp, *rank_headers(rank, num_ranks(info)))
        return Route(upstream, f"/v1/engine/{info.id}", headers, is_relayed=True)

    def _close_left(self, group: asyncio.TaskGroup) -> None:
        """Close the pools of engines that have left, each once its last request has ended: every table is a chance to."""
        for upstream in [one for one in self._leaving if not one.num_active]:
            self._leaving.remove(upstream)
            group.create_task(upstream.close(), name="close left")

    def _stop(self, engine_id: str) -> None:
        for task in self._tasks.pop(engine_id, []):
            task.cancel()

    async def _ask(self, info: EngineInfo, route: Route) -> None:
        """Ask the engine itself whether it uses its cache: nobody else knows."""
        caching = await is_caching(route)
        worker = self._fleet.workers.get(info.id)
        if worker is not None and worker.incarnation == info.incarnation:
            self._fleet.notes_of(info.id).is_caching = caching

    async def _follow(self, info: EngineInfo) -> None:
        """Keep the index in step with one incarnation, opening the stream anew whenever it breaks."""
        fleet = self._fleet
        while True:
            retry_s = _RETRY_S
            deltas = _Deltas(fleet, info)
            names = deltas.feed.names
            fleet.reading.update(names)
            try:
                target = f"/v1/kv/{info.id}?{ALL_MEDIA.decode()}"
                async with open_stream(self._upstream, target, _SILENCE_S) as pieces:
                    async for piece in pieces:
                        deltas.judge(pieces.behind_s)
                        await self._intake.through(deltas.take(piece))
            except UpstreamError as error:
                if error.kind == "status":
                    retry_s = _NO_EVENTS_RETRY_S
                    if error.message.endswith(" 404"):
                        for name in names:
                            fleet.untold(name, info.incarnation)
                else:
                    for name in names:
                        fleet.index.believe(name, _BROKEN_TRUST)
            except (LostError, WireError) as error:
                # What is known may be wrong in any way (K2).
                for name in names:
                    fleet.index.drop(name)
                fleet.metrics.kv_frames.add("lost")
                log.warning("KV deltas of %s are read anew: %s", clean(info.id), clean(str(error)))
            await asyncio.sleep(retry_s)


class _Deltas:
    """One stream of KV frames of one incarnation, and whether it is too late to go by."""

    def __init__(self, fleet: Fleet, info: EngineInfo) -> None:
        self.feed = KvFeed(fleet.index, fleet.metrics, info.id, info.incarnation, num_ranks(info))
        self._fleet = fleet
        self._info = info
        self._reader = FrameReader()
        self._healths: dict[str, SourceHealth] = {}
        """By worker, as the relay says."""
        self._is_late = False

    def judge(self, behind_s: float) -> None:
        """Take the time since when more has been waiting than is taken: what is read late says nothing any more (K19)."""
        if (behind_s > BEHIND_S) == self._is_late:
            return
        self._is_late = not self._is_late
        text = trust_text(0.0 if self._is_late else 1.0)
        log.warning("KV deltas of %s: %s", clean(self._info.id), text)
        for name in self._healths:
            self._tell(name)

    def take(self, piece: bytes) -> Iterator[None]:
        """Apply the frames that a piece of the stream completes; others may have their turn where it yields.

        Raises:
            LostError: when the stream is to be opened anew.
            WireError: when it cannot be read on.
        """
        fleet, incarnation = self._fleet, self._info.incarnation
        for frame in self._reader.feed(piece):
            name = self.feed.name_of(frame.rank)
            if isinstance(frame, Snapshot) and frame.block_size:
                fleet.learn_block_size(name, incarnation, frame.block_size)
            elif isinstance(frame, Heartbeat):
                self._healths[name] = frame.health
                self._tell(name)
            yield from self.feed.apply(frame)
            fleet.reading.discard(name)

    def _tell(self, name: str) -> None:
        health = self._healths[name]
        if self._is_late:
            health = msgspec.structs.replace(health, trust=0.0)
        self._fleet.heard(name, self._info.incarnation, health)


def _is_sound(info: EngineInfo) -> bool:
    """Whether its names can stand in the head of a request; one that never ran has no incarnation."""
    return is_name(info.id) and (not info.incarnation or is_name(info.incarnation))


def _split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Split into whole lines and the rest.

    Raises:
        WireError: when a line does not end.
    """
    *lines, rest = data.split(b"\n")
    if len(rest) > _MAX_LINE_BYTES:
        raise WireError("a table line without end")
    return lines, rest
