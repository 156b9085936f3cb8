"""A router that takes too long to decide says so."""

import pytest
from router_bench import routed
from router_fakes import FakeEngine

from dynctl.router.alarms import Alarms
from dynctl.router.metrics import Metrics


def decided(*spans):
    """Alarms after so many decisions of each time; what they found."""
    metrics = Metrics()
    alarms = Alarms(metrics.decision, is_compiled=False)
    assert alarms.tick(0.0) == []
    for number, seconds in spans:
        metrics.decision.observe(seconds, number)
    return metrics, alarms, alarms.tick(1.0)


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([(196, 1e-4), (4, 3e-3)], None),
        ([(495, 1e-4), (5, 3e-3)], None),
        (
            [(195, 1e-4), (5, 3e-3)],
            "5 of 200 decisions in the last minute took more than 2 ms, 99 of 100 up to 5 ms",
        ),
        (
            [(190, 1e-4), (9, 3e-3), (1, 0.02)],
            "10 of 200 decisions in the last minute took more than 2 ms, 99 of 100 up to 5 ms",
        ),
        (
            [(190, 1e-4), (7, 3e-3), (3, 0.7)],
            "10 of 200 decisions in the last minute took more than 2 ms, 99 of 100 over 50 ms",
        ),
        ([(200, 2e-3)], None),
        ([(99, 0.1)], None),
    ],
)
def test_a_99th_percentile_beyond_two_milliseconds_is_found(spans, text):
    _, alarms, found = decided(*spans)

    assert [one.text.removesuffix(" ms") for one in found] == (
        [text.removesuffix(" ms")] if text else []
    )
    assert alarms.findings() == found
    for one in found:
        assert (one.engine, one.cause) == ("", "slow_decisions")
        assert "a core of its own" in one.hint
        assert "make wheel" in one.hint


def test_it_is_told_once_and_is_over_a_minute_after_the_last_slow_decisions():
    metrics, alarms, found = decided((200, 5e-3))
    assert found
    assert alarms.tick(2.0) == []
    assert alarms.findings()
    for now_s in range(3, 70):
        metrics.decision.observe(1e-4, 10)
        assert alarms.tick(float(now_s)) == []
    assert alarms.findings() == []


def test_near_the_limit_it_does_not_come_and_go():
    metrics = Metrics()
    alarms = Alarms(metrics.decision, is_compiled=True)
    num_told = 0
    for now_s in range(1, 600):
        metrics.decision.observe(1e-4, 20)
        if now_s % 20 < (4 + now_s // 60 % 2):
            metrics.decision.observe(3e-3)
        num_told += len(alarms.tick(float(now_s)))
    assert num_told == 1
    assert alarms.findings()


def test_it_is_over_when_hardly_any_are_slow_or_after_a_whole_window_below_the_limit():
    metrics, alarms, found = decided((975, 1e-4), (25, 3e-3))
    assert found
    metrics.decision.observe(1e-4, 2500)
    assert alarms.tick(2.0) == []
    assert alarms.findings() == found, "0.7 % are slow"
    metrics.decision.observe(1e-4, 2500)
    alarms.tick(3.0)
    assert alarms.findings() == [], "0.4 %"

    metrics, alarms, found = decided((975, 1e-4), (25, 3e-3))
    metrics.decision.observe(1e-4, 2500)
    for now_s in range(2, 61):
        metrics.decision.observe(1e-4, 100)
        metrics.decision.observe(3e-3, 1)
        alarms.tick(float(now_s))
        assert alarms.findings() == found
    metrics.decision.observe(1e-4, 100)
    alarms.tick(61.0)
    assert alarms.findings() == []


def test_what_is_wrong_with_the_router_is_told_where_findings_are(run):
    async def main():
        async with routed(FakeEngine()) as bench:
            desk = bench.desk
            desk.alarms.tick(desk.loop.time())
            desk.metrics.decision.observe(0.01, 500)
            assert desk.alarms.tick(desk.loop.time())
            counted = desk.exposition().decode()
            assert 'dynctl_router_findings{engine="",cause="slow_decisions"} 1' in counted

    run(main)
