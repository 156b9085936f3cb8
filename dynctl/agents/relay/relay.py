"""The relay: which requests are answered, and by which engine of the table.

Not here: process start (`__main__`), the byte path (`forward`), KV frames (`kv_source`).
IO: sockets (through http1), zmq sockets (through kv).
"""

import asyncio
from dataclasses import dataclass
from functools import partial

import zmq

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.emptied import watch_cache
from dynctl.agents.relay.forward import INCARNATION, PATHS, Way, refuse
from dynctl.agents.relay.kv_source import KvSource
from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.agents.relay.table import address_of, is_same_run, write_line
from dynctl.http1.message import Header, error_body
from dynctl.http1.server import Exchange, Rejection, Request
from dynctl.http1.upstream import Upstream, UpstreamLimits
from dynctl.kv.emptied import LOOK_S
from dynctl.kv.intake import Intake
from dynctl.kv.wire import ALL_MEDIA

PEER_PREFIX, MEMBER_PREFIX = "router:", "member:"
"""Only certificates of these kinds may use the relay; those of hosts may only ask how members of gangs stand."""
ENGINES, MEMBERS = "/v1/engines", "/v1/members"
BEAT_S = 1.0
"""Routers take 2 s without a line for a fault."""

_ENGINE_LIMITS = UpstreamLimits(max_connections=4096, silence_timeout_s=3600.0)
_MAX_PAUSED_TABLE_BYTES = 1024 * 1024
_MAX_WAYS = 1024
"""Routers, engines and paths make few; nobody may make them many."""


@dataclass(slots=True)
class _Engine:
    """One incarnation and the way to it."""

    entry: RelayEntry
    upstream: Upstream | None
    source: KvSource | None
    watch: asyncio.Task[None] | None
    """Of its cache, beside its events."""


class Relay:
    """Answers routers; `close` it."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        """`look_s`: between looks at each engine's figures."""
        self._look_s = look_s
        self._engines: dict[str, _Engine] = {}
        self._ways: dict[tuple[str, bytes, tuple[Header, ...]], Way] = {}
        """By method, target and fields: requests that were let through under the present table."""
        self._watchers: dict[Exchange, str] = {}
        """With the path each asked for."""
        self._lines = {ENGINES: write_line([]), MEMBERS: write_line([])}
        self.metrics = RelayMetrics()
        self._intake = Intake()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._closing: set[asyncio.Task[None]] = set()
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)

    def admit(self, request: Request) -> Rejection | None:
        """Turn away who is neither a router nor a host that asks for members, before a body is read."""
        if request.peer_name.startswith(PEER_PREFIX):
            return None
        if request.peer_name.startswith(MEMBER_PREFIX) and request.path == MEMBERS:
            return None
        return Rejection(403, error_body("only routers of this cluster may ask", "forbidden"))

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = exchange.request
        way = self._ways.get((request.method, request.target, request.headers))
        if way is not None:
            way.forward(exchange)
            return
        if request.path in self._lines:
            self._watch(exchange)
            return
        match request.path.split("/", 4):
            case ["", "v1", "engine", engine_id, path] if path in PATHS:
                if request.method != PATHS[path]:
                    refuse(exchange, 405, "method", f"{path} is asked by {PATHS[path]}")
                elif engine := self._find(exchange, engine_id):
                    self._forward(exchange, engine, path)
            case ["", "v1", "kv", engine_id]:
                if engine := self._find(exchange, engine_id):
                    self._subscribe(exchange, engine)
            case _:
                refuse(exchange, 404, "path", "nothing is relayed under this path")

    def handle_admin(self, exchange: Exchange) -> None:
        """Answer whoever runs the host, on its own socket: figures, and that the relay lives."""
        match (exchange.request.method, exchange.request.path):
            case ("GET", "/metrics"):
                exchange.respond(200, self._exposition(), b"text/plain; version=0.0.4")
            case ("GET", "/health"):
                exchange.respond(200, b'{"status":"ok"}')
            case _:
                refuse(exchange, 404, "path", "there are /health and /metrics")

    def _exposition(self) -> bytes:
        sources = {k: e.source for k, e in self._engines.items() if e.source is not None}
        routers = {engine: float(source.num_subscribers) for engine, source in sources.items()}
        trusts = {engine: source.trust for engine, source in sources.items()}
        return self.metrics.exposition(
            {
                "engines": ("Engines in the table.", "", {"": float(len(self._engines))}),
                "kv_routers": ("Routers that follow an engine's cache.", "engine", routers),
                "kv_trust": ("How far an engine's cache is known.", "engine", trusts),
            }
        )

    def take_table(self, table: dict[str, RelayEntry]) -> None:
        """Bring engines in line with the agent's table, and tell watchers."""
        members = [entry.member for entry in table.values() if entry.member is not None]
        table = {name: entry for name, entry in table.items() if not entry.is_led}
        self._ways.clear()
        for engine_id in [one for one in self._engines if one not in table]:
            self._end(self._engines.pop(engine_id))
        for engine_id, entry in table.items():
            engine = self._engines.get(engine_id)
            if engine is not None and is_same_run(engine.entry, entry):
                engine.entry = entry
                continue
            if engine is not None:
                self._end(engine)
            self._engines[engine_id] = self._begin(entry)
        lines = {
            ENGINES: write_line([engine.entry.info for engine in self._engines.values()]),
            MEMBERS: write_line(members),
        }
        if lines != self._lines:
            self._lines = lines
            self._tell_watchers()

    def end_streams(self) -> None:
        """End what never ends by itself, so that the server can drain: watches and KV streams. Requests go on."""
        self._is_closing = True
        for exchange in tuple(self._watchers):
            self._watchers.pop(exchange, None)
            exchange.on_gone = None
            exchange.finish()
        for engine in self._engines.values():
            self._end_source(engine)

    async def close(self) -> None:
        """Close the ways to all engines; called after the server."""
        self._beat_timer.cancel()
        self.end_streams()
        for engine in self._engines.values():
            self._end(engine)
        self._engines.clear()
        if self._closing:
            await asyncio.wait(self._closing)
        self._context.destroy(linger=0)

    # Requests…

    def _find(self, exchange: Exchange, engine_id: str) -> _Engine | None:
        """Return the engine meant, or answer why there is none."""
        engine = self._engines.get(engine_id)
        if engine is None:
            refuse(exchange, 404, "engine", "no such engine on this host")
            return None
        present = engine.entry.info.incarnation
        asked = exchange.request.header(INCARNATION)
        if asked is not None and asked != present.encode():
            refuse(exchange, 409, "incarnation", f"the engine's incarnation is {present or 'none'}")
            return None
        return engine

    def _forward(self, exchange: Exchange, engine: _Engine, path: str) -> None:
        if engine.upstream is None:
            refuse(exchange, 503, "not_running", "the engine is not running")
            return
        request, incarnation = exchange.request, engine.entry.info.incarnation
        way = Way(engine.upstream, request, path, incarnation, self.metrics)
        if len(self._ways) >= _MAX_WAYS:
            self._ways.clear()
        self._ways[request.method, request.target, request.headers] = way
        way.forward(exchange)

    def _subscribe(self, exchange: Exchange, engine: _Engine) -> None:
        if exchange.request.method != "GET":
            refuse(exchange, 405, "method", "KV streams are asked by GET")
        elif engine.source is None:
            refuse(exchange, 404, "no_events", "the engine publishes no KV events now")
        else:
            headers = [
                (b"content-type", b"application/octet-stream"),
                (INCARNATION, engine.entry.info.incarnation.encode()),
            ]
            wants_all = exchange.request.query == ALL_MEDIA
            engine.source.subscribe(exchange, headers, wants_all=wants_all)

    def _watch(self, exchange: Exchange) -> None:
        if exchange.request.method != "GET":
            refuse(exchange, 405, "method", "the table is asked by GET")
            return
        if self._is_closing:
            refuse(exchange, 503, "closing", "the relay is stopping")
            return
        exchange.must_close = True
        exchange.on_gone = partial(self._leave, exchange)
        exchange.start(200, [(b"content-type", b"application/x-ndjson")])
        exchange.write(self._lines[exchange.request.path])
        self._watchers[exchange] = exchange.request.path

    def _leave(self, exchange: Exchange) -> None:
        self._watchers.pop(exchange, None)

    def _tell_watchers(self) -> None:
        for exchange, path in tuple(self._watchers.items()):
            # Each line is the whole table: one who is behind needs only the next.
            if exchange.unsent_bytes < _MAX_PAUSED_TABLE_BYTES:
                exchange.write(self._lines[path])

    def _beat(self) -> None:
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)
        self._tell_watchers()
        for engine in self._engines.values():
            if engine.source is not None:
                engine.source.beat()

    # Engines…

    def _begin(self, entry: RelayEntry) -> _Engine:
        address = address_of(entry) if entry.info.incarnation else None
        upstream = Upstream(address, _ENGINE_LIMITS) if address is not None else None
        source = None
        if entry.info.incarnation and entry.kv_events:
            source = KvSource(entry, self._context, self._intake, self.metrics)
            source.start()
        watch = None
        if source is not None and upstream is not None:
            watch = self._loop.create_task(
                watch_cache(upstream, source, entry.info.id, self._look_s),
                name=f"cache:{entry.info.id}",
            )
        return _Engine(entry, upstream, source, watch)

    def _end_source(self, engine: _Engine) -> None:
        if engine.watch is not None:
            engine.watch.cancel()
            self._closing.add(engine.watch)
            engine.watch.add_done_callback(self._closing.discard)
            engine.watch = None
        if engine.source is not None:
            engine.source.close()
            engine.source = None

    def _end(self, engine: _Engine) -> None:
        """Drop an incarnation: its process is gone, so calls to it cannot end well."""
        self._end_source(engine)
        if engine.upstream is not None:
            task = self._loop.create_task(
                engine.upstream.close(), name=f"close:{engine.entry.info.id}"
            )
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
