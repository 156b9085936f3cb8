"""The router behind real relays: tables watched, KV deltas followed, incarnations respected."""

import asyncio
import dataclasses
import json
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from router_bench import Bench, Client, events, until
from router_sims import Sim, prompt_of

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.__main__ import server_context
from dynctl.agents.relay.relay import Relay
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.deploy.tls import ensure_authority, ensure_leaf
from dynctl.http1.server import serve
from dynctl.router.config import RelayTarget, RouterConfig, TlsFiles, make_settings
from dynctl.router.run import Router
from dynctl.sim.options import MODEL_DIR
from dynctl.sim.text import TextModel


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """Certificates of a relay and a router from one cluster authority."""
    folder = tmp_path_factory.mktemp("cluster")
    authority = ensure_authority(folder / "ca")
    (folder / "ca.crt").write_bytes(authority.cert)
    for name, common_name in (("host", "relay:host-a"), ("router", "router:r0")):
        pair = ensure_leaf(folder / "ca", authority, common_name, "host-a", None)
        (folder / f"{name}.crt").write_bytes(pair.cert)
        (folder / f"{name}.key").write_bytes(pair.key)
    return folder


class Host:
    """A relay with simulated engines behind it; the test plays the agent."""

    def __init__(self, tls, sims):
        self.tls = tls
        self.sims = {sim.name: sim for sim in sims}
        self.port = 0
        self.entries = {}

    async def start_relay(self):
        self.relay = Relay()
        self.server = await serve(
            self.relay.handle,
            host="127.0.0.1",
            port=self.port,
            ssl=server_context(self.tls),
            admit=self.relay.admit,
        )
        self.port = self.server.port
        self.relay.take_table(self.entries)

    async def stop_relay(self):
        self.relay.end_streams()
        await self.server.close(0)
        await self.relay.close()

    def name(self, name, incarnation, state=EngineState.READY, **facts):
        """Put an engine into the table."""
        sim = self.sims[name]
        info = EngineInfo(
            id=name,
            incarnation=incarnation,
            state=state,
            role=sim.role,
            deployment="chat",
            kind="sim",
            model="sim",
            block_size_tokens=16,
            max_model_len_tokens=8192,
            **facts,
        )
        self.entries = self.entries | {
            name: RelayEntry(
                info=info,
                socket=sim.options.uds,
                kv_events=sim.options.kv_events,
                kv_replay=sim.options.kv_replay,
                block_hash_seed="seed",
            )
        }
        self.relay.take_table(self.entries)

    def remove(self, name):
        self.entries = {other: e for other, e in self.entries.items() if other != name}
        self.relay.take_table(self.entries)


@asynccontextmanager
async def relayed(tls, *sims, **settings):
    text = TextModel(MODEL_DIR)
    async with AsyncExitStack() as stack:
        for sim in sims:
            await sim.start(text)
            stack.push_async_callback(sim.stop)
        host = Host(tls, sims)
        await host.start_relay()
        stack.push_async_callback(lambda: host.stop_relay())
        for sim in sims:
            host.name(sim.name, "i1")
        files = TlsFiles(str(tls / "router.crt"), str(tls / "router.key"), str(tls / "ca.crt"))
        config = RouterConfig(
            listen="127.0.0.1:0",
            deployment="chat",
            served_names=("chat-model",),
            tokenizer=str(MODEL_DIR),
            block_hash_seed="seed",
            relays=(RelayTarget("host-a", "127.0.0.1", host.port),),
            tls=files,
            settings=make_settings(settings),
        )
        router = await stack.enter_async_context(Router(config))
        client = Client(router.port)
        stack.push_async_callback(client.upstream.close)
        bench = Bench(router, sims, client)
        bench.text, bench.host = text, host
        await until(
            lambda: sum(w.parity == "verified" for w in bench.desk.workers.all()) == len(sims)
        )
        yield bench


async def talk(bench, prompt, num_tokens):
    answer = await bench.client.complete(
        model="chat-model", prompt=prompt, max_tokens=num_tokens, stream=True, return_token_ids=True
    )
    assert answer.status == 200, answer.body
    assert events(answer.body)[-1] == b"[DONE]"
    found = []
    for item in events(answer.body)[:-1]:
        for choice in json.loads(item)["choices"]:
            found += choice.get("token_ids") or []
    return found


def test_deltas_through_the_relay_predict_the_engines_hits_exactly(run, tls, short_dir):
    async def main():
        rng = random.Random(3)
        async with relayed(tls, Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            chain = bench.engines[0].engine.chain
            prompts = [prompt_of(rng, bench.text.words, 150) for _ in range(4)]
            for _ in range(3):
                for i, prompt in enumerate(prompts):
                    said = await talk(bench, prompt, 20)
                    assert said == chain.continuation(prompt, 20)
                    prompts[i] = prompt + said + prompt_of(rng, bench.text.words, 20)
                await asyncio.sleep(0.1)

            later = [
                d for d in json.loads(bench.desk.ring.to_json(100)) if d["prompt_tokens"] > 150
            ]
            assert len(later) == 8
            assert all(d["overlap_tokens"] == d["cached_tokens"] > 100 for d in later)
            bench.assert_books_balance()

    run(main)


def test_a_new_incarnation_has_no_blocks_and_is_reached_at_once(run, tls, short_dir):
    async def main():
        rng = random.Random(4)
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            prompt = prompt_of(rng, bench.text.words, 100)
            await talk(bench, prompt, 8)
            await until(lambda: bench.desk.index.num_blocks("e0") > 0)
            # The engine starts anew: empty cache, sequence from 0, a new stamp.
            await bench.engines[0].stop()
            await bench.engines[0].start(bench.text)
            bench.host.name("e0", "i2")
            await until(lambda: bench.desk.workers.get("e0").incarnation == "i2")

            assert bench.desk.index.num_blocks("e0") == 0
            assert await talk(bench, prompt, 8) == bench.engines[0].engine.chain.continuation(
                prompt, 8
            )
            decision = json.loads(bench.desk.ring.to_json(1))[0]
            assert decision["overlap_tokens"] == decision["cached_tokens"] == 0
            await until(lambda: bench.desk.index.num_blocks("e0") > 0)
            bench.assert_books_balance()

    run(main)


def test_an_engine_that_was_replaced_unseen_answers_409_and_the_request_goes_on(
    run, tls, short_dir
):
    async def main():
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            worker = bench.desk.workers.get("e0")
            route = bench.desk.fleet.routes["e0"]
            stale = dataclasses.replace(route, headers=((b"x-dynctl-incarnation", b"i0"),))
            bench.desk.fleet.routes["e0"] = stale
            bench.desk.loop.call_later(0.01, bench.desk.fleet.routes.__setitem__, "e0", route)
            bench.desk.rng.random = lambda: 0.999

            assert len(await talk(bench, [300, 301, 302], 4)) == 4
            assert bench.desk.metrics.retries.value("main", "stale") == 1
            assert worker.failures_in_row == 0
            bench.assert_books_balance()

    run(main)


def test_only_ready_engines_of_this_deployment_are_used(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            bench.host.name("e0", "i1", EngineState.DRAINING)
            await until(lambda: not bench.desk.workers.get("e0").is_serving())
            for _ in range(6):
                await talk(bench, [300, 301, 302], 2)
            assert {d["engine"] for d in json.loads(bench.desk.ring.to_json(10))} == {"e1"}

            bench.host.remove("e0")
            await until(lambda: bench.desk.workers.get("e0") is None)
            assert "e0" not in bench.desk.fleet.routes

    run(main)


def test_a_relay_that_restarts_makes_requests_wait_not_fail(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            await talk(bench, [300, 301, 302], 2)
            await bench.host.stop_relay()
            await until(lambda: not bench.desk.can_serve())
            assert (await bench.client.get("/health")).status == 503

            waiting = asyncio.create_task(talk(bench, [300, 301, 302], 2))
            await until(lambda: len(bench.desk.line) == 1)
            await bench.host.start_relay()

            assert len(await waiting) == 2
            assert (await bench.client.get("/health")).status == 200
            bench.assert_books_balance()

    run(main)
