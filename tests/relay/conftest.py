"""A relay between a fake agent, fake engines on Unix sockets, and router clients."""

import asyncio
import ssl
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uvloop
import zmq

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.__main__ import server_context
from dynctl.agents.relay.feed import TableFeed
from dynctl.agents.relay.relay import Relay
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import BlockStored, EngineBlockHash
from dynctl.deploy.tls import ensure_authority, ensure_leaf
from dynctl.http1.server import Exchange, ServerLimits, serve
from dynctl.http1.upstream import Address, Upstream
from dynctl.kv.events import EventBatch
from dynctl.kv.publisher import EventPublisher
from dynctl.kv.ranks import endpoint_of


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """An agent's directory with the certificates a host has, and those of clients beside them."""
    folder = tmp_path_factory.mktemp("root")
    authority = ensure_authority(folder / "ca")
    tls = folder / "tls"
    tls.mkdir()
    (tls / "ca.crt").write_bytes(authority.cert)
    parties = {
        "host": "relay:host-a",
        "router": "router:r0",
        "other": "operator:o",
        "relay": "relay:host-b",
        "member": "member:host-b",
    }
    for name, common_name in parties.items():
        pair = ensure_leaf(folder / "ca", authority, common_name, "host-a", None)
        (tls / f"{name}.crt").write_bytes(pair.cert)
        (tls / f"{name}.key").write_bytes(pair.key)
    return folder


@pytest.fixture
def short_dir():
    """A folder whose paths fit a Unix socket address."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="dr") as folder:
        yield Path(folder)


@pytest.fixture
def run():
    """Run a coroutine function on uvloop, as the relay does; leftover tasks fail the test."""

    def run_on_loop(main):
        async def guarded():
            faults = []
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            async with asyncio.timeout(150):
                await main()
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left: {left}"
            assert not faults, faults

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(guarded())

    return run_on_loop


def client_context(root: Path, name: str | None = "router") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=root / "tls/ca.crt")
    if name:
        context.load_cert_chain(root / f"tls/{name}.crt", root / f"tls/{name}.key")
    return context


def make_entry(engine_id: str, incarnation: str, socket: Path | str, **more) -> RelayEntry:
    state = more.pop("state", EngineState.READY)
    info = EngineInfo(
        id=engine_id,
        incarnation=incarnation,
        state=state,
        role="aggregated",
        deployment="d",
        kind="sim",
        model="m",
        block_size_tokens=more.pop("block_size", 4),
        ranks=more.pop("ranks", 1),
    )
    return RelayEntry(info=info, socket=str(socket), **more)


def stored(first: int, num_blocks: int, parent: int | None = None, block_size: int = 4):
    """An event whose block hashes and tokens count up from `first`."""
    hashes = tuple(EngineBlockHash(first + n) for n in range(num_blocks))
    tokens = tuple(range(first * block_size, (first + num_blocks) * block_size))
    parent_hash = None if parent is None else EngineBlockHash(parent)
    return BlockStored(hashes, parent_hash, tokens, block_size, medium="GPU")


class FakeAgent:
    """Serves a table that tests change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: list[RelayEntry] = []
        self._streams: list[Exchange] = []
        self._server = None

    async def start(self) -> None:
        self._server = await serve(self._handle, path=self.path)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close(0)
            self._server = None
        self._streams.clear()

    def set(self, *entries: RelayEntry) -> None:
        self._entries = list(entries)
        for stream in self._streams:
            stream.write(self._line())

    def say(self, line: bytes) -> None:
        for stream in self._streams:
            stream.write(line)

    def _line(self) -> bytes:
        return msgspec.json.encode(self._entries) + b"\n"

    def _handle(self, exchange: Exchange) -> None:
        if exchange.request.path != "/v1/relay-table":
            exchange.respond(404, b"")
            return
        exchange.start(200, [(b"content-type", b"application/x-ndjson")])
        exchange.write(self._line())
        self._streams.append(exchange)


class Sink:
    """Collects an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.error = None
        self.over = asyncio.Event()

    def on_head(self, status, headers):
        self.status, self.headers = status, dict(headers)

    def on_data(self, data):
        self.body += data

    def on_end(self):
        self.over.set()

    def on_error(self, error):
        self.error = error
        self.over.set()


class Bench:
    """Everything a relay test needs."""

    def __init__(self, stack: AsyncExitStack, root: Path, folder: Path) -> None:
        self._stack = stack
        self._root = root
        self.folder = folder
        self.agent = FakeAgent(folder / "a")
        self.relay = None
        self.server = None
        self.zmq = zmq.Context()

    async def open(self) -> None:
        await self.agent.start()
        self._stack.push_async_callback(self.agent.stop)
        self._stack.callback(self.zmq.destroy, 0)
        self.relay = Relay()
        self._stack.push_async_callback(self.relay.close)
        feed = TableFeed(str(self.agent.path), self.relay.take_table)
        self._stack.push_async_callback(feed.close)
        self.server = await serve(
            self.relay.handle,
            host="127.0.0.1",
            port=0,
            ssl=server_context(self._root / "tls"),
            admit=self.relay.admit,
            limits=ServerLimits(linger_s=0.2),
        )
        self._stack.push_async_callback(self.server.close, 0)
        feed.start()
        self.pool = self.client("router")

    def client(self, name: str | None) -> Upstream:
        address = Address(
            "127.0.0.1",
            self.server.port,
            ssl=client_context(self._root, name),
            server_hostname="host-a",
        )
        pool = Upstream(address)
        self._stack.push_async_callback(pool.close)
        return pool

    async def engine(self, name: str, handler) -> Path:
        path = self.folder / name
        server = await serve(handler, path=path)
        self._stack.push_async_callback(server.close, 0)
        return path

    def publisher(self, name: str, rank: int = 0) -> EventPublisher:
        places = [endpoint_of(f"ipc://{self.folder}/{name}.{end}", rank) for end in "er"]
        publisher = EventPublisher(*places, "kv", context=self.zmq)
        publisher.start()
        self._stack.callback(publisher.close)
        return publisher

    def publish(self, publisher: EventPublisher, *events, rank: int = 0) -> int:
        return publisher.publish(EventBatch(0.0, events, rank))

    def open_stream(self, target: str, pool: Upstream | None = None, headers=()):
        sink = Sink()
        call = (pool or self.pool).send("GET", target, headers, b"", sink)
        return sink, call

    async def until(self, condition) -> None:
        """Wait for a condition; the test's own timeout catches one that never comes."""
        while not condition():
            await asyncio.sleep(0.01)

    async def until_listening(self, path: Path) -> None:
        """Wait for a socket's server: its file is there a moment before it."""
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.01)
                continue
            writer.close()
            await writer.wait_closed()
            return

    async def settle(self, *entries: RelayEntry) -> None:
        """Set the table and wait until the relay's watchers would see it."""
        self.agent.set(*entries)
        wanted = {(entry.info.id, entry.info.incarnation, entry.info.state) for entry in entries}

        def is_there() -> bool:
            infos = [engine.entry.info for engine in self.relay._engines.values()]
            return {(info.id, info.incarnation, info.state) for info in infos} == wanted

        await self.until(is_there)


@pytest.fixture
def bench(root, short_dir):
    """A context manager that gives an open Bench."""

    @asynccontextmanager
    async def opened():
        async with AsyncExitStack() as stack:
            one = Bench(stack, root, short_dir)
            await one.open()
            yield one

    return opened


@pytest.fixture
def entry_of():
    return make_entry


@pytest.fixture
def blocks():
    return stored
