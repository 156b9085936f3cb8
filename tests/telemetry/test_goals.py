"""When missing a goal is told, and when it is over."""

from dataclasses import replace

import pytest

from dynctl.core.workload import Slo
from dynctl.telemetry.history import share_within
from dynctl.telemetry.ledger import Ledger


def told(ledger):
    return [f"{e.mark} {e.subject} {e.text}" for e in ledger.events.newest(50)][::-1]


def run(ledger, snapshot, ticks, slow_from=None, slow_until=None):
    """Ten requests a second; between the two ticks half of them are slow."""
    num_slow, at = 0, {}
    for tick in range(1, ticks + 1):
        if slow_from is not None and slow_from <= tick < slow_until:
            num_slow += 5
        ledger.take(snapshot(tick, num_fast=10 * tick - num_slow, num_slow=num_slow), float(tick))
        for text in told(ledger)[len(at):]:  # fmt: skip
            at[text] = tick
    return at


def test_a_missed_goal_is_told_once_after_ten_seconds_and_when_it_is_met_again(snapshot):
    found = run(Ledger({"chat": Slo(500.0)}), snapshot, ticks=200, slow_from=50, slow_until=60)

    (missed, missed_at), (met, met_at) = found.items()
    assert missed.startswith("! chat TTFT p99 1")
    assert "misses its SLO of 500 ms, " in missed
    assert met.startswith("· chat TTFT p99 ")
    assert "meets its SLO of 500 ms again, after 1m" in met
    assert missed_at == 60
    # At 118 five of the 600 in the window are late, under 1%; half a minute later it is told.
    assert met_at == 118 + 30


def test_a_short_burst_and_a_single_slow_request_are_no_news(snapshot):
    ledger = Ledger({"chat": Slo(500.0)})
    for tick in range(1, 100):
        ledger.take(snapshot(tick, num_fast=tick // 10, num_slow=int(tick > 20)), float(tick))

    assert told(ledger) == []


def test_without_a_goal_nothing_is_missed(snapshot):
    assert run(Ledger(), snapshot, ticks=100, slow_from=20, slow_until=90) == {}
    assert run(Ledger({"other": Slo(1.0)}), snapshot, 100, 20, 90) == {}


def test_no_requests_end_no_trouble(snapshot):
    ledger = Ledger({"chat": Slo(500.0)})
    for tick in range(1, 400):
        num = min(tick, 30)
        ledger.take(snapshot(tick, num_fast=5 * num, num_slow=5 * num), float(tick))

    (missed,) = told(ledger)
    assert "misses" in missed


def test_of_several_engines_the_slowest_is_named(snapshot):
    ledger = Ledger({"chat": Slo(500.0)})
    for tick in range(1, 20):
        taken = snapshot(tick, num_fast=5 * tick, num_slow=5 * tick)
        host = taken.hosts[0]
        fine = snapshot(tick).hosts[0].engines[0]
        units = (*host.units, replace(host.units[0], id="chat-1"))
        engines = (*host.engines, replace(fine, id="chat-1"))
        ledger.take(replace(taken, hosts=(replace(host, units=units, engines=engines),)), float(tick))  # fmt: skip

    (missed,) = told(ledger)
    assert missed.endswith("; slowest chat-0 1980 ms")


def test_the_share_within_a_goal_is_shown_with_the_deployment(snapshot):
    ledger = Ledger({"chat": Slo(500.0)})
    for tick in range(1, 5):
        overview = ledger.take(snapshot(tick, num_fast=6 * tick, num_slow=2 * tick), float(tick))

    (chat,) = overview.deployments
    assert chat.slo == Slo(500.0)
    assert chat.ttft_within_ratio == 0.75
    assert chat.itl_within_ratio is None


@pytest.mark.parametrize(
    ("limit_s", "share"),
    [(0.0, 0.0), (0.05, 0.25), (0.1, 0.5), (0.5, 0.5), (1.5, 0.75), (2.0, 1.0), (9.0, 1.0)],
)
def test_shares_are_linear_inside_a_bucket(snapshot, limit_s, share):
    found = snapshot(1, num_fast=4, num_slow=4).hosts[0].routers[0].ttft_s

    assert share_within(found, limit_s) == pytest.approx(share)


def test_of_nothing_there_is_no_share(snapshot):
    assert share_within(None, 1.0) is None
    assert share_within(snapshot(0).hosts[0].routers[0].ttft_s, 1.0) is None


def test_a_histogram_that_changes_its_buckets_begins_anew(snapshot):
    ledger = Ledger({"chat": Slo(500.0)})
    ledger.take(snapshot(1), 1.0)
    ledger.take(snapshot(2), 2.0)
    taken = snapshot(3)
    host = taken.hosts[0]
    other = replace(host.routers[0].ttft_s, bounds=(0.5, 0.6), counts=(40.0, 40.0, 40.0))
    routers = (replace(host.routers[0], ttft_s=other),)
    overview = ledger.take(replace(taken, hosts=(replace(host, routers=routers),)), 3.0)

    assert overview.deployments[0].ttft.num_observations == 50.0
