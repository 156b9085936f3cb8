"""What is learned of an engine: true where there are facts, held to the others where there are few, never for ever."""

import random

import pytest
from router_bench import routed, until
from router_fakes import MODEL, FakeEngine

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.rates import Line, Pressure
from dynctl.router.worker_table import WorkerTable


def learned(line, base, slope, sizes, number=200, noise_ms=0.0):
    rng = random.Random(1)
    for _ in range(number):
        x = rng.choice(sizes)
        line.learn(x, max(base + slope * x + rng.uniform(-noise_ms, noise_ms), 0.0))
    return line


@pytest.mark.parametrize("slope", [0.005, 0.06, 1.5])
def test_a_rate_is_learned_from_prefills_of_different_sizes(slope):
    line = learned(Line(5.0, 0.1, 2048.0), 4.0, slope, [50, 500, 5000])
    assert line.at(3000) == pytest.approx(4.0 + slope * 3000, rel=0.05)


def test_noise_on_equal_sizes_gives_no_absurd_price_of_a_long_prompt():
    line = learned(Line(5.0, 0.1, 2048.0, weight=0.5), 4.0, 0.06, [140, 150, 160], noise_ms=8.0)
    assert line.at(1500) == pytest.approx(4.0 + 0.06 * 1500, rel=0.4)


def table_of(*names):
    table = WorkerTable(Settings())
    for name in names:
        info = EngineInfo(name, f"{name}.1", EngineState.READY, "aggregated", "d", "sim", "m", 16)
        table.put(info)
    return table


def prefill(worker, tokens, ms, now_s):
    booking = worker.book(tokens, tokens, 1, now_s)
    booking.prefill_ended(now_s + ms / 1e3)
    worker.prefill_took(tokens, ms)
    booking.release()


def test_engines_of_different_speed_are_told_apart():
    table, rng = table_of("fast", "slow"), random.Random(2)
    for i in range(300):
        tokens = rng.choice([100, 1000, 4000])
        prefill(table.get("fast"), tokens, 3.0 + tokens * 0.05, float(i))
        prefill(table.get("slow"), tokens, 3.0 + tokens * 0.15, float(i))

    fast, slow = (table.get(name).prefill.slope for name in ("fast", "slow"))
    assert slow > 1.8 * fast


def test_an_engine_that_had_a_bad_time_comes_back_to_the_others_when_it_is_avoided():
    table, rng = table_of("a", "b"), random.Random(3)
    good, stalled = table.get("a"), table.get("b")
    for i in range(100):
        tokens = rng.choice([100, 1000])
        prefill(good, tokens, 3.0 + tokens * 0.05, i * 0.1)
        prefill(stalled, tokens, (3.0 + tokens * 0.05) * (8.0 if i > 70 else 1.0), i * 0.1)
    assert stalled.prefill.at(1000) > 1.25 * good.prefill.at(1000)

    for second in range(120):
        for _ in range(5):
            tokens = rng.choice([100, 1000])
            prefill(good, tokens, 3.0 + tokens * 0.05, 10.0 + second)
        table.relax(10.0 + second, PrefixIndex())

    assert stalled.load().prefill_ms_per_token < 1.1 * good.load().prefill_ms_per_token


def test_an_engine_nobody_has_seen_at_work_is_taken_for_one_like_the_others():
    table = table_of("a", "b")
    for i in range(100):
        prefill(table.get("a"), 100 * (1 + i % 9), 2.0 + (1 + i % 9) * 0.5, float(i))

    assumed = 1000.0 / Settings().prefill_tokens_s
    assert 0.004 < table.get("b").load().prefill_ms_per_token < 0.15 * assumed


def test_pressure_is_learned_from_engines_that_differ_at_one_time():
    pressure, rng = Pressure(15.0, 0.1), random.Random(4)
    for _ in range(400):
        running = rng.randrange(1, 30)
        pressure.learn(running, 20.0 + 0.5 * running + rng.uniform(-1.0, 1.0))
    assert pressure.slope == pytest.approx(0.5, rel=0.1)


def test_what_slows_all_engines_alike_is_no_pressure():
    # Engines that share one processor, as in a test: a plain fit of gaps over sequences gives about 1.5.
    pressure, rng = Pressure(15.0, 0.1), random.Random(5)
    for i in range(600):
        total = 8 + 8 * (i // 60 % 2)
        pressure.learn(rng.randrange(total // 2 + 1), 8.0 + 1.5 * total + rng.uniform(-1.0, 1.0))
        assert pressure.slope < 0.8
    assert pressure.slope < 0.3


def test_a_stall_in_which_requests_pile_up_is_no_pressure():
    pressure, rng = Pressure(15.0, 0.1), random.Random(6)
    for i in range(300):
        is_stalled = 200 <= i < 206
        running = 7 if is_stalled else rng.randrange(5)
        pressure.learn(running, 35.0 if is_stalled else 8.0 + rng.uniform(-0.5, 0.5))
        assert pressure.slope < 0.4


def test_a_gap_far_from_the_declared_one_is_not_taken_for_pressure():
    pressure = Pressure(15.0, 0.1)
    for i in range(40):
        pressure.learn(i % 6, 8.0 + 0.2 * (i % 3))
        assert pressure.slope <= 0.11


def test_small_work_prices_large_work_by_the_declared_shape_at_the_observed_level():
    line = learned(Line(5.0, 0.1, 2048.0), 2.0, 0.04, [200], number=5)
    assert line.at(2000) == pytest.approx((5.0 + 0.1 * 2000) * 10.0 / 25.0, rel=0.05)


def test_tokens_that_come_in_one_read_teach_no_pace_and_break_nothing():
    table = WorkerTable(Settings())
    table.put(EngineInfo(*("e0", "i1", EngineState.READY, "aggregated", "d", "sim", "m")))
    worker = table.get("e0")
    for _ in range(200):
        worker.gaps_took(0.0)
    assert worker.load() is not None
    assert worker.step_ms == 0.0

    for _ in range(5):
        worker.gaps_took(20.0)
    assert table.tally.pressure.gap_ms == worker.step_ms == pytest.approx(20.0)


@pytest.mark.parametrize("prompt", ["hello", "hello " * 400])
def test_what_answers_were_like_is_learned_on_both_ways_of_a_request(run, prompt):
    async def main():
        async with routed(FakeEngine("e0", tokens=40, gap_s=0.001), policy="kv") as bench:
            table = bench.desk.workers
            worker, gap_ms = table.get("e0"), table.tally.pressure.gap_ms
            for _ in range(3):
                body = {"model": MODEL, "prompt": prompt, "stream": True}
                answer = await bench.client.post("/v1/completions", body, x_dynctl_route_key="mine")
                assert answer.status == 200
            await until(lambda: not bench.desk.flights)
            assert table.lengths.expected("mine", None) == 40
            assert worker.prefill.num_seen == table.tally.prefill.num_seen == 3
            assert table.tally.pressure.gap_ms != gap_ms

    run(main)
