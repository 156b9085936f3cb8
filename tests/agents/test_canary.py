"""Engines that answer `/health` and compute nothing, with short limits."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynctl.agents import canary
from dynctl.agents.canary import CanarySettings
from dynctl.core.deployment import EngineState as S
from dynctl.core.snapshot import EngineSample

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


def test_engine_that_is_busy_for_less_than_the_limit_is_not_restarted(watched, root_path):
    busy, hang = root_path / "busy", root_path / "hang"

    async def body(supervisor, unit):
        first = unit.run.incarnation
        for _ in range(4):
            with contextlib.suppress(FileNotFoundError):
                busy.unlink()
            busy.touch()
            await asyncio.sleep(1.0)
        assert unit.run.incarnation == first
        assert unit.life.state is S.READY

    watched(body, {"hang-file": str(hang), "busy-file": str(busy)})


class Idle:
    """An engine that is asked for tokens and takes its time for each, by a clock of its own."""

    wish = SimpleNamespace(device="cpu")

    def __init__(self, monkeypatch, thinks_s):
        self.now_s, self.thinks_s = 0.0, list(thinks_s)
        monkeypatch.setattr(canary, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(canary, "_slept_late", self.slept_late)

    async def slept_late(self, seconds):
        if not self.thinks_s:
            raise asyncio.CancelledError
        self.now_s += seconds
        return False

    async def look(self, run):
        return EngineSample("e0", "i0"), "[]"

    async def says_token(self, run, limit_s):
        think_s = self.thinks_s.pop(0)
        self.now_s += min(think_s, limit_s)
        return think_s <= limit_s


def until_hung(engine):
    """Why it was taken for hung; None: it never was."""
    try:
        settings = replace(SETTINGS, cpu_answer_s=0.5)
        cause = asyncio.run(canary.until_rank_hung(engine, None, settings))
    except asyncio.CancelledError:
        return None
    return cause.text


def test_engine_slower_than_the_shortest_limit_but_no_slower_than_it_always_is_works(monkeypatch):
    usual_s = [1.5, 1.5, 1.5]

    assert until_hung(Idle(monkeypatch, [*usual_s, 4.4, 4.4, *usual_s])) is None
    assert until_hung(Idle(monkeypatch, [*usual_s, 4.6, 1.5, 4.6, 1.5])) is None
    text = "hung: idle, and gave no token within 4.5 s, twice"
    assert until_hung(Idle(monkeypatch, [*usual_s, 4.6, 4.6])) == text
    text = "hung: idle, and gave no token within 15.0 s, twice"
    assert until_hung(Idle(monkeypatch, [15.1, 15.1])) == text


def test_a_rank_that_hangs_beside_one_that_works_is_noticed(monkeypatch):
    works, hangs = Idle(monkeypatch, []), Idle(monkeypatch, [15.1, 15.1])
    seen = []

    async def slept_late(seconds):
        hangs.now_s += seconds
        await asyncio.sleep(0)
        return False

    monkeypatch.setattr(canary, "_slept_late", slept_late)

    async def look(run):
        seen.append(run)
        return EngineSample("e0", "i0", generation_tokens_total=float(len(seen))), "[]"

    works.look, works.number, hangs.number = look, 0, 1
    engine = SimpleNamespace(ranks=(works, hangs))

    async def main():
        cause = await canary.until_hung(engine, None, replace(SETTINGS, cpu_answer_s=0.5))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return cause.text

    assert asyncio.run(main()) == "rank 1 hung: idle, and gave no token within 15.0 s, twice"
    assert seen


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
