"""A simulated engine with one thing wrong, and what is to be said of it: processes, and what stands between them and a router."""

import asyncio
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from dynctl.http1.server import serve
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.sim.options import MODEL_DIR

SPEED_MS = {"prefill-base-ms": 0.5, "decode-ms": 1}
SPEED_US = {"prefill-us-per-token": 20, "decode-us-per-seq": 5}
SPEED = [f"--{name}={value}" for name, value in (SPEED_MS | SPEED_US).items()]
JSON = ((b"content-type", b"application/json"),)


@dataclass(frozen=True)
class Cause:
    """One thing wrong with an engine, and the name it is to be shown under; none: nothing is wrong."""

    name: str
    shown: str
    flags: tuple[str, ...] = ()
    """Of the engine; `{folder}` holds other models."""
    has_events: bool = True
    is_passed: bool = False
    """Its events come by way of something that stands and listens whether there are any or not."""
    topic: str = ""
    """Of the events, as the router has it."""
    fault: str = ""
    """Told to the running engine, which is then not started anew."""
    has_replay: bool = True
    is_relayed: bool = False
    entry: dict = field(default_factory=dict)
    """What its agent says of it otherwise."""
    salt: str = ""
    """Something before the engine gives every request a cache salt."""
    is_newer: bool = False
    """It publishes events of a kind that nobody knows here; they are made so on their way."""


def other_models(folder):
    """One whose words have each other's ids, and one whose chats begin otherwise."""
    words, chats = folder / "words", folder / "chats"
    for model in (words, chats):
        shutil.copytree(MODEL_DIR, model)
    tokenizer = json.loads((words / "tokenizer.json").read_bytes())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    plain = [word for word in vocabulary if word not in special]
    ids = [vocabulary[word] for word in plain]
    vocabulary.update(zip(plain, ids[1:] + ids[:1], strict=True))
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((chats / "tokenizer_config.json").read_bytes())
    config["chat_template"] = "Once upon a time. " + config["chat_template"]
    (chats / "tokenizer_config.json").write_text(json.dumps(config))


class Process:
    """A process whose output goes to a file."""

    def __init__(self, log):
        self._log, self._process = log, None

    async def start(self, *command, ready=b""):
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *map(str, command), stdout=asyncio.subprocess.PIPE if ready else log, stderr=log
            )
        if ready:
            line = await asyncio.wait_for(self._process.stdout.readline(), 60)
            if not line.startswith(ready):
                raise SystemExit(self._log.read_text()[-2000:])

    async def stop(self):
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Engine:
    """A simulated engine, with what stands between it and the router."""

    def __init__(self, name, folder, models):
        self.name, self._models = name, models
        self._http, self.control = f"{folder}/{name}.http", f"{folder}/{name}.control"
        self.events, self.replay = f"ipc://{folder}/{name}.kv", f"ipc://{folder}/{name}.replay"
        self.http, self.passed = f"{folder}/{name}.front", f"ipc://{folder}/{name}.passed"
        self.salt, self.is_newer = "", False
        self._process = Process(Path(folder, f"{name}.log"))
        self._upstream = Upstream(Address(path=self._http))
        self._tasks = set()

    async def enter(self, stack):
        """Open what the router reaches."""
        stack.push_async_callback(self._process.stop)
        stack.push_async_callback(self._upstream.close)
        server = await serve(self._handle, path=self.http)
        stack.push_async_callback(server.close, 0)
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        passing = asyncio.create_task(self._pass_events(context))
        stack.push_async_callback(ended, passing)

    async def start(self, cause):
        command = [sys.executable, "-m", "dynctl.sim", "--uds", self._http, *SPEED]
        command += ["--control", self.control]
        if cause.has_events:
            command += ["--kv-events", self.events, "--kv-replay", self.replay]
        self.salt, self.is_newer = cause.salt, cause.is_newer
        command += ["--topic", cause.topic]
        command += [flag.format(folder=self._models) for flag in cause.flags]
        await self._process.start(*command, ready=b"ready")

    async def stop(self):
        await self._process.stop()

    def _handle(self, exchange):
        task = asyncio.create_task(self._forward(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, exchange):
        request, body = exchange.request, exchange.request.body
        if self.salt and request.path.endswith("/completions"):
            body = json.dumps(json.loads(body) | {"cache_salt": self.salt}).encode()
        try:
            answer = await self._upstream.fetch(request.method, request.path, JSON, body, 30.0)
        except UpstreamError as error:
            exchange.respond(502, str(error).encode())
            return
        if not exchange.is_gone:
            exchange.respond(answer.status, answer.body, dict(answer.headers)[b"content-type"])

    async def _pass_events(self, context):
        source, target = context.socket(zmq.SUB), context.socket(zmq.PUB)
        source.subscribe(b"")
        source.connect(self.events)
        target.bind(self.passed)
        while True:
            topic, seq, payload = await source.recv_multipart()
            if self.is_newer:
                payload = msgspec.msgpack.encode([0.0, [{"type": "PageHeld", "page": 1}], 0])
            await target.send_multipart([topic, seq, payload])


async def ended(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
