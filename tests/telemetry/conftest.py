"""A small cluster whose counters grow with time, and recordings of it."""

import pytest

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.snapshot import EngineSample, Histogram, HostSnapshot, RouterSample, Snapshot
from dynctl.core.workload import Slo
from dynctl.telemetry.recorder import Recorder

BOUNDS = (0.1, 0.5, 1.0, 2.0)
GOALS = {"chat": Slo(500.0, None)}


def histogram(num_fast, num_slow):
    """Requests of 0.05 to 0.1 s, and of 1 to 2 s."""
    fast, both = float(num_fast), float(num_fast + num_slow)
    return Histogram(BOUNDS, (fast, fast, fast, both, both), fast * 0.08 + num_slow * 1.5)


def snapshot(tick, num_fast=None, num_slow=0, state=EngineState.READY, **fields):
    """A host with an engine and a router that took ten requests a second."""
    fast = 10 * tick if num_fast is None else num_fast
    latencies = histogram(fast, num_slow)
    unit = UnitStatus("chat-0", "engine", state, role="aggregated", deployment="chat", **fields)
    return Snapshot(
        "prod",
        1.7e9 + tick,
        (
            HostSnapshot(
                "gpu-01",
                units=(unit, UnitStatus("r", "router", EngineState.READY, deployment="chat")),
                engines=(EngineSample("chat-0", "i", running=1.0, ttft_s=latencies),),
                routers=(
                    RouterSample("r", "chat", requests_total=float(fast + num_slow), ttft_s=latencies),
                ),
            ),
        ),
    )  # fmt: skip


@pytest.fixture(name="snapshot")
def make_snapshot():
    """The maker of snapshots."""
    return snapshot


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def record(tmp_path):
    """Write a recording of snapshots, one a second from tick 1 on; `between` is called with recorder and tick."""

    def write(taken, name="rec.jsonl", limit_bytes=2**30, between=None, step_s=1.0):
        clock = Clock()
        path = tmp_path / name
        with Recorder(path, limit_bytes, "prod", GOALS, clock) as recorder:
            for tick, one in enumerate(taken, 1):
                recorder.take(one)
                if between:
                    between(recorder, tick)
                clock.now_s += step_s
            assert recorder.failure == ""
        return path

    return write
