import asyncio
from contextlib import asynccontextmanager

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.snapshot import HostSnapshot
from dynctl.deploy import reach
from dynctl.deploy.reach import NoAgentError, SteadyAgent
from dynctl.errors import ConnectError


def test_a_lost_agent_is_reached_anew_at_the_next_sample(monkeypatch):
    opened, closed = [], []

    class Client:
        def __init__(self, number):
            self.number = number

        async def sample(self):
            if self.number == 1:
                raise ConnectError("the agent is gone")
            return HostSnapshot("a")

    @asynccontextmanager
    async def open_agent(entry, remote, inventory):
        number = len(opened) + 1
        opened.append(number)
        if number == 2:
            raise NoAgentError("a: not yet back")
        try:
            yield Client(number)
        finally:
            closed.append(number)

    monkeypatch.setattr(reach, "open_agent", open_agent)

    async def scenario():
        agent = SteadyAgent(HostEntry("a", "a"), None, Inventory("c", ()))
        with pytest.raises(ConnectError, match="gone"):
            await agent.sample()
        with pytest.raises(NoAgentError, match="not yet back"):
            await agent.sample()
        first = await agent.sample()
        second = await agent.sample()
        await agent.close()
        return first, second

    first, second = asyncio.run(scenario())

    assert first == second == HostSnapshot("a")
    assert opened == [1, 2, 3]
    assert closed == [1, 3]


def test_units_are_asked_over_the_connection_of_samples_and_a_refusal_does_not_end_it(monkeypatch):
    class Client:
        async def sample(self):
            return HostSnapshot("a")

        async def ask_router(self, unit_id, target):
            if unit_id != "r0":
                raise ConnectError(f"no router {unit_id}")
            return f"{unit_id}{target}".encode()

        async def status(self):
            unit = UnitStatus("e0", "engine", EngineState.READY, command="serve it")
            return AgentStatus("v", "c", "a", 1, 1, "d", "b", "boot", 1, 0.0, (unit,))

        @asynccontextmanager
        async def logs(self, unit_id, tail):
            async def pieces():
                for piece in (b"one\nt", b"wo\n", f"last of {tail} of {unit_id}".encode()):
                    yield piece

            yield pieces()

    opened = []

    @asynccontextmanager
    async def open_agent(entry, remote, inventory):
        opened.append(entry.name)
        yield Client()

    monkeypatch.setattr(reach, "open_agent", open_agent)

    async def scenario():
        agent = SteadyAgent(HostEntry("a", "a"), None, Inventory("c", ()))
        with pytest.raises(ConnectError, match="a: no agent answers"):
            await agent.log_lines("e0", 3)
        await agent.sample()
        with pytest.raises(ConnectError, match="no router r1"):
            await agent.ask_router("r1", "/hits")
        found = await agent.ask_router("r0", "/hits"), await agent.log_lines("e0", 3)
        commands = await agent.command("e0"), await agent.command("unknown")
        await agent.sample()
        await agent.close()
        return found, commands

    found, commands = asyncio.run(scenario())
    assert found == (b"r0/hits", ["one", "two", "last of 3 of e0"])
    assert commands == ("serve it", "")
    assert opened == ["a"]


def test_agents_are_given_in_the_order_of_the_inventory_whichever_answers_first(monkeypatch):
    first = asyncio.Event()

    @asynccontextmanager
    async def open_agent(entry, remote, inventory):
        if entry.name == "b":
            first.set()
        await first.wait()
        yield entry.name

    class Fleet:
        async def map(self, work, hosts=None):
            tasks = [asyncio.create_task(work(HostEntry(n, n), None)) for n in ("a", "b")]
            return dict(zip("ab", await asyncio.gather(*tasks), strict=True))

    monkeypatch.setattr(reach, "open_agent", open_agent)

    async def scenario():
        async with reach.reach_agents(Inventory("c", ()), Fleet()) as clients:
            return list(clients.items())

    assert asyncio.run(scenario()) == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("no agent answers: no complete answer within 10 s", "no complete answer within 10 s"),
        ("a: nothing listens on /r/run/agent.sock", "nothing listens on /r/run/agent.sock"),
    ],
)
def test_an_agent_that_does_not_answer_is_told_once_with_its_host(monkeypatch, cause, said):
    class Remote:
        name = "a"

        def forward_socket(self, path):
            raise ConnectError(cause)

    async def agent_socket(*_):
        return "/r/run/agent.sock"

    monkeypatch.setattr(reach, "agent_socket", agent_socket)

    async def scenario():
        async with reach.open_agent(HostEntry("a", "a"), Remote(), Inventory("c", ())):
            pass

    with pytest.raises(NoAgentError) as caught:
        asyncio.run(scenario())

    assert caught.value.message == f"a: the agent does not answer: {said}"


def test_of_a_log_that_does_not_end_as_asked_the_last_mebibyte_and_lines_are_kept(monkeypatch):
    class Client:
        async def sample(self):
            return HostSnapshot("a")

        @asynccontextmanager
        async def logs(self, unit_id, tail):
            async def pieces():
                for _ in range(40):
                    yield unit_id.encode() * 32768
                yield b"\rone\rtwo"

            yield pieces()

    @asynccontextmanager
    async def open_agent(entry, remote, inventory):
        yield Client()

    monkeypatch.setattr(reach, "open_agent", open_agent)

    async def scenario():
        agent = SteadyAgent(HostEntry("a", "a"), None, Inventory("c", ()))
        await agent.sample()
        found = await agent.log_lines("xx", 9), await agent.log_lines("xx", 2)
        await agent.close()
        return found

    long, short = asyncio.run(scenario())
    assert [len(line) for line in long] == [2**20 - len("\rone\rtwo"), 3, 3]
    assert short == ["one", "two"]
