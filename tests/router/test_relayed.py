"""The router behind real relays: tables watched, KV deltas followed, incarnations respected."""

import asyncio
import dataclasses
import json
import random

import msgspec
import pytest
from router_bench import until
from router_relays import relayed, talk
from router_sims import Sim, prompt_of

from dynctl.core.deployment import EngineState
from dynctl.http1.upstream import Upstream, UpstreamError
from dynctl.router import doers
from dynctl.router.sources import relay as relay_source


def test_deltas_through_the_relay_predict_the_engines_hits_exactly(run, tls, short_dir):
    async def main():
        rng = random.Random(3)
        sims = (Sim("e0", short_dir), Sim("e1", short_dir))
        # On a busy machine prefills of a millisecond look uneven; engines that close are to count as equal here.
        async with relayed(tls, *sims, near_ms=1000.0) as bench:
            chain = bench.engines[0].engine.chain
            prompts = [prompt_of(rng, bench.text.words, 150) for _ in range(4)]
            index, hasher = bench.desk.index, bench.desk.hashers.of(16)
            for _ in range(3):
                for i, prompt in enumerate(prompts):
                    said = await talk(bench, prompt, 20)
                    assert said == chain.continuation(prompt, 20)
                    # The last token said is not computed.
                    last = hasher.prompt([*prompt, *said][:-1])
                    await until(
                        lambda last=last: any(
                            index.is_published(f"e{n}", last.hash_at(last.num_blocks))
                            for n in range(2)
                        )
                    )
                    prompts[i] = prompt + said + prompt_of(rng, bench.text.words, 20)

            later = [
                d for d in json.loads(bench.desk.ring.to_json(100)) if d["prompt_tokens"] > 150
            ]
            assert len(later) == 8
            assert all(d["overlap_tokens"] == d["cached_tokens"] > 100 for d in later)
            bench.assert_books_balance()

    run(main)


def test_k8_a_new_incarnation_has_no_blocks_and_is_reached_at_once(run, tls, short_dir):
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


@pytest.mark.source
def test_an_engine_that_was_replaced_unseen_answers_409_and_the_request_goes_on(
    run, tls, short_dir, monkeypatch
):
    async def main():
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            worker = bench.desk.workers.get("e0")
            route = bench.desk.fleet.routes["e0"]
            stale = dataclasses.replace(route, headers=((b"x-dynctl-incarnation", b"i0"),))
            bench.desk.fleet.routes["e0"] = stale

            def mend_before_the_next_try(*_):
                bench.desk.fleet.routes["e0"] = route
                return 0.0

            monkeypatch.setattr(doers, "backoff_s", mend_before_the_next_try)

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


@pytest.mark.parametrize(
    "said", [{"id": "e0\n"}, {"incarnation": "i1\n"}, {"incarnation": "i1\r\nx: y"}]
)
def test_an_engine_whose_names_could_not_be_sent_is_not_there_and_harms_no_other(
    run, tls, short_dir, said
):
    async def main():
        async with relayed(tls, Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            relay, workers = bench.host.relay, bench.desk.workers
            e0, e1 = (engine.entry.info for engine in relay._engines.values())
            relay._lines["/v1/engines"] = (
                msgspec.json.encode([dataclasses.replace(e0, **said), e1]) + b"\n"
            )
            relay._tell_watchers()
            await until(lambda: [worker.id for worker in workers.all()] == ["e1"])
            assert len(await talk(bench, [300, 301, 302], 2)) == 2
            assert not bench.router._watch.done()

    run(main)


def test_the_pool_of_an_engine_that_left_the_table_is_closed_when_its_last_request_has_ended(
    run, tls, short_dir, monkeypatch
):
    made = []

    def pool(*args):
        made.append(Upstream(*args))
        return made[-1]

    monkeypatch.setattr(relay_source, "Upstream", pool)

    async def main():
        async with relayed(tls, Sim("e0", short_dir, decode_ms=20.0)) as bench:
            _, of_engine = made
            prompt = [300, 301, 302]
            under_way = asyncio.create_task(talk(bench, prompt, 100))
            await until(lambda: bench.engines[0].engine.num_open == 1)
            # Its process runs on, for another deployment.
            entry = bench.host.entries["e0"]
            moved = dataclasses.replace(entry.info, deployment="other")
            bench.host.entries = {"e0": dataclasses.replace(entry, info=moved)}
            bench.host.relay.take_table(bench.host.entries)
            await until(lambda: bench.desk.workers.get("e0") is None)

            assert await under_way == bench.engines[0].engine.chain.continuation(prompt, 100)
            # An idle connection would stay for half a minute, and a pool that is not closed would take calls.
            await until(lambda: of_engine.num_connections == 0)
            with pytest.raises(UpstreamError, match="the pool was closed"):
                await of_engine.fetch("GET", "/health")
            bench.host.name("e0", "i1")
            await until(lambda: bench.desk.can_serve())
            assert len(await talk(bench, prompt, 4)) == 4
            assert len(made) == 3
            bench.assert_books_balance()

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
