"""What `dynctl drain` does with hosts that do not answer, and what Ctrl-C says at each of its stages."""

from dataclasses import replace

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.cli import drain as command
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.errors import ConnectError, ExitCode, TrustError

LOST = ConnectError("gpu-3: no route to host", "check the network")


class Agent:
    """Has one engine and does at once what it is asked to."""

    def __init__(self, unit_id, state=EngineState.READY):
        is_held = state is EngineState.STOPPED
        self.unit = UnitStatus(
            unit_id, "engine", state, role="decode", deployment="chat", is_held=is_held
        )
        self.is_interrupting = False

    async def status(self):
        facts = ("1", "c", "x", 1, 1, "d1", "b1", "boot", 1, 0.0)
        return AgentStatus(*facts, units=(self.unit,))

    async def drain(self, _):
        if self.is_interrupting:
            raise KeyboardInterrupt
        self.unit = replace(self.unit, state=EngineState.STOPPED, is_held=True)

    async def restart(self, _):
        if self.is_interrupting:
            raise KeyboardInterrupt
        self.unit = replace(self.unit, state=EngineState.READY, is_held=False)


@pytest.fixture
def drain(cluster):
    """Run `dynctl drain` on hosts that are given; return its exit code and what it said."""

    def run_on(found, *words):
        code, _, err = cluster(found, "drain", *words)
        return code, err

    return run_on


def test_a_host_that_is_meant_and_does_not_answer_is_named_and_nothing_else_drained(drain):
    agent = Agent("chat-decode-0")

    code, said = drain({"gpu-2": agent, "gpu-3": LOST}, "gpu-3", "gpu-2", "--yes")

    assert code == ExitCode.REFUSED
    assert "error: gpu-3: no route to host" in said
    assert "did you mean" not in said
    assert agent.unit.state is EngineState.READY


def test_of_a_glob_what_answers_is_drained_and_the_rest_named(drain):
    hosts = {"gpu-2": Agent("chat-decode-0"), "gpu-3": LOST}

    for _ in ("drained now", "drained before"):
        code, said = drain(hosts, "gpu-*", "--yes")
        assert code == ExitCode.PARTIAL
        assert "1 of 2 hosts failed; drained: gpu-2\n  gpu-3: no route to host" in said
        assert hosts["gpu-2"].unit.is_held
    code, said = drain(hosts, "gpu-*", "--undo")
    assert code == ExitCode.PARTIAL
    assert "brought back: gpu-2" in said
    assert drain(hosts, "chat-*", "--yes")[0] == ExitCode.OK, "no host is meant by it"
    assert drain(hosts, "gpu-3*", "--yes")[0] == ExitCode.REFUSED


@pytest.mark.parametrize("words", [("gpu-*",), ("gpu-3", "gpu-4"), ("chat-decode-0",)])
def test_where_all_hosts_fail_all_are_named(drain, words):
    changed = TrustError("gpu-4: its host key has changed", "look why")

    code, said = drain({"gpu-3": LOST, "gpu-4": changed}, *words, "--yes")

    assert code == ExitCode.TRUST
    lost, untrusted = "gpu-3: no route to host", "gpu-4: its host key has changed"
    assert f"error: {lost}\n    check the network\n  {untrusted}\n    look why\n" in said


def test_hosts_meant_by_name_are_all_named_when_they_do_not_answer(drain):
    agent = Agent("chat-decode-0")
    hosts = {"gpu-2": agent, "gpu-3": LOST, "gpu-4": ConnectError("gpu-4: timed out")}

    code, said = drain(hosts, "gpu-2", "gpu-3", "gpu-4", "--yes")

    assert code == ExitCode.REFUSED
    assert "gpu-3: no route to host\n  gpu-4: timed out" in said
    assert agent.unit.state is EngineState.READY


def test_a_host_that_has_no_part_in_it_may_be_lost_meanwhile(drain, monkeypatch):
    class Leaving(Agent):
        num_asked = 0

        async def status(self):
            self.num_asked += 1
            if self.num_asked > 1:
                raise ConnectError("gpu-3: no agent answers")
            return await super().status()

    monkeypatch.setattr("dynctl.deploy.apply.LOST_S", -1.0)
    agent, other = Agent("chat-decode-0", EngineState.STOPPED), Leaving("code-0")
    other.unit = replace(other.unit, deployment="code")

    code, said = drain({"gpu-2": agent, "gpu-3": other}, "chat-decode-0", "--undo")

    assert (code, agent.unit.state) == (ExitCode.OK, EngineState.READY), said

    agent, other = Agent("chat-decode-0", EngineState.STOPPED), Leaving("chat-router")
    other.unit = replace(other.unit, kind="router")

    code, said = drain({"gpu-2": agent, "gpu-3": other}, "chat-decode-0", "--undo")

    assert code == ExitCode.PARTIAL
    assert "gpu-3: the agent was lost meanwhile" in said


def test_a_host_that_cannot_be_told_to_bring_its_engine_back_is_not_waited_for(drain, monkeypatch):
    class Gone(Agent):
        async def restart(self, _):
            async def status():
                raise ConnectError("gpu-3: no agent answers")

            self.status = status
            raise ConnectError("gpu-3: no route to host")

    monkeypatch.setattr("dynctl.deploy.apply.LOST_S", -1.0)
    hosts = {
        "gpu-2": Agent("chat-decode-0", EngineState.STOPPED),
        "gpu-3": Gone("chat-decode-1", EngineState.STOPPED),
    }

    code, said = drain(hosts, "chat-*", "--undo")

    assert code == ExitCode.PARTIAL
    assert "1 of 2 hosts failed; brought back: gpu-2" in said
    assert "lost meanwhile" not in said


def test_an_interrupt_says_that_nothing_was_changed_until_something_is(drain, monkeypatch):
    async def interrupt(*_, **__):
        raise KeyboardInterrupt

    agent = Agent("chat-decode-0")
    agent.is_interrupting = True

    with monkeypatch.context() as patch:
        patch.setattr(command, "confirm", interrupt)
        code, said = drain({"gpu-2": agent}, "gpu-2")
    assert code == ExitCode.INTERRUPTED
    assert "interrupted; nothing was changed" in said
    for words in (("gpu-2", "--yes"), ("gpu-2", "--undo")):
        agent.unit = replace(agent.unit, is_held="--undo" in words)
        code, said = drain({"gpu-2": agent}, *words)
        assert code == ExitCode.INTERRUPTED
        assert "interrupted; agents go on with chat-decode-0: dynctl status" in said
