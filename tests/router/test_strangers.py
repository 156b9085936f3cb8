"""Engines whose tokens are not ours: placed by text, and never told anything but what the client said."""

import asyncio
import dataclasses
import json
import random

from router_bench import routed, until
from router_fakes import FakeEngine
from router_models import other_tokenizer
from router_sims import Sim, generate, prompt_of, routed_sims, told

from dynctl.sim.options import MODEL_DIR

STEADY = {"near_ms": 1000.0}
"""On a busy machine prefills of a millisecond look uneven; engines that close are to count as equal here."""


def test_engines_that_count_otherwise_are_routed_by_text_beside_those_that_do_not(
    run, short_dir, tmp_path
):
    async def main():
        others = other_tokenizer(tmp_path / "other")
        sims = [
            Sim("e0", short_dir),
            Sim("e1", short_dir, own_text=others),
            Sim("e2", short_dir, own_text=others),
        ]
        async with routed_sims(*sims, parity=None, settings=STEADY) as bench:
            desk = bench.desk
            desk.rng.seed(1)
            wanted = {"e0": "verified", "e1": "mismatch", "e2": "mismatch"}
            await until(lambda: {w.id: w.parity for w in desk.workers.all()} == wanted)
            talks = [
                [{"role": "user", "content": f"{n} " + "once upon a time " * 60}] for n in range(9)
            ]
            homes = {}
            for turn in range(4):
                for number, messages in enumerate(talks):
                    answer = await bench.client.chat(model="sim", messages=messages, max_tokens=4)
                    assert answer.status == 200
                    decision = json.loads(desk.ring.to_json(1))[0]
                    assert homes.setdefault(number, decision["engine"]) == decision["engine"]
                    if turn:
                        cached, expected = decision["cached_tokens"], decision["overlap_tokens"]
                        assert expected > 0.7 * decision["prompt_tokens"] - 100
                        assert cached > 0
                        if decision["engine"] == "e0":
                            assert cached == expected
                    messages.append({"role": "assistant", "content": "and then " * 30})
                    messages.append({"role": "user", "content": f"go on {turn} " * 20})
                    await told(bench)
            assert set(homes.values()) == {"e0", "e1", "e2"}
            # What a stranger publishes has names nobody asks by, and nothing is expected under ours.
            assert all(finding.cause == "tokenizer" for finding in desk.probes.findings())

    run(main)


def test_what_an_engine_gets_does_not_depend_on_the_tokenizer(run, tmp_path):
    """Ours, none, or one that is wrong: the engine reads the client's own words."""

    async def main():
        other_tokenizer(tmp_path / "other")
        got = []
        for tokenizer in (None, str(MODEL_DIR), str(tmp_path / "other")):
            engine = FakeEngine()
            async with routed(engine, tokenizer=tokenizer) as bench:
                content = "Grüße – 日本語 <|user|> " * 60
                await bench.client.chat(messages=[{"role": "user", "content": content}])
                await bench.client.complete(prompt=content, max_tokens=5)
                await bench.client.complete(prompt=[1, 2, 3] * 60)
                bodies = [dict(body) for body in engine.requests]
                assert len(bodies) == 3
                got.append(bodies)
        assert got[0] == got[1] == got[2]
        assert got[0][0]["messages"] == [{"role": "user", "content": content}]
        assert got[0][1]["prompt"] == content

    run(main)


def test_an_engine_nobody_tells_of_is_held_to_have_what_it_computed(run, short_dir):
    async def main():
        silent = [Sim(f"e{i}", short_dir) for i in range(2)]
        for sim in silent:
            sim.target = dataclasses.replace(sim.target, kv_events=None, kv_replay=None)
        async with routed_sims(*silent, Sim("e2", short_dir), settings=STEADY) as bench:
            bench.desk.rng.seed(1)
            rng = random.Random(1)
            prompts = [prompt_of(rng, bench.text.words, 200) for _ in range(9)]
            homes = {}
            for turn in range(3):
                for number, prompt in enumerate(prompts):
                    said = await generate(bench, prompt, 4)
                    decision = json.loads(bench.desk.ring.to_json(1))[0]
                    assert homes.setdefault(number, decision["engine"]) == decision["engine"]
                    if turn:
                        assert decision["overlap_tokens"] == decision["cached_tokens"] > 150
                    prompts[number] = prompt + said + prompt_of(rng, bench.text.words, 30)
                    await told(bench)
            assert set(homes.values()) == {"e0", "e1", "e2"}
            limit = bench.desk.workers.get("e0").capacity_tokens // 16
            assert 0 < bench.desk.index.num_blocks("e0") <= limit

    run(main)


def test_without_a_tokenizer_figures_are_the_engines_own_and_only_that_is_named(run, short_dir):
    """The engine's events name its blocks by tokens, which this router cannot ask for: no fault of the engine."""

    async def main():
        async with routed_sims(
            Sim("e0", short_dir), tokenizer=None, parity=None, settings=STEADY
        ) as bench:
            desk = bench.desk
            for number in range(4):
                messages = [{"role": "user", "content": f"{number} " + "once upon a time " * 60}]
                for _ in range(2):
                    answer = await bench.client.chat(model="sim", messages=messages, max_tokens=4)
                    assert answer.status == 200
                    await asyncio.sleep(0.6)  # names would be looked up twice a second
            await until(lambda: desk.index.num_stored("e0") > 0)
            await until(lambda: desk.probes.findings() != ())
            (found,) = desk.probes.findings()
            assert found.cause == "no_tokenizer"
            newest = json.loads(desk.ring.to_json(1))[0]
            assert newest["prompt_tokens"] != newest["counted_tokens"]
            hits = desk.hits.to_json()
            assert hits["prompt_tokens"] == 8 * newest["counted_tokens"]
            # Half of them were asked before; a block more or less is what blocks of text are worth.
            assert abs(hits["predicted_tokens"] - hits["reported_tokens"]) <= 4 * 32
            parts = ("hit", "routing", "eviction", "cold")
            assert sum(hits[f"{part}_tokens"] for part in parts) <= hits["prompt_tokens"]
            assert desk.metrics.predicted_hit_tokens.value() == hits["predicted_tokens"]

    run(main)
