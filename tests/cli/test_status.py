"""What `dynctl status` shows beside its table."""

import json
from dataclasses import replace

import msgspec
import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.cli import status
from dynctl.cli.options import Output
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.errors import ConnectError, DynctlError, ExitCode
from dynctl.router.findings import Finding
from dynctl.router.seen import Seen, SeenEngine

INVENTORY = Inventory("c", (HostEntry("a", "a.example"),), path="inventory.yaml")


def show(*units, degraded=(), inventory=INVENTORY, seen=None):
    facts = ("1", "c", "a", 1, 1, "d1", "b1", "boot", 1, 0.0)
    found = {"a": AgentStatus(*facts, units=units, degraded=degraded)}
    status._show(inventory, found, seen or {}, Output.TABLE)


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


ROUTER = UnitStatus(
    "chat-router", "router", EngineState.READY, url="http://127.0.0.1:8000", deployment="chat"
)
PREFILL, DECODE = (
    UnitStatus(
        f"chat-{role}-0", "engine", EngineState.READY, f"{role}1", role=role, deployment="chat"
    )
    for role in ("prefill", "decode")
)


def view(prefill="", **silent):
    engines = (
        SeenEngine(PREFILL.id, "prefill1", "prefill", prefill),
        SeenEngine(DECODE.id, "decode1", "decode"),
    )
    return {"chat-router": Seen(engines, silent)}


def test_what_a_router_reaches_stands_in_its_row(capsys):
    show(ROUTER, PREFILL, DECODE, seen=view())
    out = " ".join(capsys.readouterr().out.split())
    assert "reaches prefill 1/1, decode 1/1" in out

    # It places there by load already.
    show(ROUTER, PREFILL, DECODE, seen=view("first_events"))
    assert "prefill 1/1" in " ".join(capsys.readouterr().out.split())


def test_a_router_that_does_not_reach_an_engine_that_is_ready_is_named_with_why(capsys):
    why = "a: chat-router: chat-prefill-0 is out of its reach: timed out"
    with pytest.raises(DynctlError, match=why) as caught:
        show(ROUTER, PREFILL, DECODE, seen=view("unreachable", a="timed out"))

    assert caught.value.exit_code is ExitCode.GATE
    out = " ".join(capsys.readouterr().out.split())
    assert "reaches prefill 0/1, decode 1/1" in out


def test_what_a_router_finds_wrong_is_told_with_the_fix_though_all_is_ready(capsys):
    found = Finding(DECODE.id, "salt", "its blocks carry a salt", "name it to the router")
    seen = {"chat-router": replace(view()["chat-router"], findings=(found,))}
    show(ROUTER, PREFILL, DECODE, seen=seen)

    said = capsys.readouterr().err
    assert "chat-router: chat-decode-0: its blocks carry a salt (salt)" in said
    assert "fix: name it to the router" in said


def test_a_router_that_is_too_old_to_say_what_it_reaches_is_not_judged(capsys):
    show(ROUTER, PREFILL, DECODE, seen={"chat-router": DynctlError("GET /engines is not known")})

    said = capsys.readouterr().err
    assert "chat-router does not say which engines it reaches: GET /engines is not known" in said


def test_what_routers_see_is_told_as_data(cluster):
    class Agent:
        async def status(self):
            facts = ("1", "c", "a", 1, 1, "d1", "b1", "boot", 1, 0.0)
            return AgentStatus(*facts, units=(ROUTER, PREFILL, DECODE))

        async def ask_router(self, unit_id, target):
            assert (unit_id, target) == ("chat-router", "/engines")
            return msgspec.json.encode(view("starting")["chat-router"])

    code, out, err = cluster({"a": Agent()}, "status", "-o", "json")

    assert code == ExitCode.GATE
    assert "chat-prefill-0 is starting to it" in err
    prefill, decode = json.loads(out)["routers"]["chat-router"]["engines"]
    assert (prefill["lack"], decode["lack"]) == ("starting", "")
