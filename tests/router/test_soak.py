"""Everything at once, for minutes of the loop's own clock: nothing of any request may stay behind.

Streams last long enough for every tick, look and deadline of the router to fall between any two of their events.
"""

import asyncio
import json
import logging
import os
import random
import socket
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from router_bench import Bench, events, routed, until
from router_clock import JumpingLoop
from router_fakes import MODEL, FakeEngine

from dynctl.core.deployment import EngineState
from dynctl.http1.server import serve
from dynctl.http1.upstream import Address, Upstream
from dynctl.router.run import Router
from dynctl.router.shared_books import SharedBooks, make_books

SEEDS = [int(seed) for seed in os.environ.get("DYNCTL_SOAK_SEEDS", "1").split()]
"""A longer soak is one with more of them."""

LASTS_S = 60.0
"""Requests begin for so long, of the loop's clock."""

SETTINGS = {
    "max_retries": 1,
    "first_token_timeout_s": 4.0,
    "gap_timeout_s": 2.0,
    "body_timeout_s": 5.0,
    "queue_timeout_s": 1.0,
    "kv_lease_s": 2.0,
    "kv_lease_margin_s": 0.5,
    "engine_poll_s": 0.3,
    "max_requests_per_engine": 5,
    "queue_limit": 12,
    "priority_ageing_s": 0.5,
    "session_ttl_s": 3.0,
    "probe_s": 3.0,
    "drain_s": 1.0,
}
QUIET_S = 90.0
"""Longer than any deadline, breaker or look."""

FAULTS = (
    *("refuse", "status:500", "status:503", "stall", "html", "no-done", "cut:0", "cut:2"),
    *("error:0", "error:1", "early-done", "no-end", "hang:0", "hang:1", "hang:3"),
)
GAPS_S = (0.0, 0.0, 0.005, 0.02, 0.1, 0.3, 0.5, 0.7)
LARGE = "x" * 150_000
"""Beyond what a connection's buffers hold, after a few."""


def text_of_token(seed, number, is_large):
    return f" {seed}.{number}{LARGE if is_large else ''}"


def text_of(body):
    is_large = body.get("user") == "large"
    return "".join(text_of_token(body["seed"], i, is_large) for i in range(body["max_tokens"]))


class Restless(FakeEngine):
    """What it says follows from the request alone; when, and whether at all, from chance."""

    def __init__(self, name, role, seed, is_well):
        super().__init__(name, role)
        self.seed = seed
        self.is_well = is_well
        self.attempts = {}

    async def restart(self, away_s):
        """Cut everybody, and come back at the same place as another start."""
        for task in tuple(self._tasks):
            task.cancel()
        port = self.server.port
        await self.server.close(0)
        await asyncio.sleep(away_s)
        self.server = await serve(self._on_exchange, host="127.0.0.1", port=port)

    async def _answer(self, exchange, body, is_chat):
        if "seed" not in body:
            # A question of the router's own.
            await super()._answer(exchange, body, is_chat)
            return
        # The same for the same request, whatever came before it.
        self.attempts[body["seed"]] = number = self.attempts.get(body["seed"], 0) + 1
        rng = random.Random(f"{self.name} {self.seed} {body['seed']} {number}")
        fault = None if self.is_well or rng.random() < 0.6 else rng.choice(FAULTS)
        one = _Answering(self, body, rng)
        await asyncio.sleep(rng.choice(GAPS_S))
        one.script = lambda _: fault
        await one._answer(exchange, body, is_chat)


class _Answering(FakeEngine):
    """One answer of an engine, with its own number of tokens and gaps."""

    def __init__(self, engine, body, rng):
        super().__init__(engine.name, engine.role, tokens=body["max_tokens"])
        self.body = body
        self.rng = rng
        self.requests = engine.requests
        self.most_s = rng.choice(GAPS_S)

    @property
    def gap_s(self):
        return min(self.rng.choice(GAPS_S), self.most_s)

    @gap_s.setter
    def gap_s(self, _):
        pass

    def chunk(self, is_chat, text, finish=None, **extra):
        number = int(text.removeprefix(f" {self.name}"))
        text = text_of_token(self.body["seed"], number, self.body.get("user") == "large")
        return super().chunk(is_chat, text, finish, **extra)

    def _whole(self, is_chat):
        whole = super()._whole(is_chat)
        choice = whole["choices"][0]
        if is_chat:
            choice["message"]["content"] = text_of(self.body)
        else:
            choice["text"] = text_of(self.body)
        return whole


class Visit:
    """One request of a client, who may leave or read slowly; receives its answer."""

    def __init__(self, seed, number):
        rng = self.rng = random.Random(f"visit {seed} {number}")
        self.is_stream = rng.random() < 0.7
        self.is_chat = rng.random() < 0.5
        self.is_large = self.is_stream and rng.random() < 0.08
        self.leaves_s = rng.uniform(0.001, 2.0) if rng.random() < 0.2 else None
        self.rests_s = rng.uniform(0.2, 4.0) if self.is_large or rng.random() < 0.05 else 0.0
        self.body = self._body(number)
        self.status = 0
        self.content = bytearray()
        self.error = None
        self.has_left = False
        self.over = asyncio.Event()
        self.num_ends = 0

    def _body(self, seed):
        rng = self.rng
        text = "word " * rng.choice((1, 4, 20, 200, 1000))
        body = {"model": MODEL, "seed": seed, "max_tokens": rng.randint(1, 8)}
        if self.is_large:
            body |= {"user": "large", "max_tokens": rng.randint(5, 15)}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.is_stream:
            body["stream"] = True
            if rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        return body

    def _headers(self):
        rng = self.rng
        some = [(b"content-type", b"application/json")]
        if rng.random() < 0.2:
            some.append((b"x-dynctl-session", b"s%d" % rng.randint(0, 5)))
        if rng.random() < 0.2:
            some.append((b"x-dynctl-priority", rng.choice((b"high", b"normal", b"low"))))
        if rng.random() < 0.1:
            some.append((b"x-dynctl-deadline-ms", b"%d" % rng.randint(100, 3000)))
        if rng.random() < 0.1:
            some.append((b"x-dynctl-explain", b"1"))
        return some

    async def run(self, upstream):
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        content = json.dumps(self.body).encode()
        self.call = upstream.send("POST", path, self._headers(), content, self)
        if self.leaves_s is not None:
            asyncio.get_running_loop().call_later(self.leaves_s, self._leave)
        async with asyncio.timeout(300):
            await self.over.wait()

    def _leave(self):
        if not self.over.is_set():
            self.call.cancel()
            self.has_left = True
            self.over.set()

    def on_head(self, status, headers):
        self.status = status

    def on_data(self, data):
        self.content += data
        if self.rests_s:
            self.call.pause()
            asyncio.get_running_loop().call_later(self.rests_s, self.call.resume)
            self.rests_s = 0.0

    def on_end(self):
        self.num_ends += 1
        self.over.set()

    def on_error(self, error):
        self.num_ends += 1
        self.error = error
        self.over.set()

    def check(self):
        """Answered once: by the right text, or by one error; what became of it in a word."""
        if self.has_left:
            assert self.num_ends == 0
            return "left"
        assert self.error is None, self.error
        assert self.num_ends == 1
        content = bytes(self.content)
        if self.status != 200:
            assert self.status in {429, 502, 503, 504}, (self.status, content)
            assert set(json.loads(content)) == {"error"}
            return "failed"
        if not self.is_stream:
            choice = json.loads(content)["choices"][0]
            told = choice["message"]["content"] if self.is_chat else choice["text"]
            assert told == text_of(self.body)
            return "done"
        found = events(content)
        last = found.pop()
        told, has_usage = "", False
        for one in map(json.loads, found):
            assert "error" not in one
            has_usage = has_usage or bool(one.get("usage"))
            for choice in one["choices"]:
                told += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if last == b"[DONE]":
            assert told == text_of(self.body)
            assert has_usage == ("stream_options" in self.body)
            return "done"
        assert json.loads(last)["error"]["code"] in {"stream_broken", "draining"}
        assert told
        assert text_of(self.body).startswith(told)
        return "broken"


async def trouble(benches, rng):
    """Restart, drain and let in engines; change policies, and who is asked beside them."""
    policies = ("kv", "least_loaded", "round_robin", "prefix", "random")
    ill = [engine for engine in benches[0].engines if not engine.is_well]
    while True:
        await asyncio.sleep(rng.uniform(0.5, 3.0))
        desk = rng.choice(benches).desk
        match rng.randrange(4):
            case 0:
                await rng.choice(ill).restart(rng.uniform(0.0, 2.0))
            case 1:
                name = rng.choice(ill).name
                for state in (EngineState.DRAINING, EngineState.READY):
                    worker, route = desk.workers.get(name), desk.fleet.routes[name]
                    desk.fleet.saw(name, replace(worker.info, state=state), route)
                    await asyncio.sleep(rng.uniform(0.1, 2.0))
            case 2:
                desk.set_policy(rng.choice(policies))
                await asyncio.sleep(rng.uniform(0.1, 2.0))
                # So that short requests mostly take the short way.
                desk.set_policy("kv")
            case 3:
                desk.set_shadow(rng.choice(("round_robin", "prefix")))
                await asyncio.sleep(rng.uniform(0.1, 2.0))
                desk.set_shadow("")


@asynccontextmanager
async def beside(bench, num_processes):
    """Further routers before the same engines, who share their books of load with the first, as processes of one port do."""
    books = make_books(num_processes)
    config = replace(bench.router._config, listen="127.0.0.1:0")
    async with AsyncExitStack() as stack:
        routers = [bench.router]
        for _ in range(num_processes - 1):
            routers.append(await stack.enter_async_context(Router(config)))
        for process, router in enumerate(routers):
            if num_processes > 1:
                router.desk.books = SharedBooks(books, process, num_processes, router.desk.workers)
        os.close(books)
        yield [Bench(router, bench.engines, bench.client) for router in routers]


async def soak(roles, seed, num_processes=1):
    """Serve whatever comes; return what became of it, by word."""
    rng = random.Random(seed)
    engines, has_well = [], set()
    for number, role in enumerate(roles):
        engines.append(Restless(f"e{number}", role, seed, role not in has_well))
        has_well.add(role)
    visits = []
    async with (
        routed(*engines, settings=SETTINGS) as first,
        beside(first, num_processes) as benches,
    ):
        pools = []
        for bench in benches:
            make_buffers_small(bench.router)
            pools.append(Upstream(Address(host="127.0.0.1", port=bench.router.port)))

        def begin(group):
            visits.append(Visit(seed, len(visits)))
            group.create_task(visits[-1].run(pools[len(visits) % num_processes]))

        loop = asyncio.get_running_loop()
        troubling = loop.create_task(trouble(benches, random.Random(f"trouble {seed}")))
        ends_s = loop.time() + LASTS_S
        async with asyncio.TaskGroup() as group:
            while loop.time() < ends_s:
                await asyncio.sleep(rng.expovariate(1 / rng.choice((0.01, 0.1, 0.4))))
                begin(group)
        await asyncio.sleep(QUIET_S)
        await assert_nothing_left(benches, visits)
        assert not troubling.done()
        troubling.cancel()
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                begin(group)
            await asyncio.sleep(0.5)
            for bench in benches:
                group.create_task(bench.router.drain())
        for pool in pools:
            await pool.close()
        await asyncio.sleep(1.0)
        await assert_all_ended(benches, visits)
        for bench in benches:
            assert bench.router._entrance._clients[0].num_connections == 0
    return Counter(visit.check() for visit in visits)


def make_buffers_small(router):
    """Let clients that rest be noticed soon: what the router accepts has the buffers of its listener."""
    for descriptor in router._entrance.descriptors():
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)


async def assert_nothing_left(benches, visits):
    workers = [worker for bench in benches for worker in bench.desk.workers.all()]
    await until(lambda: not any(worker.active_requests for worker in workers))
    for bench in benches:
        bench.assert_books_balance()
    for worker in workers:
        assert worker.pending_prefills == 0
        assert worker.room.booked_tokens == 0
    await assert_all_ended(benches, visits)


async def assert_all_ended(benches, visits):
    num_counted = 0
    for bench in benches:
        desk, metrics = bench.desk, bench.desk.metrics
        assert not desk.flights
        assert not len(desk.line)
        assert desk.budget.num_retrying == 0
        assert not any(port.moves for port in desk.placement.links._ports.values())
        assert metrics.book_faults.value() == 0
        num_counted += sum(metrics.requests._values.values())
        assert all(one["outcome"] for one in json.loads(desk.ring.to_json(10_000)))
        for well in [engine.name for engine in bench.engines if engine.is_well]:
            assert desk.workers.get(well).failures_in_row == 0
            assert not [one for one in metrics.engine_failures._values if one[0] == well]
        # A question of the router's own may just be under way.
        for route in desk.fleet.routes.values():
            await until(lambda pool=route.upstream: pool.num_active == 0)
    assert num_counted == len(visits)
    await until(lambda: not any(engine._tasks for engine in benches[0].engines))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("roles", "num_processes"),
    [
        (("aggregated",) * 3, 1),
        (("prefill", "prefill", "decode", "decode"), 1),
        (("aggregated",) * 3, 2),
    ],
    ids=["aggregated", "hand-over", "processes"],
)
def test_of_many_requests_in_all_kinds_of_trouble_nothing_stays_behind(
    roles, num_processes, seed, caplog
):
    faults = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        became = await soak(roles, seed, num_processes)
        assert set(became) == {"done", "failed", "broken", "left"}, became
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())
    assert not faults, faults
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
