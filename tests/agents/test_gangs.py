"""An engine over two hosts: two real agents and relays, simulated nodes that meet, and everything that may come between."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dynctl.agents import ask
from dynctl.agents.client import AgentClient
from dynctl.agents.host.processes import send, tagged
from dynctl.agents.launch import Endpoints
from dynctl.agents.protocol import EngineWish, Gang, HostSlice, Peer, RelayWish
from dynctl.core.deployment import EngineState as S
from dynctl.core.deployment import UnitStatus
from dynctl.deploy.tls import ensure_authority, ensure_leaf

pytestmark = pytest.mark.timeout(180)

NAMES = ("h0", "h1")
IDS = ("e0", "e0.1")


@dataclass
class Pair:
    """Two hosts of one machine, and what each is to run."""

    roots: tuple[Path, Path]
    slices: list[HostSlice]

    def agent(self, start, rank: int):
        return start(self.roots[rank])

    def client(self, rank: int) -> AgentClient:
        return AgentClient((self.roots[rank] / "agent.socket-path").read_text().strip())

    async def put(self, rank: int) -> None:
        async with self.client(rank) as client:
            await client.put_slice(self.slices[rank])

    async def unit(self, rank: int) -> UnitStatus:
        async with self.client(rank) as client:
            return next(u for u in (await client.status()).units if u.id == IDS[rank])

    async def until(self, rank: int, holds: Callable[[UnitStatus], object]) -> UnitStatus:
        deadline_s = time.monotonic() + 60
        while not holds(unit := await self.unit(rank)):
            assert time.monotonic() < deadline_s, [await self.unit(each) for each in range(2)]
            await asyncio.sleep(0.02)
        return unit

    async def ready(self, not_as: str = "") -> str:
        """Wait until both are ready as one incarnation, and return that."""
        leader = await self.until(0, lambda u: u.state is S.READY and u.incarnation != not_as)
        await self.until(
            1, lambda u: (u.state, u.incarnation) == (S.READY, f"{leader.incarnation}.1")
        )
        return leader.incarnation

    def changed(self, **fields) -> None:
        """Wish for something else on both, as another plan would."""
        self.slices = [
            replace(
                one,
                generation=one.generation + 1,
                engines=tuple(
                    replace(e, **fields, gang=replace(e.gang, digest=f"{e.gang.digest}+"))
                    for e in one.engines
                ),
            )
            for one in self.slices
        ]


@pytest.fixture
def pair(free_ports, until) -> Iterator[Pair]:
    roots = tuple(Path(tempfile.mkdtemp(prefix="dy", dir="/tmp")) for _ in NAMES)
    relays, meeting = (free_ports(), free_ports()), free_ports()
    authority = ensure_authority(roots[0] / "ca")
    for root, name in zip(roots, NAMES, strict=True):
        (root / "tls").mkdir()
        (root / "tls/ca.crt").write_bytes(authority.cert)
        for stem, party in (("host", "relay"), ("member", "member")):
            leaf = ensure_leaf(roots[0] / "ca", authority, f"{party}:{name}", name, None)
            (root / f"tls/{stem}.crt").write_bytes(leaf.cert)
            (root / f"tls/{stem}.key").write_bytes(leaf.key)
    peers = [
        Peer(unit_id, name, "127.0.0.1", port)
        for unit_id, name, port in zip(IDS, NAMES, relays, strict=True)
    ]
    slices = [
        HostSlice(
            "lab",
            NAMES[rank],
            1,
            relay=RelayWish("127.0.0.1", relays[rank]),
            engines=(
                EngineWish(
                    *(IDS[rank], "chat", "aggregated", "sim", "sim-8b"),
                    pp=2,
                    gang=Gang("e0", rank, 2, "127.0.0.1", meeting, (peers[1 - rank],), "d"),
                ),
            ),
        )
        for rank in range(2)
    ]
    yield Pair(roots, slices)
    for root in roots:
        send(list(tagged(str(root))), signal.SIGKILL)
    for root in roots:
        until(lambda root=root: not tagged(str(root)), "no process of the test runs any more")
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def both(pair, agent) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a coroutine function with both agents told and the engine ready."""

    def run(body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await asyncio.gather(pair.put(0), pair.put(1))
            await pair.ready()
            await body()

        for rank in range(2):
            pair.agent(agent, rank)
        asyncio.run(main())

    return run


def test_an_engine_over_two_hosts_is_one_incarnation_that_says_tokens(both, pair):
    async def body():
        leader, member = await pair.unit(0), await pair.unit(1)
        assert member.incarnation == f"{leader.incarnation}.1"
        assert (leader.kind, member.kind, member.leader) == ("engine", "member", "e0")
        assert leader.num_restarts == member.num_restarts == 0
        assert "--headless" in member.command
        assert "--headless" not in leader.command
        socket = pair.roots[0] / "run" / leader.incarnation / "http"
        assert await ask.answers(Endpoints(socket=str(socket)))
        assert not (pair.roots[1] / "run" / member.incarnation / "http").exists()

    both(body)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_member_dies_all_end_and_start_again_as_another_incarnation(both, pair, victim):
    async def body():
        first = [await pair.unit(rank) for rank in range(2)]
        os.kill(first[victim].pid, signal.SIGKILL)

        second = await pair.ready(not_as=first[0].incarnation)

        assert second != first[0].incarnation
        units = [await pair.unit(rank) for rank in range(2)]
        assert [unit.incarnation for unit in units] == [second, f"{second}.1"]
        assert units[0].pid != first[0].pid
        assert units[1].pid != first[1].pid
        assert units[0].num_restarts == 1
        assert "SIGKILL" in units[victim].last_error
        assert f"{IDS[victim]} on {NAMES[victim]} ended" in units[1 - victim].last_error

    both(body)


def test_rank_0_waits_for_a_host_that_is_away_and_says_so(pair, agent):
    async def body():
        await pair.put(0)
        unit = await pair.until(0, lambda u: "does not answer" in u.seen)
        assert unit.seen.startswith("waits for e0.1 on h1: its host does not answer")
        assert (unit.state, unit.pid) == (S.STARTING, None)

        pair.agent(agent, 1)
        await pair.put(1)
        await pair.ready()
        assert (await pair.unit(0)).num_restarts == 0

    pair.agent(agent, 0)
    asyncio.run(body())


def test_a_member_waits_for_rank_0_and_says_so(pair, agent):
    async def body():
        await pair.put(1)
        unit = await pair.until(1, lambda u: "does not answer" in u.seen)
        assert unit.seen.startswith("waits for e0 on h0, which does not answer")
        assert (unit.state, unit.pid) == (S.STARTING, None)

    pair.agent(agent, 1)
    asyncio.run(body())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_started_again_adopts_its_member_and_nothing_ends(pair, agent, rank):
    async def first():
        await asyncio.gather(pair.put(0), pair.put(1))
        await pair.ready()
        return [await pair.unit(each) for each in range(2)]

    async def second(before):
        await pair.ready()
        after = [await pair.unit(each) for each in range(2)]
        assert [unit.pid for unit in after] == [unit.pid for unit in before]
        # It still hears of the others: the engine goes on as one.
        os.kill(after[1 - rank].pid, signal.SIGKILL)
        await pair.ready(not_as=before[0].incarnation)

    agents = [pair.agent(agent, each) for each in range(2)]
    before = asyncio.run(first())
    agents[rank].end(signal.SIGKILL)
    pair.agent(agent, rank)
    asyncio.run(second(before))


def test_a_member_that_died_while_its_agent_was_away_does_not_join_again(pair, agent):
    async def first():
        await asyncio.gather(pair.put(0), pair.put(1))
        await pair.ready()
        return [await pair.unit(each) for each in range(2)]

    async def second(before):
        incarnation = await pair.ready(not_as=before[0].incarnation)
        assert incarnation != before[0].incarnation
        assert (await pair.unit(0)).pid != before[0].pid

    agents = [pair.agent(agent, each) for each in range(2)]
    before = asyncio.run(first())
    agents[1].end(signal.SIGKILL)
    os.kill(before[1].pid, signal.SIGKILL)
    pair.agent(agent, 1)
    asyncio.run(second(before))


def test_another_plan_takes_effect_when_both_hosts_have_it(both, pair):
    async def body():
        before = await pair.unit(0)
        pair.changed(max_num_seqs=7)
        await pair.put(0)
        unit = await pair.until(0, lambda u: "another plan" in u.seen)
        assert unit.seen == "waits for e0.1 on h1: its host has another plan"
        assert unit.pid is None

        await pair.put(1)
        await pair.ready(not_as=before.incarnation)
        units = [await pair.unit(rank) for rank in range(2)]
        assert all("--max-num-seqs 7" in unit.command for unit in units)

    both(body)


def test_draining_rank_0_ends_all_members_and_bringing_it_back_starts_them(both, pair):
    async def body():
        before = await pair.unit(0)
        async with pair.client(0) as client:
            await client.drain("e0")
            await pair.until(0, lambda u: u.state is S.STOPPED)
            member = await pair.until(1, lambda u: u.pid is None and u.state is S.STARTING)
            assert "e0" in member.seen
            await client.restart("e0")
        await pair.ready(not_as=before.incarnation)

    both(body)


def test_a_host_that_is_taken_down_lets_rank_0_end_first(both, pair):
    async def body():
        async with pair.client(0) as one, pair.client(1) as other:
            leaving = asyncio.create_task(other.shutdown())
            await pair.until(1, lambda u: u.state is S.DRAINING)
            leader = await pair.unit(0)
            assert leader.state is S.READY
            await one.shutdown()
            await leaving

    both(body)
