"""Synthetic clusters for the screens."""

from dataclasses import replace

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
from dynctl.telemetry.ledger import Ledger
from dynctl.tui.view import Choices, View

GOALS = {"chat": Slo(500.0, 40.0)}
BOUNDS = (0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 0.5, 1.0)


def histogram(values_s, tick):
    counts = [float(sum(v <= bound for v in values_s) * tick) for bound in BOUNDS]
    return Histogram(BOUNDS, (*counts, float(len(values_s) * tick)), sum(values_s) * tick)


def engine(name, tick, ttft_s=0.15, itl_s=None):
    return EngineSample(
        name,
        "i",
        running=3.0,
        waiting=1.0,
        kv_usage_ratio=0.44,
        prompt_tokens_total=9800.0 * tick,
        generation_tokens_total=312.0 * tick,
        prefix_queries_tokens_total=1000.0 * tick,
        prefix_hits_tokens_total=710.0 * tick,
        preemptions_total=0.0,
        ttft_s=histogram([ttft_s] * 10, tick),
        itl_s=histogram([itl_s] * 10, tick) if itl_s else None,
        transfer_s=histogram([0.004] * 10, tick) if itl_s else None,
        transfer_bytes_total=50.0 * 2**20 * tick if itl_s else None,
        transfers_failed_total=2.0 if itl_s else None,
    )


def snapshot(tick, num_decode=3, stale_s=0.0, num_hosts=2):
    """One prefill engine on gpu-01, decode engines spread over the other hosts; time moves with `tick`."""
    gpus = tuple(
        GpuSample(i, f"u{i}", "H100", 0.1 * i, 70 << 30, 80 << 30, 600.0, 66.0) for i in range(8)
    )
    prefill = HostSnapshot(
        "gpu-01",
        units=(
            UnitStatus("chat-prefill-0", "engine", EngineState.READY, role="prefill", deployment="chat",
                       gpu_uuids=("u0", "u1")),
            UnitStatus("chat-router", "router", EngineState.READY, deployment="chat"),
        ),
        gpus=gpus,
        engines=(engine("chat-prefill-0", tick, ttft_s=0.45),),
        routers=(
            RouterSample(
                "chat-router", "chat", requests_total=14.0 * tick, errors_total=0.0, inflight=162.0, queued=3.0,
                prompt_tokens_total=1000.0 * tick, predicted_hit_tokens_total=630.0 * tick,
                possible_hit_tokens_total=740.0 * tick, hit_tokens_total=640.0 * tick,
                routing_tokens_total=30.0 * tick, eviction_tokens_total=50.0 * tick, cold_tokens_total=190.0 * tick,
                moved_rdma_tokens_total=400.0 * tick, moved_host_tokens_total=0.0, kv_bytes_per_token=131072.0,
                caches_known=4.0, caches_doubtful=0.0, caches_reading=0.0, caches_untold=0.0, index_blocks=9000.0,
                output_tokens_total=2410.0 * tick, ttft_s=histogram([0.15] * 9 + [0.45], tick),
                itl_s=histogram([0.015] * 9 + [0.03], tick),
            ),
        ),
    )  # fmt: skip
    prefill = replace(prefill, relays=(RelaySample("relay", "i", histogram([0.015], tick)),))
    others = [
        HostSnapshot(
            f"gpu-{host + 2:02d}",
            units=tuple(
                UnitStatus(f"chat-decode-{i}", "engine", EngineState.READY, role="decode", deployment="chat",
                           gpu_uuids=(f"u{i % 8}",))
                for i in range(host, num_decode, num_hosts - 1)
            ),
            gpus=gpus,
            engines=tuple(
                engine(f"chat-decode-{i}", tick, itl_s=0.03) for i in range(host, num_decode, num_hosts - 1)
            ),
            age_s=stale_s,
            error="no answer within 5 s" if stale_s else "",
        )
        for host in range(num_hosts - 1)
    ]  # fmt: skip
    return Snapshot("prod", 1.7e9 + tick, (prefill, *others))


@pytest.fixture
def snapshots():
    """The maker of snapshots."""
    return snapshot


@pytest.fixture
def make_view():
    """Make a view after `ticks` seconds; more options go to `snapshot`, `choices` to the person's choices."""

    def make(ticks=12, choices=None, slo=GOALS["chat"], **options):
        ledger = Ledger({"chat": slo} if slo else None)
        overview = None
        for tick in range(1, ticks + 1):
            overview = ledger.take(snapshot(tick, **options), float(tick))
        return View(overview, ledger.trends, ledger.events.newest(20), choices or Choices())

    return make


@pytest.fixture
def renamed():
    """Give the engine of that id hostile text everywhere a host can put some."""

    def change(taken, hostile):
        first = taken.hosts[0]
        unit = replace(first.units[0], id=hostile, last_error=hostile, state=EngineState.FAILED)
        host = replace(first, host_name=hostile, units=(unit,), engines=(), error=hostile)
        return replace(taken, cluster=hostile, hosts=(host, *taken.hosts[1:]))

    return change
