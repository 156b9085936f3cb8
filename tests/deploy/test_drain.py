"""Single engines go out of service and come back."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory
from dynctl.deploy import apply
from dynctl.deploy import drain as draining
from dynctl.deploy.drain import bring_back, choose, drain, start_deadlines_s, unreached, what_stays
from dynctl.deploy.reach import NotHereError
from dynctl.errors import ConnectError, DeployError, ExitCode, UsageError
from dynctl.router.seen import Seen, SeenEngine


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
        "chat prefill: no ready engine is left, decode engines will compute prompts themselves",
        "chat decode: 1 of 3 engines go on",
    ]
    assert stays("gpu-*") == [
        "chat prefill: no ready engine is left, new requests will be refused",
        "chat decode: no ready engine is left, new requests will be refused",
    ]
    assert stays("chat-decode-[01]") == [
        "chat decode: no ready engine is left, new requests will be refused"
    ]


def test_a_host_that_does_not_answer_is_not_taken_for_one_with_a_name_like_it():
    lost, empty = ConnectError("gpu-3: no route"), NotHereError("gpu-4: no agent here")
    found = dict.fromkeys(HOSTS) | {"gpu-3": lost, "gpu-4": empty}

    for name, error in (("gpu-3", lost), ("gpu-4", empty)):
        assert unreached(found, ["gpu-1", name]) == {name: error}
    assert unreached(found, ["gpu-*"]) == {"gpu-3": lost}
    assert unreached(found, ["gpu-1", "chat-*"]) == {}
    assert choose(HOSTS, ["gpu-[34]"], ["gpu-3"]) == []
    with pytest.raises(UsageError) as caught:
        choose(HOSTS, ["chat-decode-9"], ["gpu-3"])
    assert caught.value.hint == "it may be on gpu-3, not reached now"


def run(monkeypatch, work, agent, *names):
    told = []
    monkeypatch.setattr(draining, "POLL_S", 0.0)
    monkeypatch.setattr(apply, "POLL_S", 0.0)
    meant = choose({"h": status(*agent.units.values())}, names)
    asyncio.run(work({"h": agent}, meant, lambda *words: told.append(words)))
    return told


def back(clients, chosen, tell):
    return bring_back(clients, chosen, tell, {})


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

    assert run(monkeypatch, back, agent, "a") == [("h", "a", "starting"), ("h", "a", "ready")]
    assert agent.asked == [("restart", "a")]


class Routed(Agent):
    """Has a router too, which sees what the script of its views says."""

    def __init__(self, *views):
        drained = engine("a", state=EngineState.STOPPED, is_held=True)
        router = UnitStatus("r", "router", EngineState.READY, deployment="chat")
        super().__init__(drained, router, script=[engine("a", incarnation="i2")])
        self.views = list(views)

    async def ask_router(self, unit_id, target):
        assert (unit_id, target) == ("r", "/engines")
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if isinstance(view, Exception):
            raise view
        return msgspec.json.encode(view)


def test_bringing_back_ends_when_routers_reach_the_engine(monkeypatch):
    agent = Routed(*(Seen((SeenEngine("a", run, "decode"),), {}) for run in ("i1", "i1", "i2")))

    assert run(monkeypatch, back, agent, "a") == [("h", "a", "ready")]
    assert len(agent.views) == 1


def test_bringing_back_does_not_wait_for_a_router_that_is_too_old_to_say(monkeypatch):
    told = run(monkeypatch, back, Routed(DeployError("GET /engines is not known")), "a")

    said = "it does not say which engines it reaches: GET /engines is not known; not waited for"
    assert told == [("h", "a", "ready"), ("h", "r", said)]


def test_an_engine_that_fails_meanwhile_is_named_with_its_reason(monkeypatch):
    failed = engine("a", state=EngineState.FAILED, last_error="out of memory")
    agent = Agent(engine("a", state=EngineState.STOPPED, is_held=True), script=[failed])

    with pytest.raises(DeployError, match="h: a is failed: out of memory") as caught:
        run(monkeypatch, back, agent, "a")
    assert caught.value.exit_code is ExitCode.GATE


def test_an_engine_that_does_not_stop_is_named_when_time_is_over(monkeypatch):
    monkeypatch.setattr(draining, "DRAIN_TIMEOUT_S", 0.0)
    stays = engine("a", state=EngineState.DRAINING)
    agent = Agent(engine("a"), script=[stays] * 2)

    with pytest.raises(DeployError, match=r"not stopped after .*\n  h: a is draining"):
        run(monkeypatch, drain, agent, "a")


class Blinking(Agent):
    """Away at some of the looks."""

    def __init__(self, *units, away, script=()):
        super().__init__(*units, script=script)
        self.away, self.num_looks = away, 0

    async def status(self):
        self.num_looks += 1
        if self.num_looks in self.away:
            raise ConnectError("no agent answers: nothing listens")
        return await super().status()


def test_an_agent_that_is_away_for_a_moment_ends_no_drain(monkeypatch):
    states = (EngineState.DRAINING, EngineState.STOPPED)
    agent = Blinking(engine("a"), away={1, 3}, script=[engine("a", state=s) for s in states])

    told = run(monkeypatch, drain, agent, "a")

    assert [words[1:] for words in told if words[1] == "a"] == [("a", "draining"), ("a", "stopped")]
    assert [words[:2] for words in told if words[1] != "a"] == [("h", "agent")] * 2


def test_an_agent_that_stays_away_is_no_refusal_for_its_engines_drain_already(monkeypatch):
    monkeypatch.setattr(apply, "LOST_S", 0.0)
    agent = Blinking(engine("a"), away=range(1000))

    with pytest.raises(DeployError, match="h: the agent was lost") as caught:
        run(monkeypatch, drain, agent, "a")
    assert caught.value.exit_code is ExitCode.PARTIAL


@pytest.mark.parametrize("work", [drain, back])
def test_an_engine_that_vanished_meanwhile_is_neither_drained_nor_back(monkeypatch, work):
    class Gone(Agent):
        async def status(self):
            return status()

    with pytest.raises(DeployError, match="h: a is no longer there") as caught:
        run(monkeypatch, work, Gone(engine("a")), "a")
    assert caught.value.exit_code is ExitCode.GATE


def test_an_engine_that_is_given_longer_to_start_is_waited_for_as_long(monkeypatch):
    monkeypatch.setattr(draining, "READY_TIMEOUT_S", 0.0)
    starting = engine("a", state=EngineState.STARTING)

    def come_back(deadlines_s):
        def work(clients, chosen, tell):
            return bring_back(clients, chosen, tell, deadlines_s)

        agent = Agent(
            engine("a", state=EngineState.STOPPED, is_held=True),
            script=[starting] * 2 + [engine("a")],
        )
        return run(monkeypatch, work, agent, "a")

    assert come_back({"chat": 7200.0})[-1] == ("h", "a", "ready")
    with pytest.raises(DeployError, match=r"not ready after .*\n  h: a is starting"):
        come_back({"other": 7200.0})


def test_how_long_a_start_may_take_is_what_the_inventory_says_else_the_kind_of_engine():
    wishes = (
        DeploymentWish("slow", "/m", EngineSpec("vllm", start_deadline_s=7200.0)),
        DeploymentWish("plain", "/m", EngineSpec("sim")),
    )
    wanted = Inventory("c", (HostEntry("a", "a.example"),), deployments=wishes)

    assert start_deadlines_s(wanted) == {"slow": 7200.0, "plain": 30.0}


def test_a_host_whose_agent_refuses_does_not_hold_up_the_others(monkeypatch):
    class Refusing(Agent):
        async def drain(self, unit_id):
            if unit_id == "b":
                raise ConnectError("no agent answers: reset")
            await super().drain(unit_id)

    monkeypatch.setattr(draining, "POLL_S", 0.0)
    agents = {
        "g": Refusing(engine("b"), engine("c")),
        "h": Refusing(engine("a"), engine("b")),
        "i": Agent(engine("d")),
    }
    meant = choose({name: status(*agent.units.values()) for name, agent in agents.items()}, ["*"])
    told = []

    failures = asyncio.run(drain(agents, meant, lambda *words: told.append(words)))

    assert [agent.asked for agent in agents.values()] == [[], [("drain", "a")], [("drain", "d")]]
    assert {n: (e.message, e.exit_code) for n, e in failures.items()} == {
        "g": ("g: b: no agent answers: reset", ExitCode.REFUSED),
        "h": ("h: b: no agent answers: reset", ExitCode.PARTIAL),
    }
    assert ("i", "d", "stopped") in told
