"""Engines that answer `/health` and compute nothing, with short limits."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from dynctl.agents.canary import CanarySettings
from dynctl.core.deployment import EngineState as S

pytestmark = pytest.mark.usefixtures("no_process_left")

# Only the limit a test is about is short, so that a busy machine makes no engine look hung.
SETTINGS = CanarySettings(look_s=0.1, answer_s=60.0, cpu_answer_s=60.0, stall_s=60.0)


@pytest.fixture
def watched(supervised, engine, tools):
    """Runs a body with one ready engine, whose faults are files."""

    def run(body, flags, **limits):
        async def with_engine(supervisor):
            await supervisor.apply(tools.host_slice(engine(flags=flags)))
            await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
            await body(supervisor, supervisor.units["e0"])
            await supervisor.shutdown(now=True)

        supervised(with_engine, replace(tools.QUICK, canary=replace(SETTINGS, **limits)))

    return run


def test_idle_engine_that_gives_no_token_is_restarted(watched, tools, root_path, monkeypatch):
    hang = root_path / "hang"
    monkeypatch.setattr("dynctl.agents.canary._FIRST_ANSWER_S", 0.5)

    async def body(supervisor, unit):
        first = unit.run.incarnation
        hang.touch()
        await tools.until(supervisor, lambda: unit.run is None or unit.run.incarnation != first)
        assert unit.life.last_error.startswith("hung: idle, and gave no token within ")
        hang.unlink()
        await tools.until(supervisor, lambda: unit.life.state is S.READY)
        # More than one where the machine is so busy that a healthy engine takes too long as well.
        assert unit.life.num_restarts >= 1

    watched(body, {"hang-file": str(hang)}, cpu_answer_s=0.5)


def test_requests_without_a_step_for_long_are_a_hang(watched, tools, root_path):
    busy, hang = root_path / "busy", root_path / "hang"

    async def body(supervisor, unit):
        first = unit.run.incarnation
        busy.touch()
        await tools.until(supervisor, lambda: unit.run is None or unit.run.incarnation != first)
        assert "made no step" in unit.life.last_error
        busy.unlink()

    watched(body, {"hang-file": str(hang), "busy-file": str(busy)}, stall_s=1.0)


@pytest.mark.parametrize("fault", ["busy", "slow"])
def test_engine_that_works_is_never_restarted(watched, root_path, fault):
    """Busy for less than the limit, or slower than the shortest limit but no slower than it always is."""
    busy, hang = root_path / "busy", root_path / "hang"
    flags = {"hang-file": str(hang), "busy-file": str(busy)}

    async def body(supervisor, unit):
        first = unit.run.incarnation
        for _ in range(4):
            with contextlib.suppress(FileNotFoundError):
                busy.unlink()
            if fault == "busy":
                busy.touch()
            await asyncio.sleep(1.0)
        assert unit.run.incarnation == first
        assert unit.life.state is S.READY

    # Its own time, three times over, is far above what a busy test machine adds.
    slow = (flags | {"think": "1.5"}, {"cpu_answer_s": 0.5})
    told, limits = slow if fault == "slow" else (flags, {})
    watched(body, told, **limits)


def test_starved_host_concludes_nothing(watched, root_path, monkeypatch):
    hang = root_path / "hang"
    monkeypatch.setattr("dynctl.agents.canary._LATE_S", -10.0)
    monkeypatch.setattr("dynctl.agents.canary._FIRST_ANSWER_S", 0.5)

    async def body(supervisor, unit):
        first = unit.run.incarnation
        hang.touch()
        await asyncio.sleep(2.5)
        assert unit.run.incarnation == first
        hang.unlink()

    watched(body, {"hang-file": str(hang)}, cpu_answer_s=0.5)
