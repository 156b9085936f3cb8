"""A router before scripted engines, and a plain client."""

import asyncio
import json
from contextlib import asynccontextmanager

from router_fakes import MODEL

from dynctl.http1.upstream import Address, Upstream
from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.run import Router


class Client:
    """Speaks to one router."""

    def __init__(self, port):
        self.upstream = Upstream(Address(host="127.0.0.1", port=port))

    async def post(self, path, body, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = [(b"content-type", b"application/json")]
        fields = [f for f in fields if f[0].decode() not in {k.replace("_", "-") for k in headers}]
        fields += [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return await self.upstream.fetch("POST", path, fields, content, timeout_s=60)

    async def get(self, path, **headers):
        fields = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return await self.upstream.fetch("GET", path, fields, timeout_s=60)

    async def complete(self, **body):
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hello", **body})

    async def chat(self, **body):
        messages = [{"role": "user", "content": "hello"}]
        return await self.post(
            "/v1/chat/completions", {"model": MODEL, "messages": messages, **body}
        )


class Bench:
    """One router, its engines, a client."""

    def __init__(self, router, engines, client):
        self.router = router
        self.engines = engines
        self.client = client

    @property
    def desk(self):
        # Whoever looks at books has them kept before.
        self.router.desk.afterwards.keep()
        return self.router.desk

    def assert_books_balance(self):
        assert not self.desk.flights
        assert not len(self.desk.line)
        assert self.desk.budget.num_retrying == 0
        for worker in self.desk.workers.all():
            assert worker.active_requests == 0, worker.id
            assert worker.active_tokens == 0, worker.id
            assert worker.pending_prefill_tokens == 0, worker.id


async def until(condition, timeout_s=60.0):
    """Wait until a condition holds; a hang fails the test."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def routed(*engines, settings=None, wait=True, **options):
    """Engines started, a router before them, everything closed again."""
    for engine in engines:
        await engine.start()
    targets = tuple(EngineTarget(id=e.name, url=e.url, role=e.role) for e in engines)
    config = RouterConfig(
        listen="127.0.0.1:0",
        engines=targets,
        settings=make_settings(
            {"engine_poll_s": 0.05, "conditional_prefill": 0, "probe_s": 0} | (settings or {})
        ),
        **options,
    )
    async with Router(config) as router:
        client = Client(router.port)
        try:
            if wait:
                await until(
                    lambda: (
                        all(w.is_serving() for w in router.desk.workers.all())
                        and len(router.desk.workers.all()) == len(engines)
                    )
                )
            yield Bench(router, engines, client)
        finally:
            await client.upstream.close()
            for engine in engines:
                await engine.stop()


def events(body):
    """The data of a stream's events."""
    found = []
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: "):
            found.append(event[6:])
    return found


def text_of(body):
    """The text a stream carried."""
    parts = []
    for data in events(body):
        if data == b"[DONE]":
            continue
        for choice in json.loads(data).get("choices", []):
            parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(parts)
