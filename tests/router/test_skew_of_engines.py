"""`dynctl doctor skew` before a real router and simulated engines: what was done to them is what it says."""

import asyncio
import json
import random

from router_sims import Sim, prompt_of, routed_sims, told

from dynctl.cli.main import run as dynctl
from dynctl.router.server import Entrance


async def doctor_skew(path, *flags):
    return await asyncio.to_thread(dynctl, ["doctor", "skew", "--admin-socket", path, *flags])


async def send(bench, prompts, key):
    """One after the other, each with what was told of the last one's cache."""
    for prompt in prompts:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
        answer = await bench.client.post("/v1/completions", body, x_dynctl_route_key=key)
        assert answer.status == 200, answer.body
        await told(bench)


def test_a_hot_prefix_is_named_with_its_route_key_and_what_ends_it(run, short_dir, capsys):
    async def main():
        rng = random.Random(4)
        sims = [Sim(f"e{i}", short_dir) for i in range(3)]
        async with routed_sims(*sims, policy="prefix") as bench:
            entrance = Entrance(bench.desk)
            path = f"{short_dir}/admin.sock"
            await entrance.open_admin(path)
            try:
                assert await doctor_skew(path) == 1
                assert "has decided anything yet" in capsys.readouterr().err

                words = bench.text.words
                shared = prompt_of(rng, words, 160)
                prompts = [shared + prompt_of(rng, words, 40) for _ in range(60)]
                await send(bench, prompts, "support")
                assert await doctor_skew(path, "-o", "json") == 6
                [router] = json.loads(capsys.readouterr().out)["routers"]
                [pool] = router["pools"]
                assert (pool["verdict"], pool["policy"]) == ("policy", "prefix")
                assert [cause["name"] for cause in pool["causes"]] == [
                    "routing policy",
                    "parallel layout",
                    "KV memory",
                ]
                requests = pool["spreads"][0]
                assert (requests["measure"], requests["is_even"]) == ("requests", False)
                assert requests["ratio"] == 3.0, "one engine had them all"
                assert requests["in_turn"] == 1.0
                output = next(s for s in pool["spreads"] if s["measure"] == "output_tokens")
                assert output["ratio"] == 3.0, "answers are counted as engines tell"

                assert await doctor_skew(path) == 6
                shown = capsys.readouterr().out
                assert "with a shared prefix of route key support" in shown
                assert "fix: let prompts of support differ earlier" in shown
                assert "dynctl policy --shadow kv" in shown
            finally:
                await entrance.close(0.0)

    run(main)


def test_engines_that_are_taken_in_turn_are_even(run, short_dir, capsys):
    async def main():
        rng = random.Random(4)
        sims = [Sim(f"e{i}", short_dir) for i in range(3)]
        async with routed_sims(*sims, policy="round_robin") as bench:
            entrance = Entrance(bench.desk)
            path = f"{short_dir}/admin.sock"
            await entrance.open_admin(path)
            try:
                shared = prompt_of(rng, bench.text.words, 160)
                await send(bench, [[*shared, n] for n in bench.text.words[:30]], "support")
                assert await doctor_skew(path) == 0
                assert "even: load is as even as it needs to be" in capsys.readouterr().out
            finally:
                await entrance.close(0.0)

    run(main)
