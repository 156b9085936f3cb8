"""A server with exact delays: the oracle of the bench tests. Its tokens are words, a start, and wrappers around messages."""

import asyncio
import contextlib
import json
import tempfile
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynctl.http1.server import serve
from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.run import Router, Sockets
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.options import MODEL_DIR, SimOptions
from dynctl.sim.text import TextModel


@dataclass
class FakeServer:
    """OpenAI-shaped, streaming only; every delay and count is set by the test."""

    ttft_s: float = 0.02
    gap_s: float = 0.005
    tokens_per_chunk: int = 1
    lead: int = 1
    """Tokens before everything."""
    wrapper: tuple[int, int] = (3, 1)
    """Tokens of a message's header and of its close."""
    tokens_per_word: int = 1
    splits: bool = False
    """Words with an `o` cost a token more."""
    sends_usage: bool = True
    refuses_extensions: bool = False
    models: tuple[str, ...] = ("fake",)
    max_model_len: int | None = None
    faults: list[str] = field(default_factory=list)
    """Faults of the next generating requests, in order: `503`, `die`, `error`, `no-done`, `empty`, `hang`, ``."""
    metrics: str | None = None
    block_size: int = 16
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    url: str = ""
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    async def handle(self, reader, writer):
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.transport.abort()

    async def _one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        self.paths.append(path)
        self.headers.append(head)
        length = next(
            (
                int(h.split(b":")[1])
                for h in head.lower().split(b"\r\n")
                if h.startswith(b"content-length")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        if method == "GET":
            return self._get(path, writer)
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else ""
        extensions = {"ignore_eos", "min_tokens"} & body.keys()
        if self.refuses_extensions and (
            extensions or "continuous_usage_stats" in body.get("stream_options", {})
        ):
            return self._answer(writer, 400, {"error": {"message": "Unrecognized argument"}})
        if fault == "503":
            return self._answer(writer, 503, {"error": {"message": "no engine is ready"}})
        return await self._stream(path, body, fault, writer)

    def _get(self, path, writer):
        if path == "/v1/models":
            entry = {"max_model_len": self.max_model_len} if self.max_model_len else {}
            return self._answer(writer, 200, {"data": [{"id": m, **entry} for m in self.models]})
        if path == "/version":
            return self._answer(writer, 200, {"version": "1.2.3"})
        if path == "/metrics" and self.metrics is not None:
            return self._answer(writer, 200, self.metrics)
        return self._answer(writer, 404, {"error": {"message": "not found"}})

    def _answer(self, writer, status, value):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        return True

    async def _stream(self, path, body, fault, writer):
        def send(value):
            data = (
                value
                if isinstance(value, bytes)
                else b"data: " + json.dumps(value).encode() + b"\n\n"
            )
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))

        is_chat = "chat" in path
        tokens = self._tokens(body)
        prompt_tokens, cached = len(tokens), self._cached(tokens)
        num = body["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if is_chat:
            send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        send(b": keep-alive\n\n")
        await writer.drain()
        if fault == "hang":
            await asyncio.sleep(3600)
        await asyncio.sleep(self.ttft_s)
        sent = 0
        while sent < num and fault != "empty":
            sent = min(num, sent + self.tokens_per_chunk)
            text = f"w{sent} "
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
            options = body.get("stream_options", {})
            send(
                {"choices": [choice]}
                | (
                    {"usage": usage}
                    if options.get("continuous_usage_stats") and self.sends_usage
                    else {}
                )
            )
            await writer.drain()
            if fault == "die":
                writer.transport.abort()
                return False
            if fault == "error":
                send({"error": {"message": "engine lost", "type": "x"}})
                break
            if sent < num:
                await asyncio.sleep(self.gap_s)
        if self.sends_usage:
            details = {"cached_tokens": cached}
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": sent,
                "prompt_tokens_details": details,
            }
            send({"choices": [], "usage": usage})
        if fault not in {"error", "no-done"}:
            send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _tokens(self, body):
        header, close = self.wrapper
        tokens = ["<s>"] * self.lead
        if "prompt" in body:
            return tokens + self._words(body["prompt"])
        for message in body["messages"]:
            tokens += [f"<{message['role']}>"] * header
            tokens += self._words(message["content"]) + ["</>"] * close
        return tokens + ["<assistant>"] * header

    def _words(self, text):
        return [
            token
            for word in text.split()
            for token in [word] * (self.tokens_per_word + (self.splits and "o" in word))
        ]

    def _cached(self, tokens):
        """Count the tokens of whole blocks seen before, never the last token; remember the rest."""
        found, whole = 0, True
        for end in range(self.block_size, len(tokens), self.block_size):
            key = tuple(tokens[:end])
            whole = whole and key in self._seen
            found = end if whole else found
            self._seen.add(key)
        return found


@pytest.fixture
def with_server():
    """Run `scenario(server)` against a fake server made with the given settings."""

    def run(scenario, **settings):
        async def main():
            fake = FakeServer(**settings)
            server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            fake.url = f"http://{host}:{port}"
            try:
                return await scenario(fake)
            finally:
                server.close()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                await asyncio.sleep(0)  # transports close one turn of the loop later

        return asyncio.run(main())

    return run


@pytest.fixture
def served():
    """Start fake servers in a thread of their own, for tests that run the command line in this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def start(**settings):
        fake = FakeServer(**settings)

        async def listen():
            server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            fake.url = f"http://{host}:{port}"
            servers.append(server)

        asyncio.run_coroutine_threadsafe(listen(), loop).result(60)
        return fake

    async def end():
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)

    yield start
    asyncio.run_coroutine_threadsafe(end(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


@pytest.fixture
def short_dir():
    """A folder whose paths fit a Unix socket address."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="bn") as path:
        yield Path(path)


NUM_ENGINES = 3


async def _start(stack, directory):
    """Start engines and a router; say where the router is."""
    text, targets = TextModel(MODEL_DIR), []
    for number in range(NUM_ENGINES):
        name = f"e{number}"
        options = SimOptions(
            uds=f"{directory}/{name}.sock",
            kv_events=f"ipc://{directory}/{name}.kv",
            kv_replay=f"ipc://{directory}/{name}.re",
            prefill_us_per_token=20.0,
            prefill_base_ms=0.5,
            decode_ms=0.5,
        )
        engine = SimEngine(options, text)
        server = await serve(Api(engine).handle, path=options.uds)
        stack.push_async_callback(server.close, 0)
        await engine.start()
        stack.push_async_callback(engine.close)
        targets.append(
            EngineTarget(
                id=name,
                url=f"unix:{options.uds}",
                kv_events=options.kv_events,
                kv_replay=options.kv_replay,
            )
        )
    config = RouterConfig(
        listen="127.0.0.1:0",
        policy="prefix",
        tokenizer=str(MODEL_DIR),
        engines=tuple(targets),
        settings=make_settings({"engine_poll_s": 0.1, "probe_s": 0}),
    )
    router = Router(config, Sockets(admin=f"{directory}/admin.sock"))
    return await stack.enter_async_context(router)


@pytest.fixture
def routed(short_dir, until):
    """A router with engines in a thread of their own; yields its address, admin socket and itself."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    router = asyncio.run_coroutine_threadsafe(_start(stack, short_dir), loop).result(60)
    try:
        workers = router.desk.workers
        until(
            lambda: (
                len(workers.all()) == NUM_ENGINES and all(w.is_serving() for w in workers.all())
            ),
            "all engines serve",
        )
        yield f"http://127.0.0.1:{router.port}", f"{short_dir}/admin.sock", router
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
