"""Telling agents what to run, and restarting what would not notice a change by itself."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.deploy import apply
from dynctl.deploy.slices import make_slices
from dynctl.deploy.steps import HostGoal, HostState, Step, StepKind

SECRET = "secrets/chat.TOKEN"
ENGINE = UnitStatus("e0", "engine", EngineState.READY, "i1", deployment="chat")


@pytest.fixture
def restarted(plan, inventory, ground):
    """Sends a slice to an agent that runs one unit, with a changed secret or none; gives what was restarted."""

    def send(unit, *, has_new_secret):
        slice_ = make_slices(plan, inventory, ground)["a"]
        status = AgentStatus("1", "prod", "a", 1, 1, "d1", "b1", "boot", 1, 0.0, (unit,))
        old = "old" if has_new_secret else "new"
        state = HostState("a", files=((SECRET, old),), status=status)
        goal = HostGoal(slice_, "b1", "/r/bundles/b1", "none", ((SECRET, "new"),))
        asked = []

        class Client:
            async def put_slice(self, wanted):
                assert (wanted.generation, wanted.fence) == (2, 7)
                return replace(status, generation=wanted.generation)

            async def restart(self, unit_id):
                asked.append(unit_id)

        work = SimpleNamespace(
            goals=SimpleNamespace(hosts={"a": goal}), states={"a": state}, tell=lambda *_: None
        )
        asyncio.run(apply._send_slice(work, Step("a", StepKind.SLICE, ""), Client(), 2, 7))
        return asked

    return send


def test_what_reads_a_changed_secret_is_restarted(restarted):
    assert restarted(ENGINE, has_new_secret=True) == ["e0"]
    assert restarted(ENGINE, has_new_secret=False) == []
    assert restarted(replace(ENGINE, deployment="other"), has_new_secret=True) == []


def test_what_had_failed_is_restarted(restarted):
    assert restarted(replace(ENGINE, state=EngineState.FAILED), has_new_secret=False) == ["e0"]


@pytest.mark.parametrize("state", [EngineState.STOPPED, EngineState.FAILED, EngineState.DRAINING])
def test_what_somebody_drained_is_not_brought_back(restarted, state):
    incarnation = "i1" if state is EngineState.DRAINING else ""
    held = replace(ENGINE, state=state, incarnation=incarnation, is_held=True)
    assert restarted(held, has_new_secret=True) == []
