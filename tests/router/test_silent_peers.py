"""Whoever falls silent, and at whatever point: nobody waits beyond a deadline for it, and no connection is held."""

import asyncio

import msgspec
import pytest
from router_bench import Bench, Client, routed, text_of, until
from router_clock import JumpingLoop
from router_fakes import MODEL, FakeEngine

from dynctl.agents.relay.__main__ import server_context
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.http1.server import serve
from dynctl.router.config import RelayTarget, RouterConfig, TlsFiles, make_settings
from dynctl.router.run import Router

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM, WHOLE = HEAD % b"text/event-stream", HEAD % b"application/json"
LONG = "a long prompt, which takes the long way through the router"
SETTINGS = {
    "short_request_chars": 40,
    "max_retries": 0,
    "engine_poll_s": 3600.0,
    "first_token_timeout_s": 2.0,
    "body_timeout_s": 2.0,
    "gap_timeout_s": 2.0,
}


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Silent(FakeEngine):
    """Says the same to every request, then nothing, or now and then something more; its answer never ends."""

    def __init__(self, says, *, and_on=b""):
        super().__init__()
        self.says = says
        self.and_on = and_on

    async def _answer(self, exchange, body, is_chat):
        transport = exchange._connection._transport
        for one in self.says:
            transport.write(one)
            await asyncio.sleep(0.01)
        while True:
            await asyncio.sleep(0.25)
            transport.write(self.and_on)


def on_jumping_loop(main):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


def whole_stream():
    told = FakeEngine()
    return [
        *(told.chunk(False, f" t{i}", "stop" if i == 2 else None) for i in range(3)),
        b"data: [DONE]\n\n",
    ]


@pytest.mark.parametrize("prompt", ["x", LONG], ids=["short", "long"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("says", "and_on"),
    [
        ((), b""),
        ((b"HTTP/1.1 200 O",), b""),
        ((STREAM,), b""),
        ((STREAM,), chunk(b": still here\n\n")),
        ((WHOLE, chunk(b'{"choices":')), b""),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",), b""),
        ((b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n",), chunk(b"x" * 70_000)),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), b""),
    ],
    ids=["all", "head", "body", "comments", "piece", "length", "error", "interim"],
)
def test_an_engine_that_says_no_more_is_given_up_at_the_deadline(prompt, is_stream, says, and_on):
    async def main():
        engine = Silent(says, and_on=and_on)
        async with routed(engine, settings=SETTINGS) as bench:
            began_s = asyncio.get_running_loop().time()
            answer = await bench.client.complete(prompt=prompt, stream=is_stream)
            took_s = asyncio.get_running_loop().time() - began_s
            assert answer.status in ({502, 504} if says[:1] == (WHOLE,) else {504})
            assert took_s < 4.0
            await until(lambda: not engine._tasks)
            bench.assert_books_balance()
            assert engine.num_gone == 1

    on_jumping_loop(main)


@pytest.mark.parametrize("prompt", ["x", LONG], ids=["short", "long"])
@pytest.mark.parametrize("and_on", [b"", chunk(b": still here\n\n")], ids=["nothing", "comments"])
@pytest.mark.parametrize("is_at_once", [False, True])
def test_an_engine_that_does_not_end_what_it_has_said_is_left_and_its_client_served(
    prompt, and_on, is_at_once
):
    async def main():
        told = whole_stream()
        says = [STREAM + chunk(b"".join(told))] if is_at_once else [STREAM, *map(chunk, told)]
        engine, loop = Silent(says, and_on=and_on), asyncio.get_running_loop()
        async with routed(engine, settings=SETTINGS) as bench:
            began_s = loop.time()
            answer = await bench.client.complete(prompt=prompt, stream=True)
            assert loop.time() - began_s < 1.0
            assert (answer.status, text_of(answer.body)) == (200, " t0 t1 t2")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            await until(lambda: engine.num_gone)
            assert 1.9 < loop.time() - began_s < 3.5
            pool = bench.desk.fleet.routes["e0"].upstream
            assert pool.num_active == 0
            bench.assert_books_balance()
            assert bench.desk.workers.get("e0").failures_in_row == 0
            assert not bench.desk.metrics.engine_failures._values

    on_jumping_loop(main)


def test_an_engine_that_ends_a_little_later_than_it_has_said_all_keeps_its_connection():
    async def main():
        class Slow(FakeEngine):
            async def _answer(self, exchange, body, is_chat):
                transport = exchange._connection._transport
                transport.write(STREAM + chunk(b"".join(whole_stream())))
                await asyncio.sleep(1.0)
                transport.write(b"0\r\n\r\n")
                exchange.is_started = exchange.is_finished = True
                exchange._connection.exchange_finished(False)

        engine = Slow()
        async with routed(engine, settings=SETTINGS) as bench:
            pool = bench.desk.fleet.routes["e0"].upstream
            for prompt in ("x", LONG, "x"):
                assert (await bench.client.complete(prompt=prompt, stream=True)).status == 200
                await until(lambda: pool.num_active == 0)
            assert engine.num_gone == 0
            assert pool.num_connections == 1

    on_jumping_loop(main)


def test_a_relay_that_says_no_more_is_given_up_at_the_deadline_and_then_taken_for_down(tls):
    async def main():
        info = EngineInfo(*("e0", "e0.1", EngineState.READY, "aggregated", "d", "sim", MODEL))
        asked, loop = [], asyncio.get_running_loop()

        def tell_the_table_and_nothing_else(exchange):
            asked.append(exchange.request.path)
            if asked.count("/v1/engines") == 1 and asked[-1] == "/v1/engines":
                exchange.start(200, [])
                exchange.write(msgspec.json.encode([info]) + b"\n")

        server = await serve(
            tell_the_table_and_nothing_else, host="127.0.0.1", port=0, ssl=server_context(tls)
        )
        config = RouterConfig(
            listen="127.0.0.1:0",
            relays=(RelayTarget("host-a", "127.0.0.1", server.port),),
            tls=TlsFiles(*(str(tls / name) for name in ("router.crt", "router.key", "ca.crt"))),
            settings=make_settings(SETTINGS | {"queue_timeout_s": 1.0, "probe_s": 0.0}),
        )
        async with Router(config) as router:
            client, desk = Client(router.port), router.desk
            await until(lambda: desk.workers.get("e0") and desk.workers.get("e0").is_serving())
            for prompt in ("x", LONG):
                began_s = loop.time()
                assert (await client.complete(prompt=prompt, stream=True)).status == 504
                assert loop.time() - began_s < 4.0
            assert asked.count("/v1/engine/e0/v1/completions") == 2
            await until(lambda: not desk.workers.get("e0").is_serving())
            assert (await client.complete(stream=True)).status == 503
            Bench(router, (), client).assert_books_balance()
            assert desk.fleet.routes["e0"].upstream.num_active == 0
            await client.upstream.close()
        await server.close(0)

    on_jumping_loop(main)
