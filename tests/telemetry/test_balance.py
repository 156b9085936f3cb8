"""Verdicts on pools, and sums of routers' hits."""

from dataclasses import replace

import pytest

from dynctl.core.workload import Slo
from dynctl.errors import ProbeError
from dynctl.telemetry.balance import balance
from dynctl.telemetry.figures import PoolFigures
from dynctl.telemetry.history import Latency
from dynctl.telemetry.hit_sums import hit_figures, sums

SLO = Slo(500.0, 40.0)


def pool(role, **fields):
    latency = {"ttft": Latency(0.1, 0.2, 0.3, 9.0), "itl": Latency(0.01, 0.02, 0.03, 9.0)}
    given = {
        "deployment": "chat", "num_ready": 2, "num_engines": 2, "running": 3.0, "waiting": 0.0, "kv_usage_ratio": 0.5,
        "hit_ratio": None, "prompt_tokens_s": None, "output_tokens_s": None,
    }  # fmt: skip
    return PoolFigures(role=role, **given | latency | fields)


SLOW = Latency(0.1, 0.2, 0.6, 9.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "verdict"),
    [
        ({}, {}, "balanced"),
        ({"waiting": 2.0}, {}, "prefill bound"),
        ({"waiting": 1.9}, {}, "balanced"),
        ({"ttft": SLOW}, {}, "prefill bound"),
        ({}, {"kv_usage_ratio": 0.9}, "decode bound"),
        ({}, {"itl": SLOW}, "decode bound"),
        ({}, {"waiting": 4.0}, "decode bound"),
        ({"ttft": SLOW}, {"itl": SLOW}, "both are full"),
        # A decode engine's own TTFT is no figure of a request, nor is a prefill engine's gap.
        ({"itl": SLOW, "kv_usage_ratio": 0.99}, {"ttft": SLOW}, "balanced"),
        ({"num_ready": 0, "ttft": None}, {}, ""),
    ],
)
def test_the_verdict_names_the_side_that_is_full(prefill, decode, verdict):
    found = balance([pool("prefill", **prefill), pool("decode", **decode)], SLO)

    assert found.verdict == verdict
    assert any(one.is_over for one in found.evidence) is (verdict not in {"balanced", ""})


def test_one_pool_is_full_or_has_room():
    assert balance([pool("aggregated")], SLO).verdict == "has room"
    assert balance([pool("aggregated", waiting=2.0)], SLO).verdict == "full"
    assert balance([], SLO).verdict == ""


def test_without_goals_latency_is_no_evidence():
    found = balance([pool("prefill", ttft=SLOW), pool("decode", itl=SLOW)], Slo())

    assert found.verdict == "balanced"
    assert {one.what for one in found.evidence} == {"waiting", "kv"}


def test_what_is_not_known_is_no_evidence():
    found = balance([replace(pool("prefill"), waiting=None, ttft=None), pool("decode")], SLO)

    assert found.verdict == ""
    assert [one.value for one in found.evidence[:2]] == [None, None]


ONE = {
    "requests": 10.0, "requests_reported": 10.0, "prompt_tokens": 1000.0, "predicted_tokens": 600.0,
    "reported_tokens": 500.0, "hit_tokens": 500.0, "routing_tokens": 100.0, "eviction_tokens": 100.0,
    "cold_tokens": 250.0, "probe_tokens": 100.0, "probe_cached_tokens": 90.0, "moved_tcp_tokens": 7.0,
    "moved_tcp_bytes": 70.0,
}  # fmt: skip


def test_sums_of_several_routers_are_added_before_they_are_divided():
    other = dict.fromkeys(ONE, 0.0) | {"prompt_tokens": 1000.0}
    found = hit_figures([ONE, other])

    assert (found.predicted_ratio, found.reported_ratio, found.probe_ratio) == (0.3, 0.25, 0.9)
    assert (found.bound_present_ratio, found.bound_unlimited_ratio) == (0.3, 0.35)
    assert (found.lost_routing_ratio, found.lost_eviction_ratio, found.lost_cold_ratio) == (
        0.05,
        0.05,
        0.125,
    )
    assert found.moved["tcp"] == (7.0, 70.0)
    assert found.moved["rdma"] == (0.0, None)


def test_ratios_without_anything_to_divide_by_are_unknown():
    found = hit_figures([{"prompt_tokens": 100.0, "predicted_tokens": 0.0}])

    assert (found.predicted_ratio, found.reported_ratio, found.probe_ratio) == (0.0, None, None)
    assert hit_figures([{}]).predicted_ratio is None
    assert hit_figures([]) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ProbeError, match="not understood"):
        sums(body)
