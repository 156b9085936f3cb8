"""Single engines go out of service and come back."""

import asyncio
from dataclasses import replace

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.deploy import drain as draining
from dynctl.deploy.drain import bring_back, choose, drain, what_stays
from dynctl.errors import DeployError, ExitCode, UsageError


def engine(name, role="decode", state=EngineState.READY, **change):
    return UnitStatus(name, "engine", state, role=role, deployment="chat", **change)


class Agent:
    """Does at once what it is asked to, or what its script says at each further look."""

    def __init__(self, *units, script=()):
        self.units = {unit.id: unit for unit in units}
        self.script = list(script)
        self.asked = []

    async def status(self):
        if self.script:
            unit = self.script.pop(0)
            self.units[unit.id] = unit
        return status(*self.units.values())

    async def drain(self, unit_id):
        self.asked.append(("drain", unit_id))
        if not self.script:
            self.units[unit_id] = replace(self.units[unit_id], state=EngineState.STOPPED)

    async def restart(self, unit_id):
        self.asked.append(("restart", unit_id))


def status(*units):
    return AgentStatus(*("1", "prod", "x", 1, 1, "d1", "b1", "boot", 1, 0.0), units=units)


HOSTS = {
    "gpu-1": status(engine("chat-prefill-0", "prefill"), engine("chat-decode-0")),
    "gpu-2": status(
        UnitStatus("relay", "relay", EngineState.READY),
        UnitStatus("chat-router", "router", EngineState.READY, deployment="chat"),
        engine("chat-decode-1"),
        engine("chat-decode-2", state=EngineState.STARTING),
    ),
    "head": status(UnitStatus("other-router", "router", EngineState.READY)),
}


def chosen(*names):
    return [each.unit.id for each in choose(HOSTS, names)]


def test_engines_go_by_their_own_or_their_hosts_names_and_nothing_else_is_an_engine():
    assert chosen("chat-decode-1") == ["chat-decode-1"]
    assert chosen("gpu-2") == ["chat-decode-1", "chat-decode-2"]
    assert chosen("chat-prefill-*", "gpu-2", "chat-decode-1") == [
        "chat-prefill-0", "chat-decode-1", "chat-decode-2",
    ]  # fmt: skip
    for name in ("chat-router", "relay", "head", "chat-decode-9"):
        with pytest.raises(UsageError, match=f"called {name}"):
            chosen("gpu-1", name)


def test_what_goes_on_is_counted_by_role_and_only_what_is_ready():
    def stays(*names):
        return list(what_stays(HOSTS, choose(HOSTS, names)))

    assert stays("chat-decode-0") == ["chat decode: 1 of 3 engines go on"]
    assert stays("gpu-1") == [
        "chat prefill: no ready engine is left, new requests will be refused",
        "chat decode: 1 of 3 engines go on",
    ]
    assert stays("chat-decode-[01]") == [
        "chat decode: no ready engine is left, new requests will be refused"
    ]


def run(monkeypatch, work, agent, *names):
    told = []
    monkeypatch.setattr(draining, "POLL_S", 0.0)
    meant = choose({"h": status(*agent.units.values())}, names)
    asyncio.run(work({"h": agent}, meant, lambda *words: told.append(words)))
    return told


def test_draining_ends_when_the_engine_has_stopped_and_tells_how_far_it_is(monkeypatch):
    states = (EngineState.DRAINING, EngineState.DRAINING, EngineState.STOPPED)
    agent = Agent(engine("a"), engine("b"), script=[engine("a", state=s) for s in states])

    assert run(monkeypatch, drain, agent, "a") == [("h", "a", "draining"), ("h", "a", "stopped")]
    assert agent.asked == [("drain", "a")]


def test_bringing_back_ends_when_the_engine_is_ready(monkeypatch):
    agent = Agent(
        engine("a", state=EngineState.STOPPED, is_held=True),
        script=[engine("a", state=s) for s in (EngineState.STARTING, EngineState.READY)],
    )

    assert run(monkeypatch, bring_back, agent, "a") == [("h", "a", "starting"), ("h", "a", "ready")]
    assert agent.asked == [("restart", "a")]


def test_an_engine_that_fails_meanwhile_is_named_with_its_reason(monkeypatch):
    failed = engine("a", state=EngineState.FAILED, last_error="out of memory")
    agent = Agent(engine("a", state=EngineState.STOPPED, is_held=True), script=[failed])

    with pytest.raises(DeployError, match="h: a is failed: out of memory") as caught:
        run(monkeypatch, bring_back, agent, "a")
    assert caught.value.exit_code is ExitCode.GATE


def test_an_engine_that_does_not_stop_is_named_when_time_is_over(monkeypatch):
    monkeypatch.setattr(draining, "DRAIN_TIMEOUT_S", 0.0)
    stays = engine("a", state=EngineState.DRAINING)
    agent = Agent(engine("a"), script=[stays] * 2)

    with pytest.raises(DeployError, match=r"not stopped after .*\n  h: a is draining"):
        run(monkeypatch, drain, agent, "a")
