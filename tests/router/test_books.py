"""Whatever becomes of requests, every book comes back to exactly zero: load, links, what engines are expected to hold."""

import asyncio
import random

import pytest
from router_bench import routed, until
from router_fakes import FakeEngine

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.prefix_index import Source

FAULTS = [
    *(None, None, None, "refuse", "status:500", "status:503", "status:400", "cut:0", "cut:2"),
    *("error:1", "html", "stall", "hang:2", "no-done"),
]


def prompt_of(seed, num_tokens):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def begin_sources(bench):
    """Let engines have caches that the index knows: without one nothing is expected of them."""
    for worker in bench.desk.workers.all():
        bench.desk.index.begin(Source(worker.id, worker.incarnation))


def blocks_of(bench, tokens) -> PromptBlocks:
    return bench.desk.hashers.of(16).prompt(tokens)


def assert_links_are_free(bench):
    links = bench.desk.placement.links
    assert links.num_booked == 0
    assert {port.busy_until_s for port in links._ports.values()} <= {0.0}


@pytest.mark.parametrize("seed", range(4))
def test_after_any_mix_of_outcomes_all_books_are_zero(run, seed):
    """Successes, refusals, clients that leave, deadlines, engines that die and come back."""

    async def main():
        rng = random.Random(seed)
        engines = [
            FakeEngine(f"e{i}", role, gap_s=0.002, script=lambda body: rng.choice(FAULTS))
            for i, role in enumerate(["prefill", "prefill", "decode", "decode", "decode"])
        ]
        limits = {
            "queue_timeout_s": 1,
            "retry_budget_floor": 50,
            "first_token_timeout_s": 0.3,
            "gap_timeout_s": 0.2,
            "body_timeout_s": 0.5,
            "default_slots": 12,
            "conditional_prefill": seed % 2,
        }
        async with routed(*engines, settings=limits, policy="kv") as bench:
            begin_sources(bench)
            tasks = []
            for number in range(120):
                prompt = prompt_of(number % 7, 100 + 20 * (number % 10))
                body = {"prompt": prompt, "stream": rng.random() < 0.7}
                tasks.append(asyncio.create_task(bench.client.complete(**body)))
                await asyncio.sleep(rng.random() * 0.004)
                if number == 50:
                    await engines[4].stop()
                if number == 90:
                    await engines[4].start()
            for task in rng.sample(tasks, 40):
                task.cancel()
                await asyncio.sleep(rng.random() * 0.01)
            await asyncio.wait(tasks)
            await until(lambda: not bench.desk.flights)

            statuses = {task.result().status for task in tasks if not task.cancelled()}
            assert statuses <= {200, 400, 502, 503, 504}
            assert len(statuses) > 2
            bench.assert_books_balance()
            assert all(w.pending_prefills == 0 for w in bench.desk.workers.all())
            assert_links_are_free(bench)
            index, now_s = bench.desk.index, bench.desk.loop.time()
            for later_s in (6.0, 12.0):
                index.sweep(now_s + later_s)
            assert len(index._expected) == 0

    run(main)


@pytest.mark.parametrize("fault", ["status:400", "status:500", "refuse", "cut:0", "stall"])
def test_a_prompt_that_an_engine_did_not_take_is_not_expected_there(run, fault):
    async def main():
        engine = FakeEngine("e0", script=lambda body: fault)
        limits = {"first_token_timeout_s": 0.2, "max_retries": 0}
        async with routed(engine, settings=limits, policy="kv") as bench:
            begin_sources(bench)
            prompt = prompt_of(1, 400)
            answer = await bench.client.complete(prompt=prompt, stream=True)
            assert answer.status != 200
            assert bench.desk.index.match(blocks_of(bench, prompt)) == {}
            assert len(bench.desk.index._expected) == 0

            engine.script = lambda body: None
            await until(lambda: bench.desk.workers.get("e0").has_room(bench.desk.loop.time()))
            assert (await bench.client.complete(prompt=prompt)).status == 200
            assert bench.desk.index.match(blocks_of(bench, prompt)) == {"e0": 24}

    run(main)


def test_a_client_that_leaves_during_prefill_leaves_no_expectation(run):
    async def main():
        engine = FakeEngine("e0", script=lambda body: "stall")
        async with routed(engine, policy="kv") as bench:
            begin_sources(bench)
            prompt = prompt_of(1, 400)
            task = asyncio.create_task(bench.client.complete(prompt=prompt, stream=True))
            await until(lambda: engine.num_running == 1)
            assert bench.desk.index.match(blocks_of(bench, prompt)) == {"e0": 24}
            task.cancel()
            await until(lambda: not bench.desk.flights)
            assert bench.desk.index.match(blocks_of(bench, prompt)) == {}

    run(main)


def test_a_transfer_belongs_to_the_engine_that_prefilled_and_to_none_after_a_local_prefill(run):
    async def main():
        broken, sound = FakeEngine("p0", "prefill"), FakeEngine("p1", "prefill")
        broken.script = lambda body: "status:500"
        decode = FakeEngine("d0", "decode")
        async with routed(broken, sound, decode, settings={"retry_budget_floor": 50}) as bench:
            links = bench.desk.placement.links
            for number in range(8):
                body = {"prompt": prompt_of(number, 200), "stream": True}
                assert (await bench.client.complete(**body)).status == 200
            assert len(broken.requests) > 0
            assert set(links._pairs) == {("p1", "d0")}
            assert_links_are_free(bench)

            sound.script = broken.script
            decode.go.clear()
            task = asyncio.create_task(bench.client.complete(prompt=prompt_of(9, 200), stream=True))
            await until(lambda: decode.num_running == 1)
            assert links.num_booked == 0
            decode.go.set()
            assert (await task).status == 200
            assert_links_are_free(bench)

    run(main)


@pytest.mark.source
def test_an_index_that_fails_leaves_no_booking_behind(run):
    async def main():
        async with routed(FakeEngine("e0"), policy="kv") as bench:
            begin_sources(bench)

            def fail(*_):
                raise ValueError("a fault of ours")

            bench.desk.index.expect = bench.desk.index.unexpect = fail
            prompt = prompt_of(1, 400)
            assert (await bench.client.complete(prompt=prompt)).status == 200
            bench.assert_books_balance()

    run(main)
