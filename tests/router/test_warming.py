"""An engine that joins computes the hot prefixes first, and only those, before clients ask for them; clients go first."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from router_bench import until
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.kv.hashing import pack_tokens, unpack_tokens
from dynctl.router import warming
from dynctl.router.hot import HotPrefixes
from dynctl.router.slow_start import Joined


def test_an_engine_that_joins_computes_hot_prefixes_and_then_serves_them_from_its_cache(
    run, short_dir
):
    async def main():
        rng = random.Random(3)
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        async with routed_sims(*sims, settings={"warm_prefixes": 1, "probe_s": 0.0}) as bench:
            await sims[1].stop()
            await until(lambda: not bench.desk.workers.get("e1").is_serving())
            words = bench.text.words
            hot, rare = prompt_of(rng, words, 320), prompt_of(rng, words, 320)
            for system, times in ((hot, 6), (rare, 3)):
                for _ in range(times):
                    await generate(bench, system + prompt_of(rng, words, 40), 4)
                    await until(
                        lambda: (
                            bench.desk.index.num_blocks("e0")
                            == sims[0].engine.scheduler.cache.num_cached
                        )
                    )

            await sims[1].start(bench.text)
            metrics = bench.desk.metrics
            await until(lambda: metrics.warmed_tokens.value("joined") > 0)

            assert metrics.warmed_tokens.value("joined") == 320
            prompt = bench.desk.hashers.of(16).prompt(hot)
            await until(lambda: bench.desk.index.match(prompt).get("e1") == 320 // 16)
            assert "e1" not in bench.desk.index.match(bench.desk.hashers.of(16).prompt(rare))
            await until(lambda: bench.desk.workers.get("e1").active_requests == 0)
            bench.assert_books_balance()

    run(main)


def test_the_hottest_prefixes_come_first_and_the_coldest_give_way():
    hot = HotPrefixes()
    for block in range(1, 101):
        tokens = memoryview(pack_tokens([block] * 16))
        for _ in range(5 if block == 7 else 1):
            hot.began(block, tokens, float(block))

    found = hot.hottest(3)

    assert [prefix.block for prefix in found] == [7, 100, 99]
    assert unpack_tokens(found[0].token_bytes) == [7] * 16
    assert len(hot.hottest(1000)) == 64


def test_numbers_that_stand_for_a_text_are_no_tokens_to_be_computed_anywhere(run, short_dir):
    async def main():
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        async with routed_sims(*sims, tokenizer=None) as bench:
            # Three others told of it before: this is a beginning that others have.
            for number in range(4):
                answer = await bench.client.complete(
                    model="sim", prompt="the same beginning " * 100 + f"{number}" * 80, max_tokens=2
                )
                assert answer.status == 200
            newest = bench.desk.ring.newest(1)[0]
            assert newest.overlap_tokens > 300
            assert bench.desk.placement.overlaps.hot.hottest(9) == []

    run(main)


@pytest.mark.source
def test_a_clients_prefill_goes_first_and_what_is_warmed_counts_as_load(
    run, short_dir, monkeypatch
):
    looks = []

    async def counted(delay_s):
        looks.append(delay_s)
        await pause(0.0)

    pause = asyncio.sleep
    monkeypatch.setattr(warming, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": counted}))

    async def main():
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        async with routed_sims(*sims, settings={"warm_prefixes": 1, "probe_s": 0.0}) as bench:
            desk = bench.router.desk
            worker, route, asked = desk.workers.get("e1"), desk.fleet.routes["e1"], []

            class Watched:
                async def fetch(self, method, path, body, timeout_s):
                    load = worker.active_requests, worker.pending_prefill_tokens
                    asked.append((len(json.loads(body)["prompt"]), *load))
                    return await route.fetch(method, path, body, timeout_s)

            desk.fleet.routes["e1"] = Watched()
            tokens = memoryview(pack_tokens(range(64)))
            desk.placement.overlaps.hot.began(7, tokens, desk.loop.time())
            prefill = worker.book(900, 900, 10, desk.loop.time())
            worker.joined = Joined(desk.loop.time() + 30.0, 0)
            begun = len(looks)
            await until(lambda: len(looks) > begun + 20)
            assert asked == []
            prefill.prefill_ended()
            await until(lambda: asked)
            assert asked == [(64, 2, 64)]
            prefill.release()
            await until(lambda: worker.active_requests == 0)

    run(main)
