"""What operators read, from synthetic snapshots: sums, ratios, staleness, missing parts."""

import pytest

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.snapshot import (
    EngineSample,
    GpuSample,
    Histogram,
    HostSnapshot,
    RelaySample,
    RouterSample,
    Snapshot,
)
from dynctl.core.workload import Slo
from dynctl.telemetry.figures import (
    STALE,
    CacheFigures,
    MovedFigures,
    summarize,
)
from dynctl.telemetry.history import History
from dynctl.telemetry.trends import trend_values

BOUNDS = (0.1, 0.2, 0.4)


def unit(name, role, state=EngineState.READY, **fields):
    return UnitStatus(name, "engine", state, role=role, deployment="chat", **fields)


def engine(name, tick, **fields):
    return EngineSample(
        name,
        "i",
        running=2.0,
        waiting=1.0,
        kv_usage_ratio=0.5,
        prompt_tokens_total=1000.0 * tick,
        generation_tokens_total=100.0 * tick,
        prefix_queries_tokens_total=1000.0 * tick,
        prefix_hits_tokens_total=250.0 * tick,
        ttft_s=Histogram(BOUNDS, (0.0, 10.0 * tick, 10.0 * tick, 10.0 * tick), 1.5 * tick),
        **fields,
    )


def router(tick):
    return RouterSample(
        "r",
        "chat",
        requests_total=20.0 * tick,
        errors_total=1.0 * tick,
        inflight=4.0,
        queued=0.0,
        prompt_tokens_total=2000.0 * tick,
        predicted_hit_tokens_total=1000.0 * tick,
        possible_hit_tokens_total=1200.0 * tick,
        routing_tokens_total=100.0 * tick,
        eviction_tokens_total=60.0 * tick,
        cold_tokens_total=700.0 * tick,
        moved_nvlink_tokens_total=0.0,
        moved_tcp_tokens_total=50.0 * tick,
        kv_bytes_per_token=1000.0,
        caches_known=2.0,
        caches_doubtful=0.0,
        caches_reading=1.0,
        caches_untold=0.0,
        index_blocks=77.0,
        findings=(("p-0", "topic"),),
        output_tokens_total=300.0 * tick,
        ttft_s=Histogram(BOUNDS, (0.0, 0.0, 20.0 * tick, 20.0 * tick), 6.0 * tick),
    )


def relay(tick, bucket):
    """All events of one age; every host's relay has the same name."""
    counts = tuple(10.0 * tick if at >= bucket else 0.0 for at in range(4))
    return RelaySample("relay", "i", Histogram(BOUNDS, counts, 1.0 * tick))


def snapshot(tick, decode_age_s=0.0):
    prefill = HostSnapshot(
        "gpu-01",
        units=(unit("p-0", "prefill", gpu_uuids=("u0", "u1")),),
        gpus=(
            GpuSample(0, "u0", "H100", 0.8, 70, 80, 500.0, 60.0),
            GpuSample(1, "u1", "H100", 0.6, 60, 80, 400.0, 70.0),
            GpuSample(2, "u2", "H100", 0.1, 1, 80, 90.0, 40.0),
        ),
        engines=(engine("p-0", tick),),
        routers=(router(tick),),
        relays=(relay(tick, 1),),
    )
    decode = HostSnapshot(
        "gpu-02",
        units=(unit("d-0", "decode"), unit("d-1", "decode", EngineState.BACKOFF, num_restarts=2)),
        engines=(engine("d-0", tick),),
        relays=(relay(tick, 2),),
        age_s=decode_age_s,
        error="timed out" if decode_age_s else "",
    )
    return Snapshot("prod", 1.7e9 + tick, (prefill, decode))


def overview(**options):
    history = History()
    for tick in (1, 2, 3):
        history.add(snapshot(tick, **options), float(tick))
    return summarize(snapshot(3, **options), history, {"chat": Slo(500.0, 40.0)})


def test_engine_figures():
    first = overview().engines[0]

    assert (first.id, first.host_name, first.role, first.state) == (
        "p-0",
        "gpu-01",
        "prefill",
        "ready",
    )
    assert first.gpu_indices == (0, 1)
    assert first.gpu_util_ratio == pytest.approx(0.7)
    assert first.gpu_memory_used_bytes == 130
    assert first.gpu_power_w == 900.0
    assert first.gpu_temperature_celsius == 70.0
    assert first.hit_ratio == pytest.approx(0.25)
    assert first.prompt_tokens_s == pytest.approx(1000.0)
    assert first.output_tokens_s == pytest.approx(100.0)
    assert first.ttft.p50_s == pytest.approx(0.15)
    assert first.itl is None


def test_an_engine_without_a_scrape_has_unknown_figures():
    broken = overview().engines[2]

    assert (broken.id, broken.state, broken.num_restarts) == ("d-1", "backoff", 2)
    assert broken.running is None
    assert broken.gpu_util_ratio is None


def test_pools_come_in_the_order_of_a_request_and_add_up():
    prefill, decode = overview().pools

    assert (prefill.role, prefill.num_ready, prefill.num_engines) == ("prefill", 1, 1)
    assert (decode.role, decode.num_ready, decode.num_engines) == ("decode", 1, 2)
    assert decode.running == 2.0
    assert decode.output_tokens_s == pytest.approx(100.0)


def test_deployment_figures_come_from_the_router():
    (chat,) = overview().deployments

    assert chat.requests_s == pytest.approx(20.0)
    assert chat.error_ratio == pytest.approx(0.05)
    assert chat.output_tokens_s == pytest.approx(300.0)
    assert chat.ttft.p50_s == pytest.approx(0.3)
    assert chat.predicted_hit_ratio == pytest.approx(0.5)
    assert chat.reported_hit_ratio == pytest.approx(0.25)
    assert chat.possible_hit_ratio == pytest.approx(0.6)
    assert chat.lost_routing_ratio == pytest.approx(0.05)
    assert chat.lost_eviction_ratio == pytest.approx(0.03)
    assert chat.lost_cold_ratio == pytest.approx(0.35)
    assert chat.moved == (MovedFigures("tcp", pytest.approx(50.0), pytest.approx(50_000.0)),)
    assert chat.caches == CacheFigures(2, 0, 1, 0, 77)
    assert chat.caches.num_engines == 3
    assert chat.findings == (("p-0", "topic"),)


def test_stale_engines_lose_their_figures_and_leave_the_sums():
    view = overview(decode_age_s=9.0)
    stale = view.engines[1]

    assert stale.state == STALE
    assert stale.running is None
    assert stale.age_s == pytest.approx(9.0)
    assert view.pools[1].num_ready == 0
    assert view.pools[1].running is None
    assert view.age_s == pytest.approx(0.0)


def test_before_the_second_sample_rates_are_unknown():
    history = History()
    history.add(snapshot(1), 1.0)
    view = summarize(snapshot(1), history)

    assert view.engines[0].output_tokens_s is None
    assert view.engines[0].running == 2.0
    assert view.deployments[0].requests_s is None
    assert view.deployments[0].ttft is None


def test_nothing_at_all_is_an_overview_without_parts():
    view = summarize(Snapshot("c", 0.0, (HostSnapshot("h", error="down"),)), History())

    assert view.deployments == view.pools == view.engines == ()
    assert view.age_s is None


def test_trend_values_name_what_is_drawn():
    values = trend_values(overview())

    assert values["engine:p-0:ttft_p50"] == pytest.approx(0.15)
    assert values["pool:chat:decode:itl_p99"] is None
    assert values["deployment:chat:requests_s"] == pytest.approx(20.0)


def test_relays_of_hosts_are_told_apart_and_old_ones_are_unknown():
    first, second = overview().hosts

    assert first.kv_lag.p99_s == pytest.approx(0.199)
    assert second.kv_lag.p99_s == pytest.approx(0.398)
    assert overview(decode_age_s=9.0).hosts[1].kv_lag is None
    assert first.units == (("p-0", "engine"),)
