"""The router before simulated engines: cache hits, hand-offs and faults, with token-exact answers."""

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import asynccontextmanager

from router_bench import Bench, Client, events, until
from router_sims import Sim, generate, prompt_of, routed_sims, told

from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.run import Router


def test_conversations_stay_where_their_prefix_is_cached_and_the_prediction_is_exact(
    run, short_dir
):
    async def main():
        rng = random.Random(5)
        sims = [Sim(f"e{i}", short_dir) for i in range(2)]
        # On a busy machine prefills of a millisecond look uneven; engines that close are to count as equal here.
        async with routed_sims(*sims, settings={"near_ms": 1000.0}) as bench:
            words = bench.text.words
            system = prompt_of(rng, words, 96)
            talks = [system + prompt_of(rng, words, 60) for _ in range(6)]
            for _ in range(4):
                for i, talk in enumerate(talks):
                    said = await generate(bench, talk, 20)
                    assert said == bench.engines[0].engine.chain.continuation(talk, 20)
                    talks[i] = talk + said + prompt_of(rng, words, 30)
                    await told(bench)

            metrics = bench.desk.metrics
            prompt = metrics.prompt_tokens.value()
            predicted = metrics.predicted_hit_tokens.value()
            cached = metrics.engine_cached_tokens.value()
            decisions = json.loads(bench.desk.ring.to_json(1000))
            later = [d for d in decisions if d["prompt_tokens"] > 180]
            assert len(later) == 18
            assert all(d["overlap_tokens"] == d["cached_tokens"] for d in later)
            assert all(d["overlap_tokens"] > 0.7 * d["prompt_tokens"] for d in later)
            assert predicted == cached
            assert predicted / prompt > 0.6
            bench.assert_books_balance()

    run(main)


def test_text_and_chat_are_matched_by_tokens_too(run, short_dir):
    async def main():
        sims = [Sim(f"e{i}", short_dir) for i in range(2)]
        async with routed_sims(*sims) as bench:
            messages = [{"role": "user", "content": "tell me about the sea " * 30}]
            for _ in range(3):
                answer = await bench.client.chat(model="sim", messages=messages, max_tokens=24)
                assert answer.status == 200
                content = json.loads(answer.body)["choices"][0]["message"]["content"]
                messages += [
                    {"role": "assistant", "content": content},
                    {
                        "role": "user",
                        "content": "and now something longer, please, with many words " * 4,
                    },
                ]
                await told(bench)

            first, second, third = reversed(json.loads(bench.desk.ring.to_json(10)))
            assert first["overlap_tokens"] == 0
            for turn in (second, third):
                assert turn["overlap_tokens"] == turn["cached_tokens"] > 100
            assert len({d["engine"] for d in (first, second, third)}) == 1
            assert (
                bench.desk.metrics.tokenized.value("inline")
                + bench.desk.metrics.tokenized.value("thread")
                == 3
            )

    run(main)


def test_prefill_hands_over_to_decode_and_every_token_is_right(run, short_dir):
    async def main():
        rng = random.Random(7)
        sims = [
            Sim("p0", short_dir, "prefill"),
            Sim("d0", short_dir, "decode"),
            Sim("d1", short_dir, "decode"),
        ]
        async with routed_sims(*sims) as bench:
            chain = sims[0].engine.chain
            prompts = [prompt_of(rng, bench.text.words, rng.randrange(3, 400)) for _ in range(20)]
            said = await asyncio.gather(*[generate(bench, p, 16) for p in prompts])

            for prompt, ids in zip(prompts, said, strict=True):
                assert ids == chain.continuation(prompt, 16)
            metrics = bench.desk.metrics
            assert metrics.handoffs.value("ok") == 20
            assert metrics.handoffs.value("rejected") == 0
            assert not metrics.local_prefill._values
            used = {
                d["engine"]
                for d in json.loads(bench.desk.ring.to_json(100))
                if d["leg"] == "decode"
            }
            assert used == {"d0", "d1"}
            bench.assert_books_balance()

    run(main)


def test_without_a_prefill_engine_decode_engines_do_it_themselves(run, short_dir):
    async def main():
        rng = random.Random(8)
        sims = [Sim("p0", short_dir, "prefill"), Sim("d0", short_dir, "decode")]
        async with routed_sims(*sims) as bench:
            chain = sims[1].engine.chain
            await sims[0].stop()
            prompt = prompt_of(rng, bench.text.words, 100)
            assert await generate(bench, prompt, 8) == chain.continuation(prompt, 8)
            await until(lambda: not bench.desk.workers.get("p0").is_serving())
            prompt = prompt_of(rng, bench.text.words, 100)
            assert await generate(bench, prompt, 8) == chain.continuation(prompt, 8)

            local = bench.desk.metrics.local_prefill
            assert local.value("no_prefill_engine") >= 1
            bench.assert_books_balance()
            await sims[0].start(bench.text)

    run(main)


def test_a_pull_that_fails_leads_to_another_prefill_and_the_same_tokens(run, short_dir):
    async def main():
        rng = random.Random(9)
        sims = [
            Sim("p0", short_dir, "prefill"),
            Sim("d0", short_dir, "decode", fault=("fail-pull,count=1",)),
            Sim("d1", short_dir, "decode", fault=("fail-pull,count=1",)),
        ]
        async with routed_sims(*sims) as bench:
            chain = sims[0].engine.chain
            for _ in range(6):
                prompt = prompt_of(rng, bench.text.words, 120)
                assert await generate(bench, prompt, 8) == chain.continuation(prompt, 8)

            assert bench.desk.metrics.handoffs.value("failed") >= 1
            assert bench.desk.metrics.handoffs.value("ok") >= 5
            bench.assert_books_balance()

    run(main)


@asynccontextmanager
async def spawned(name, directory, *flags):
    """A simulated engine in a process of its own, so that it can be killed."""
    path = f"{directory}/{name}.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynctl.sim", "--uds", path, *flags),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process, EngineTarget(id=name, url=f"unix:{path}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_killing_an_engine_breaks_its_streams_once_and_replaces_what_has_not_begun(run, short_dir):
    slow_start = ("--prefill-base-ms", "2000", "--decode-ms", "20")

    async def main():
        async with (
            spawned("e0", short_dir, *slow_start) as (victim, first),
            spawned("e1", short_dir, *slow_start) as (_, second),
        ):
            config = RouterConfig(
                listen="127.0.0.1:0",
                policy="round_robin",
                engines=(first, second),
                settings=make_settings({"engine_poll_s": 0.1, "probe_s": 0}),
            )
            async with Router(config) as router:
                client = Client(router.port)
                bench = Bench(router, (), client)
                workers = bench.desk.workers
                await until(lambda: sum(w.is_serving() for w in workers.all()) == 2)

                async def stream():
                    answer = await client.complete(
                        model="sim", prompt="tell me", max_tokens=200, stream=True
                    )
                    return answer.status, answer.body

                begun = [asyncio.create_task(stream()) for _ in range(4)]
                await until(lambda: bench.desk.metrics.ttft.count == 4)
                fresh = [asyncio.create_task(stream()) for _ in range(4)]
                await until(lambda: bench.desk.workers.get("e0").active_requests == 4)
                os.kill(victim.pid, signal.SIGKILL)
                done = await asyncio.gather(*begun, *fresh)

                await client.upstream.close()
                assert {status for status, _ in done} == {200}
                broken = [body for _, body in done[:4] if b"[DONE]" not in body]
                assert len(broken) == 2
                for body in broken:
                    assert json.loads(events(body)[-1])["error"]["code"] == "stream_broken"
                    assert body.count(b'"error"') == 1
                assert all(events(body)[-1] == b"[DONE]" for _, body in done[4:])
                assert sum(bench.desk.metrics.stream_broken._values.values()) == 2
                bench.assert_books_balance()

    run(main)
