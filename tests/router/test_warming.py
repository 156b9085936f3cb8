"""An engine that joins computes the hot prefixes first, and only those, before clients ask for them."""

import random

from router_bench import until
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.kv.hashing import pack_tokens, unpack_tokens
from dynctl.router.hot import HotPrefixes


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
            await until(lambda: metrics.warmed_tokens.value() > 0)

            assert metrics.warmed_tokens.value() == 320
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
