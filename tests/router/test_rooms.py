"""KV memory: what requests under way will need at most, what they share counted once, and who waits for it."""

import asyncio
import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_bench import until
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.cli import explain
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.plan import Role
from dynctl.core.workload import Slo
from dynctl.planner.simulate import Replay, SimSetting
from dynctl.planner.trace import Call, Trace
from dynctl.planner.virtual import VirtualEngineSpec
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placed, Placement, Unplaced
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.shared_books import SharedBooks, make_books
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker
from dynctl.sim.scheduler import StepCosts

HASHERS = Hashers("rooms")


def info(name, capacity, size=16, **facts):
    return EngineInfo(
        name,
        f"{name}.1",
        EngineState.READY,
        "aggregated",
        "d",
        "sim",
        "m",
        size,
        kv_capacity_tokens=capacity,
        **facts,
    )


def placement_of(*engines, **changed):
    made = Settings(**changed)
    table = WorkerTable(made)
    for engine in engines:
        table.put(engine)
    return Placement(table, PrefixIndex(), load_policy("kv"), made, random.Random(1))


def place(placement, ids, output=64, now_s=100.0):
    order = Order("r", Prompt.known(HASHERS, ids), None, output)
    return placement.place(order, now_s)


# What is shared


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_what_prompts_share_is_what_distinct_blocks_leave(prompts, rng):
    worker = Worker(info("e", 100_000, size=2), Settings())
    room, under_way = worker.room, []
    # Something is always there, and was looked at.
    under_way.append(([7], worker.book(1, 1, 5, 0.0, prompt=Prompt.known(HASHERS, [7]))))
    assert not room.fits(None, 1_000_000, 0, 0.0, 0.01)
    for ids in prompts:
        if rng.random() < 0.4 and len(under_way) > 1:
            under_way.pop(rng.randrange(1, len(under_way)))[1].release()
        booking = worker.book(len(ids), len(ids), 5, 0.0, prompt=Prompt.known(HASHERS, ids))
        under_way.append((ids, booking))

        blocks = [tuple(own[: 2 * n]) for own, _ in under_way for n in range(1, len(own) // 2 + 1)]
        assert room.shared_tokens == 2 * (len(blocks) - len(set(blocks)))
        assert room.booked_tokens == sum(len(own) + 5 for own, _ in under_way)
    for _, booking in under_way:
        booking.release()
    assert (room.shared_tokens, room.booked_tokens, worker.active_tokens) == (0, 0, 0)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_what_two_prompts_have_in_common_is_known_to_a_sixteenth_and_never_too_much(one, two, same):
    same = min(same, one, two)
    prompts = [
        Prompt.known(HASHERS, [5] * same + [6 + n] * (length - same))
        for n, length in enumerate((one, two))
    ]
    points = [dict(prompt.points(1)) for prompt in prompts]

    common = sum(tokens for point, tokens in points[0].items() if point in points[1])
    assert same * 15 / 16 - 1 <= common <= same


# Who waits


def test_conversations_with_one_prefix_all_run_where_it_is_stored_once():
    # Booked: 64 times 4,096 and more; stored: 4,096 once, and 64 times 128 with answers of 64.
    placement = placement_of(info("e0", 24_000), info("e1", 24_000))
    prefix = list(range(1, 4097))
    made = [place(placement, prefix + [9000 + i] * 128) for i in range(64)]

    assert all(isinstance(one, Placed) for one in made)
    used = {worker.id: worker.active_requests for worker in placement.workers.all()}
    assert min(used.values()) > 0, used
    for one in made:
        one.main.release()
    for worker in placement.workers.all():
        assert (worker.active_tokens, worker.reserved_tokens) == (0, 0)


def test_what_fits_nowhere_waits_while_others_run_and_goes_anywhere_idle():
    placement = placement_of(info("e0", 4000), info("e1", 4000))
    first = [place(placement, [i] * 3000) for i in (1, 2)]
    assert isinstance(place(placement, [3] * 3000), Unplaced)
    assert isinstance(place(placement, [1] * 3000, output=64), Placed), "all of it is there"
    first[1].main.release()
    largest = place(placement, [4] * 5000)
    assert isinstance(largest, Placed), (
        "more than an engine has: it is for an idle engine to say so"
    )
    assert isinstance(place(placement, [5] * 3000), Unplaced)


def test_a_prompt_beyond_all_memory_goes_to_a_busy_engine_to_be_refused():
    placement = placement_of(info("e0", 4000), info("e1", 4000))
    for ids in ([1] * 3000, [2] * 3000):
        assert isinstance(place(placement, ids), Placed)
    assert isinstance(place(placement, [3] * 3000), Unplaced), "it fits once another is done"
    assert isinstance(place(placement, [4] * 4001), Placed)


def test_a_prompt_that_only_a_larger_engine_can_hold_waits_for_that():
    placement = placement_of(info("small", 2000), info("large", 8000))
    first = place(placement, [1] * 5000)
    assert isinstance(first, Placed)
    assert first.main.worker.id == "large", "though the other does nothing, too"
    assert isinstance(place(placement, [2] * 5000), Unplaced)
    first.main.release()
    second = place(placement, [2] * 5000)
    assert second.main.worker.id == "large"


@pytest.mark.parametrize(
    "change", [{"kv_capacity_tokens": 0}, {"kv_lookahead_tokens": 0}, {"size": 0}]
)
def test_nothing_is_held_back_where_room_is_not_known_or_not_asked_for(change):
    settings = {name: value for name, value in change.items() if name == "kv_lookahead_tokens"}
    engine = info("e0", change.get("kv_capacity_tokens", 4000), change.get("size", 16))
    placement = placement_of(engine, **settings)

    assert all(isinstance(place(placement, [i] * 3000), Placed) for i in range(20))


def test_what_answers_have_said_counts_and_so_many_further_tokens_of_each():
    placement = placement_of(info("e0", 4000), kv_lookahead_tokens=32)
    placement.workers.lengths.learn("", 1000)
    first = place(placement, [1] * 1500, output=1000)
    # At their ends they will need 5,000; now it is 3,064 and at most a block each.
    second = place(placement, [2] * 1500, output=1000)
    assert isinstance(second, Placed)
    first.main.prefill_ended(100.5)
    second.main.prefill_ended(100.5)
    for seen, fits in ((400, 40), (390, 60), (100, 640)):
        first.main.num_seen = second.main.num_seen = seen
        # A look is not made again at once.
        now_s = 1000.0 - seen
        assert isinstance(place(placement, [3] * (fits + 20), now_s=now_s), Unplaced)
        made = place(placement, [3] * fits, now_s=now_s)
        assert isinstance(made, Placed)
        made.main.release()


def test_what_was_seen_long_ago_lets_nobody_in():
    worker = Worker(info("e0", 16_000), Settings())
    prompt = Prompt.known(HASHERS, [99] * 1000)
    bookings = [
        worker.book(100, 100, 1200, 0.0, prompt=Prompt.known(HASHERS, [i + 1] * 100))
        for i in range(12)
    ]
    for booking in bookings:
        booking.prefill_ended(0.0)
    assert worker.fits(prompt, 1100, 0.0)
    for booking in bookings:
        booking.num_seen = 1199
    # In use are 15,588: nothing came and nothing ended, but the answers went on.
    assert not worker.fits(prompt, 1100, 1000.0)


def test_what_another_process_has_sent_takes_room_too():
    memory = make_books(2)
    mine, other = (placement_of(info("e0", 4000)) for _ in range(2))
    tables = mine.workers, other.workers
    books = [SharedBooks(memory, n, 2, table) for n, table in enumerate(tables)]
    made = [place(other, [1] * 1500), place(other, [1] * 1500)]
    assert isinstance(place(other, [2] * 3000), Unplaced), "it looks what they share"
    for now_s in (101.0, 102.0):
        for one in books:
            one.exchange(now_s)
    # 1,500 and answers of 64 each; of what they share all is seen but the last of 93 blocks.
    assert mine.workers.get("e0").active_tokens == 3128 - 1472
    assert isinstance(place(mine, [3] * 2400, now_s=103.0), Unplaced)
    assert isinstance(place(mine, [3] * 2200, now_s=103.0), Placed)
    for one in made:
        one.main.release()
    for one in books:
        one.close()
    os.close(memory)


# In simulation


def replayed(lookahead):
    """160 requests, each with a prompt of its own, on two engines with memory for about nine of them."""
    rng = random.Random(3)
    calls = tuple(Call(0.06 * number, rng.randrange(192, 384), 192) for number in range(160))
    costs = StepCosts(prefill_us_per_token=60.0, decode_ms=8.0, decode_us_per_seq=60.0)
    engines = [VirtualEngineSpec(f"e{i}", Role.AGGREGATED, costs, 260) for i in range(2)]
    made = Settings(kv_lookahead_tokens=lookahead, queue_timeout_s=1000.0)
    replay = Replay(Trace(calls, 16), engines, SimSetting(settings=made))
    replay._workers.lengths.learn("completions:192", 192)
    report = replay.run(Slo())
    assert report.num_failed == 0, "nothing waits for ever"
    return report, sum(engine.num_preemptions for engine in report.engines)


def test_admission_exceeds_no_blocks_where_it_looks_ahead_to_the_end():
    report, num_preemptions = replayed(10_000)

    assert num_preemptions == 0
    assert max(engine.peak_kv_ratio for engine in report.engines) > 0.85, "and memory is used"


def test_a_short_look_ahead_spares_most_preemptions_and_takes_no_longer():
    (without, most), (with_rule, few) = replayed(0), replayed(Settings().kv_lookahead_tokens)

    assert most > 50
    assert few < most / 2
    assert with_rule.duration_s < 1.02 * without.duration_s


# With engines


def test_a_prompt_beyond_all_memory_is_refused_by_its_engine_and_holds_nobody_up(run, short_dir):
    async def main():
        sims = [Sim("e0", short_dir, num_blocks=257, decode_ms=5.0, max_model_len=4096)]
        async with routed_sims(*sims, settings={"queue_timeout_s": 100}) as bench:
            rng, words = random.Random(1), bench.text.words
            running = asyncio.create_task(generate(bench, prompt_of(rng, words, 2500), 600))
            await until(lambda: bench.desk.workers.get("e0").active_tokens > 2500)
            large, small = await asyncio.gather(
                bench.client.complete(model="sim", prompt=prompt_of(rng, words, 5000)),
                bench.client.complete(model="sim", prompt=prompt_of(rng, words, 200), max_tokens=5),
            )
            assert (large.status, small.status, running.done()) == (400, 200, False)
            assert len(await running) == 600

    run(main)


def test_requests_queue_at_the_router_for_kv_memory_and_explain_says_so(run, short_dir, capsys):
    async def main():
        options = {"num_blocks": 129, "decode_ms": 5.0, "max_model_len": 2048}
        sims = [Sim(f"e{i}", short_dir, **options) for i in range(2)]
        limits = {"queue_timeout_s": 100, "short_request_chars": 0}
        async with routed_sims(*sims, settings=limits) as bench:
            rng = random.Random(5)
            prompts = [prompt_of(rng, bench.text.words, 1000) for _ in range(12)]
            # One that an engine has room for only when nothing else runs there.
            prompts[6] = prompt_of(rng, bench.text.words, 1900)
            answers = [asyncio.create_task(generate(bench, p, 60)) for p in prompts]
            await until(lambda: len(bench.desk.line) > 0)
            assert [len(answer) for answer in await asyncio.gather(*answers)] == [60] * 12

            assert sum(sim.engine.scheduler.counts.num_preemptions for sim in sims) == 0
            found = json.loads(bench.desk.ring.to_json(100))
            held = [one for one in found if one["left_out"]]
            assert {reason for one in held for reason in one["left_out"].values()} == {"kv_memory"}
            explain._show(held[0])
            [line] = [one for one in capsys.readouterr().out.splitlines() if "left out" in one]
            assert "has no room for it in its KV memory" in line
            bench.assert_books_balance()

    run(main)
