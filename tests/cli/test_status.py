"""What `dynctl status` shows beside its table."""

from dataclasses import replace

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.cli import status
from dynctl.cli.options import Output
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.errors import ConnectError, DynctlError, ExitCode

INVENTORY = Inventory("c", (HostEntry("a", "a.example"),), path="inventory.yaml")


def show(*units, degraded=(), inventory=INVENTORY):
    facts = ("1", "c", "a", 1, 1, "d1", "b1", "boot", 1, 0.0)
    found = {"a": AgentStatus(*facts, units=units, degraded=degraded)}
    status._show(inventory, found, Output.TABLE)


def engine(state, **change):
    return UnitStatus("chat-0", "engine", state, **change)


def test_what_an_agent_cannot_do_is_told_though_all_is_ready(capsys):
    show(engine(EngineState.READY), degraded=("units.json: No space left on device",))

    assert "a: the agent is degraded: units.json: No space left" in capsys.readouterr().err


def test_what_a_starting_engine_lacks_stands_in_its_row_and_it_is_not_ready(capsys):
    with pytest.raises(DynctlError, match="not ready: chat-0") as caught:
        show(engine(EngineState.STARTING, seen="asked for a first token", last_error="it died"))

    assert caught.value.exit_code is ExitCode.GATE
    assert "asked for a first token" in capsys.readouterr().out


def test_what_somebody_drained_is_no_failure(capsys):
    show(engine(EngineState.STOPPED, is_held=True, last_error="drained by request"))

    assert "drained by request" in capsys.readouterr().out


def test_a_router_whose_engines_are_all_drained_is_no_failure(capsys):
    router = UnitStatus("chat-router", "router", EngineState.STARTING, deployment="chat")
    held = engine(EngineState.STOPPED, deployment="chat", is_held=True)
    show(held, router)
    assert "chat-router" in capsys.readouterr().out

    serving = UnitStatus("chat-1", "engine", EngineState.READY, deployment="chat")
    with pytest.raises(DynctlError, match="not ready: chat-router"):
        show(held, serving, router)
    with pytest.raises(DynctlError, match="not ready: chat-router"):
        show(router)
    with pytest.raises(DynctlError, match="not ready: chat-router"):
        show(held, replace(router, state=EngineState.FAILED))


def test_a_router_whose_engines_are_on_hosts_left_out_is_not_judged(capsys):
    router = UnitStatus("chat-router", "router", EngineState.STARTING, deployment="chat")
    held = engine(EngineState.STOPPED, deployment="chat", is_held=True)
    wide = replace(INVENTORY, hosts=(*INVENTORY.hosts, HostEntry("b", "b"), HostEntry("d", "d")))
    for units in ((router,), (held, router)):
        show(*units, inventory=wide)
        said = capsys.readouterr().err
        assert "chat-router waits for engines, of which b, d may have some: not asked" in said

    serving = UnitStatus("chat-1", "engine", EngineState.READY, deployment="chat")
    for units in ((serving, router), (replace(router, state=EngineState.FAILED),)):
        with pytest.raises(DynctlError, match="not ready: chat-router"):
            show(*units, inventory=wide)


def test_an_agent_lost_between_two_questions_is_named_and_the_others_shown(cluster):
    class Lost:
        async def status(self):
            raise ConnectError("b: the agent does not answer")

    class Agent:
        async def status(self):
            facts = ("1", "c", "a", 1, 1, "d1", "b1", "boot", 1, 0.0)
            return AgentStatus(*facts, units=(engine(EngineState.READY),))

    code, out, err = cluster({"a": Agent(), "b": Lost()}, "status")

    assert code == ExitCode.PARTIAL
    assert "chat-0" in out
    assert "1 of 2 hosts failed; answered: a\n  b: the agent does not answer" in err
