"""What only shows after hours: clocks and counters that have gone far."""

import asyncio

import pytest
from router_bench import routed, until
from router_clock import JumpingLoop
from router_fakes import FakeEngine

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.worker_table import WorkerTable

INFO = EngineInfo(*("e0", "e0.1", EngineState.READY, "aggregated", "d", "sim", "m"))
NIGHT_S = 10 * 3600.0


@pytest.mark.parametrize("warm_idle", [0, 6])
@pytest.mark.parametrize("prompt", ["short", "a long prompt, which takes the long way"])
def test_a_router_that_nobody_asked_for_a_night_serves_on(prompt, warm_idle):
    async def main():
        settings = {"short_request_chars": 20, "engine_poll_s": 3600.0, "warm_idle": warm_idle}
        async with routed(FakeEngine("e0"), settings=settings, policy="kv") as bench:
            for _ in range(3):
                answer = await bench.client.complete(prompt=prompt)
                assert answer.status == 200
                await until(lambda: not bench.desk.flights)
                asyncio.get_running_loop().pass_by(NIGHT_S)
            bench.assert_books_balance()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


def test_what_engines_had_long_ago_counts_no_more():
    table = WorkerTable(Settings())
    table.put(INFO)
    table.get("e0").book(64, 64, 1, 0.0, table.recent_unit(0.0)).release()

    assert table.recent_unit(NIGHT_S) == 1.0
    assert 0.0 <= table.get("e0").recent < 1e-9
    assert table.recent_unit(NIGHT_S + 4.0) == pytest.approx(2.718, abs=0.001)


def test_an_engine_that_has_failed_thousands_of_times_is_left_alone_for_a_minute_each_time():
    table = WorkerTable(Settings())
    table.put(INFO)
    worker = table.get("e0")
    for _ in range(5000):
        worker.failed(100.0)

        assert worker.failures_in_row < 10 or not worker.has_room(159.9)
        assert worker.has_room(160.0)

    worker.succeeded(160.0)
    assert worker.has_room(160.0)
    assert worker.failures_in_row == 0
