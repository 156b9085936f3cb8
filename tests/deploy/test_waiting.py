"""Waiting for units of agents that answer, are away for a moment, or are lost."""

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest

from dynctl.agents.protocol import AgentStatus, EngineWish, spec_digest
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.deploy import apply, routed
from dynctl.deploy.goals import Goals, HostGoal
from dynctl.deploy.slices import make_slices
from dynctl.errors import ConnectError, DeployError, ExitCode, TrustError
from dynctl.router.seen import FAILING, FIRST_EVENTS, UNREACHABLE, Seen, SeenEngine


@pytest.fixture
def goals(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)
    made = {
        name: HostGoal(slice_, "bundle1", "/r/bundles/bundle1", "none", ())
        for name, slice_ in slices.items()
    }
    return Goals(made, {}, {}, {})


class Agent:
    """Answers with a status, or is away when its script says so."""

    def __init__(self, name, *script):
        self.name, self.script, self.num_asked = name, script, 0
        self.units, self.findings = (), []
        self.views = [Seen((), {})]
        """What its router sees, look by look; the last one for ever."""

    async def status(self):
        is_away = self.script[min(self.num_asked, len(self.script) - 1)] if self.script else False
        self.num_asked += 1
        if is_away:
            raise ConnectError("no agent answers: nothing listens")
        return AgentStatus(
            *("1", "prod", self.name, 1, 1, "d1", "bundle1", "boot", 1, 0.0),
            units=self.units,
            asides=(),
        )

    async def ask_router(self, unit_id, target):
        assert unit_id == "r0"
        if target == "/engines":
            view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
            if isinstance(view, Exception):
                raise view
            return msgspec.json.encode(view)
        assert target == "/findings"
        if isinstance(self.findings, Exception):
            raise self.findings
        return json.dumps(self.findings).encode()


def wait(monkeypatch, goals, *agents):
    told = []
    monkeypatch.setattr(apply, "POLL_S", 0.0)
    monkeypatch.setattr(apply, "_refuse_unchanged", lambda *_: None)
    clients = {agent.name: agent for agent in agents}
    tell = lambda *what: told.append(what)  # noqa: E731
    return told, asyncio.run(apply.wait_ready(clients, goals, tell))


def test_an_agent_that_is_back_in_time_is_waited_for(monkeypatch, goals):
    told, statuses = wait(monkeypatch, goals, Agent("a"), Agent("b", True, True, False))

    assert sorted(statuses) == ["a", "b"]
    assert told == [("b", "agent", "does not answer; waiting for it to come back")]


ROUTER = UnitStatus("r0", "router", EngineState.READY)


def test_engines_whose_events_do_not_come_are_told_of_when_all_is_ready(monkeypatch, goals):
    agent = Agent("a")
    agent.units = (ROUTER,)
    agent.findings = [
        {"engine": "e1", "cause": "caching_off", "text": "its cache is off", "hint": "do"}
    ]
    told, _ = wait(monkeypatch, goals, agent)

    assert told == [("a", "r0", "degraded: e1: its cache is off (caching_off); do")]


def test_a_router_that_says_nothing_of_its_engines_is_no_failure(monkeypatch, goals):
    agent = Agent("a")
    agent.units, agent.findings = (ROUTER,), ConnectError("no router answers")
    told, _ = wait(monkeypatch, goals, agent)

    assert told == [("a", "r0", "does not say what it finds of engines: no router answers")]


PREFILL, DECODE = (
    UnitStatus(
        f"chat-{role}-0", "engine", EngineState.READY, f"{role}2", role=role, deployment="chat"
    )
    for role in ("prefill", "decode")
)
CHAT_ROUTER = replace(ROUTER, deployment="chat")


def view(prefill="", run="prefill2", **silent):
    decode = SeenEngine(DECODE.id, "decode2", "decode")
    return Seen((decode, SeenEngine(PREFILL.id, run, "prefill", prefill)), silent)


NOT_THERE = Seen((SeenEngine(DECODE.id, "decode2", "decode"),), {"a": "has not answered yet"})

LACKING = [
    (NOT_THERE, "chat-prefill-0 is not known to it: has not answered yet"),
    (view("starting"), "chat-prefill-0 is starting to it"),
    (view(run="prefill1"), "chat-prefill-0 is known to it as it was before its last start"),
    (view(UNREACHABLE, a="timed out"), "chat-prefill-0 is out of its reach: timed out"),
    (view(FAILING), "chat-prefill-0 failed its last requests"),
    (view(FIRST_EVENTS), "chat-prefill-0 has told it of no KV event yet"),
    (
        Seen(
            (*view().engines, SeenEngine("chat-prefill-0_dp1", "prefill2", "prefill", FAILING)), {}
        ),
        "chat-prefill-0_dp1 failed its last requests",
    ),
    (ConnectError("gone"), "it does not say which engines it reaches: gone"),
]


def prefill_and_decode(*views):
    agent = Agent("a")
    agent.units, agent.views = (PREFILL, DECODE, CHAT_ROUTER), list(views)
    return agent


def test_what_is_ready_is_waited_for_until_its_router_sends_requests_to_it(monkeypatch, goals):
    monkeypatch.setattr(routed, "HEARTBEAT_S", -1.0)
    agent = prefill_and_decode(*[one for one, _ in LACKING], view())

    told, statuses = wait(monkeypatch, goals, agent)

    assert [words[:2] for words in told] == [("a", "r0")] * len(LACKING)
    said = [words[2].rpartition(", ")[0] for words in told]
    assert said == [text for _, text in LACKING]
    assert statuses["a"].units == agent.units


@pytest.mark.parametrize(("seen", "text"), LACKING)
def test_a_router_that_never_does_ends_up_with_what_it_lacks_and_exit_6(
    monkeypatch, goals, seen, text
):
    monkeypatch.setattr(routed, "LIMIT_S", -1.0)

    with pytest.raises(DeployError) as caught:
        wait(monkeypatch, goals, prefill_and_decode(seen))

    assert caught.value.exit_code is ExitCode.GATE
    assert caught.value.message.endswith(f" not all is used:\n  a: r0: {text}")
    assert "dynctl logs r0" in caught.value.hint


def test_what_is_waited_for_begins_anew_when_an_engine_is_not_ready_itself(monkeypatch, goals):
    agent = prefill_and_decode(*[view(UNREACHABLE)] * 4, view())
    now_s, turns = 0.0, iter([True, True, False, True, True])

    async def status():
        nonlocal now_s
        now_s += routed.LIMIT_S * 0.6
        state = EngineState.READY if next(turns, True) else EngineState.STARTING
        agent.units = (replace(PREFILL, state=state), DECODE, CHAT_ROUTER)
        return await Agent.status(agent)

    monkeypatch.setattr(agent, "status", status)
    monkeypatch.setattr(routed.time, "monotonic", lambda: now_s)

    assert wait(monkeypatch, goals, agent)[1]["a"].units[0].state is EngineState.READY
    assert len(agent.views) == 1


def test_of_some_engines_only_what_these_lack_counts():
    agent = prefill_and_decode()
    statuses = {"a": asyncio.run(agent.status())}
    seen = {"r0": view(UNREACHABLE)}

    assert [each.text for each in routed.lacks(statuses, seen)] == [
        "chat-prefill-0 is out of its reach"
    ]
    assert routed.lacks(statuses, seen, {DECODE.id}) == []


def test_of_many_that_are_not_reached_some_are_named(monkeypatch, goals):
    monkeypatch.setattr(routed, "HEARTBEAT_S", -1.0)
    agent = Agent("a")
    many = [replace(PREFILL, id=f"e{i}", incarnation=f"run{i}") for i in range(20)]
    reached = tuple(SeenEngine(one.id, one.incarnation, "prefill") for one in many)
    agent.units, agent.views = (*many, CHAT_ROUTER), [Seen((), {}), Seen(reached, {})]

    told, _ = wait(monkeypatch, goals, agent)

    assert len(told) == 9
    assert told[-1] == ("", "wait", "and 12 more, see dynctl status")


def test_a_router_is_not_asked_for_engines_that_are_drained_or_of_another_deployment(
    monkeypatch, goals
):
    agent = prefill_and_decode(Seen((SeenEngine(DECODE.id, "decode2", "decode"),), {}))
    held = replace(PREFILL, state=EngineState.STOPPED, is_held=True)
    agent.units = (held, replace(PREFILL, id="e9", deployment="other"), DECODE, CHAT_ROUTER)

    told, _ = wait(monkeypatch, goals, agent)

    assert [words[1] for words in told] == [PREFILL.id]  # that it stays drained


def test_a_router_that_is_followed_is_told_of_until_the_new_one_took_over(monkeypatch, goals):
    old, new = (UnitStatus("r0", "router", EngineState.READY, run) for run in ("run1", "run2"))
    beside = {"id": "r0@next", "beside": "r0"}
    steps = [(old, replace(new, state=EngineState.STARTING, **beside)), (new,)]

    class Following(Agent):
        async def status(self):
            self.units = steps[min(self.num_asked, 1)]
            return await super().status()

    told, _ = wait(monkeypatch, goals, Following("a"))

    assert told == [("a", "r0@next", "starting"), ("a", "r0", "ready: the new one took over")]


def external(goals, name="a", **change):
    """The goals with one adopted server more."""
    wish = EngineWish(
        "ext-0", "chat", "aggregated", "external", "m", url="http://10.0.0.9:80", **change
    )
    goal = goals.hosts[name]
    slice_ = replace(goal.slice, engines=(*goal.slice.engines, wish))
    return replace(goals, hosts={**goals.hosts, name: replace(goal, slice=slice_)})


SILENT = UnitStatus("ext-0", "engine", EngineState.STARTING, seen="http://10.0.0.9:80: no answer")


def test_an_engine_is_waited_for_as_long_as_it_is_given(goals):
    limits = apply._limits_s(external(goals))

    assert limits["ext-0"] == 60
    assert limits["chat-decode-0"] == limits["chat-router"] == apply.READY_TIMEOUT_S
    limits = apply._limits_s(external(goals, start_deadline_s=7200))
    assert limits["ext-0"] == limits["chat-router"] == 7200
    assert limits["chat-decode-0"] == apply.READY_TIMEOUT_S


def test_a_server_that_never_answers_ends_up_with_what_was_seen_and_exit_6(monkeypatch, goals):
    agent = Agent("a")
    agent.units = (SILENT, replace(ROUTER, state=EngineState.STARTING, seen="/health answered 503"))

    with pytest.raises(DeployError) as caught:
        wait(monkeypatch, external(goals, start_deadline_s=0.05), agent)

    assert caught.value.exit_code is ExitCode.GATE
    assert caught.value.message.startswith("a: ext-0 is not ready after ")
    assert caught.value.message.endswith(": http://10.0.0.9:80: no answer")
    assert "start_deadline_s" in caught.value.hint


def test_a_drained_engine_is_not_waited_for_but_told_of(monkeypatch, goals):
    held = UnitStatus("e0", "engine", EngineState.STOPPED, deployment="chat", is_held=True)
    agent = Agent("a")
    agent.units = (held, UnitStatus("e1", "engine", EngineState.READY, deployment="chat"), ROUTER)
    told, _ = wait(monkeypatch, goals, agent)

    assert told == [("a", "e0", "stays drained; dynctl drain --undo e0 brings it back")]


def test_a_drained_engine_that_has_not_come_to_rest_is_no_unfinished_change(goals):
    def running(**change):
        units = [
            UnitStatus(wish.id, "engine", EngineState.READY, spec_digest=spec_digest(wish))
            for wish in goal.engines
        ]
        units[-1] = replace(units[-1], **change)
        facts = ("1", "prod", "b", 1, 1, "d1", "bundle1", "boot", 1, 0.0)
        return {"b": AgentStatus(*facts, units=tuple(units))}

    goal = replace(goals.hosts["b"].slice, relay=None)
    wished = replace(goals, hosts={"b": replace(goals.hosts["b"], slice=goal)})
    draining = {"spec_digest": "old", "state": EngineState.DRAINING}

    apply._refuse_unchanged(running(), wished)
    apply._refuse_unchanged(running(**draining, is_held=True), wished)
    with pytest.raises(DeployError) as caught:
        apply._refuse_unchanged(running(**draining), wished)
    assert caught.value.exit_code is ExitCode.GATE


def test_an_agent_that_cannot_do_all_of_its_work_is_told_of(monkeypatch, goals):
    class Full(Agent):
        async def status(self):
            return replace(await super().status(), degraded=("units.json: disk is full",))

    told, _ = wait(monkeypatch, goals, Full("a"))

    assert told == [("a", "agent", "degraded: units.json: disk is full")]


def test_a_router_whose_engines_are_all_drained_is_neither_waited_for_nor_asked(monkeypatch, goals):
    held = UnitStatus("e0", "engine", EngineState.STOPPED, deployment="chat", is_held=True)
    router = UnitStatus("r0", "router", EngineState.STARTING, deployment="chat")
    agent = Agent("a")
    agent.units, agent.findings = (held, router), ConnectError("No such file or directory")

    assert wait(monkeypatch, goals, agent)[0] == [
        ("a", "e0", "stays drained; dynctl drain --undo e0 brings it back"),
        ("a", "r0", "answers nobody: all engines of its deployment are drained"),
    ]


def test_who_is_waited_for_is_told_with_what_was_seen(monkeypatch, goals):
    agent, told = Agent("a"), []
    agent.units = (SILENT, replace(SILENT, id="ext-1", seen="", last_error="it ended"))
    monkeypatch.setattr(apply, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(apply, "POLL_S", 0.0)
    monkeypatch.setattr(apply, "_refuse_unchanged", lambda *_: None)

    def tell(*what):
        told.append(what)
        if len(told) == 4:  # two changes of state, then both again
            agent.units = ()

    asyncio.run(apply.wait_ready({"a": agent}, external(goals), tell))

    assert [words[:2] for words in told] == [("a", "ext-0"), ("a", "ext-1")] * 2
    assert told[2][2].startswith("starting, ")
    assert told[2][2].endswith(" of 1m00s: http://10.0.0.9:80: no answer")
    assert told[3][2].endswith(" of 30m00s: it ended")


def test_an_agent_that_stays_away_ends_up_with_its_host_and_exit_3(monkeypatch, goals):
    monkeypatch.setattr(apply, "LOST_S", 0.05)

    with pytest.raises(DeployError) as caught:
        wait(monkeypatch, goals, Agent("a"), Agent("b", True))

    assert caught.value.exit_code is ExitCode.PARTIAL
    assert caught.value.message.startswith("b: the agent was lost meanwhile: nothing")
    assert "dynctl up" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectError("b: connection lost"), ExitCode.PARTIAL),
        (DeployError("b: refused", code=ExitCode.REFUSED), ExitCode.PARTIAL),
        (DeployError("b: disk full"), ExitCode.PARTIAL),
        (TrustError("b: key changed"), ExitCode.TRUST),
    ],
)
def test_a_host_that_fails_after_the_first_step_never_ends_in_nothing_changed(error, code):
    work = type("Work", (), {"tell": lambda *_: None})()

    with pytest.raises(DeployError) as caught:
        apply._raise_failures(work, {"a": None, "b": error}, "prepared")

    assert caught.value.exit_code is code
    assert "1 of 2 hosts failed (b); prepared: a." in caught.value.message


def test_each_change_is_told_once_though_hosts_have_units_of_one_name(monkeypatch, goals):
    """Every host has its relay, and an engine that moves is for a while on two."""

    class Agents(Agent):
        async def status(self):
            self.units = (replace(RELAY, state=self.script[min(self.num_asked, 2)]),)
            script, self.script = self.script, ()
            status = await super().status()
            self.script = script
            return status

    starting, ready = EngineState.STARTING, EngineState.READY
    first, second = Agents("a", ready, ready, ready), Agents("b", starting, starting, ready)

    told, _ = wait(monkeypatch, goals, first, second)

    assert told == [("b", "relay", "starting"), ("b", "relay", "ready")]


RELAY = UnitStatus("relay", "relay", EngineState.READY)
