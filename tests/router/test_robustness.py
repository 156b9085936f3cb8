"""A wrong index or an engine that floods costs time, never an answer; the books always come back to zero."""

import asyncio
import random

from router_bench import events, routed, until
from router_fakes import FakeEngine
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.kv.hashing import BlockHasher
from dynctl.kv.wire import Delta, Heartbeat, Snapshot
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.sources.feed import KvFeed, LostError


def test_k20_a_wrong_index_never_changes_an_answer(run, short_dir):
    async def main():
        rng = random.Random(11)
        sims = [Sim(f"e{i}", short_dir) for i in range(3)]
        async with routed_sims(*sims) as bench:
            chain = sims[0].engine.chain
            prompts = [prompt_of(rng, bench.text.words, 120) for _ in range(6)]
            for _ in range(3):
                for prompt in prompts:
                    poison(bench, prompt, rng)
                    assert await generate(bench, prompt, 6) == chain.continuation(prompt, 6)
            bench.assert_books_balance()

    run(main)


def poison(bench, prompt, rng):
    """Claim and deny blocks at random."""
    hashes = bench.desk.hashers.of(16).prompt(prompt).hashes()
    for worker in bench.desk.workers.all():
        source = Source(worker.id, worker.incarnation)
        if not bench.desk.index.holds(source):
            bench.desk.index.begin(source)
        bench.desk.index.store(source, rng.sample(hashes, len(hashes) // 2))
        bench.desk.index.remove(source, rng.sample(hashes, len(hashes) // 2))


def test_o8_the_same_prefix_for_everyone_does_not_pile_up_on_one_engine(run, short_dir):
    async def main():
        rng = random.Random(12)
        sims = [Sim(f"e{i}", short_dir, decode_ms=3.0) for i in range(2)]
        async with routed_sims(*sims) as bench:
            prompt = prompt_of(rng, bench.text.words, 200)
            await generate(bench, prompt, 4)
            await until(lambda: len(bench.desk.index) > 0)
            peaks = []

            async def one(i):
                await generate(bench, prompt + prompt_of(rng, bench.text.words, 8), 40)
                peaks.append([w.active_requests for w in bench.desk.workers.all()])

            await asyncio.gather(*[one(i) for i in range(48)])

            shares = [sum(d.engine == f"e{i}" for d in bench.desk.ring._ring) for i in range(2)]
            assert min(shares) >= 10, shares

    run(main)


def test_chaos_leaves_the_books_at_zero_and_no_stream_both_broken_and_done(run):
    async def main():
        rng = random.Random(13)
        faults = [
            None,
            None,
            None,
            "refuse",
            "status:500",
            "status:503",
            "status:400",
            "cut:2",
            "error:1",
            "html",
        ]
        engines = [
            FakeEngine(f"e{i}", role, gap_s=0.001, script=lambda body: rng.choice(faults))
            for i, role in enumerate(["prefill", "prefill", "decode", "decode", "decode"])
        ]
        async with routed(
            *engines, settings={"queue_timeout_s": 3, "retry_budget_floor": 50}
        ) as bench:
            tasks = [
                asyncio.create_task(bench.client.complete(stream=rng.random() < 0.7))
                for _ in range(150)
            ]
            for task in rng.sample(tasks, 50):
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
            await asyncio.wait(tasks)
            await until(lambda: not bench.desk.flights)

            answers = [task.result() for task in tasks if not task.cancelled()]
            assert len(answers) >= 100
            for answer in answers:
                assert answer.status in {200, 400, 502, 503}
                is_stream = answer.body.startswith(b"data:")
                if is_stream:
                    last = events(answer.body)[-1]
                    assert (last == b"[DONE]") != (b'"error"' in answer.body)
            bench.assert_books_balance()
            for engine in engines:
                await until(lambda e=engine: e.num_running == 0)

    run(main)


def feed_all(feed, *frames):
    for frame in frames:
        for _ in feed.apply(frame):
            pass


def test_frames_are_applied_in_order_and_a_break_asks_for_a_new_snapshot():
    index = PrefixIndex()
    feed = KvFeed(index, Metrics(), "e", "i1")
    hasher = BlockHasher(b"s", 1)
    one, other, third = (hasher.prompt(ids) for ids in ([1, 2, 3], [1, 2, 4], [7]))
    a, b, c = one.hashes()
    d, e = other.hashes()[2], third.hashes()[0]
    feed_all(feed, Snapshot("i1", 4, 16, [a, b]), Delta("i1", 4, [c], []), Delta("i1", 9, [d], [c]))
    assert index.match(one) == {"e": 2}
    assert index.match(other) == {"e": 3}
    feed_all(feed, Heartbeat("i1", 9), Delta("i1", 10, [e], [], cleared=True))
    assert index.match(one) == {}
    assert index.match(third) == {"e": 1}
    for lost in (
        Heartbeat("i1", 11),
        Delta("i1", 3, [1], []),
        Delta("i2", 11, [1], []),
        Delta("i1", 1, [1], [], rank=1),
    ):
        try:
            feed_all(feed, lost)
        except LostError:
            continue
        raise AssertionError(f"{lost} was taken")

    index.drop("e")
    try:
        feed_all(feed, Delta("i1", 12, [1], []))
    except LostError:
        return
    raise AssertionError("an update of a dropped engine was taken")


def test_k19_other_work_gets_its_turn_by_blocks_applied_not_by_frames():
    index = PrefixIndex()
    feed = KvFeed(index, Metrics(), "e", "i1")
    assert len(list(feed.apply(Snapshot("i1", 0, 16, list(range(10_000)))))) == 9
    small = [
        len(list(feed.apply(Delta("i1", n + 1, [20_000 + 8 * n + i for i in range(8)], []))))
        for n in range(1024)
    ]
    assert sum(small) == 8
    assert index.num_blocks("e") == 10_000 + 8 * 1024
    gone = Delta("i1", 2000, [7], list(range(10_000)))
    assert len(list(feed.apply(gone))) == 9
    assert index.num_blocks("e") == 1 + 8 * 1024
