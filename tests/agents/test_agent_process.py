"""The agent as it is deployed: a process of its own, spoken to by the controller's client."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynctl.agents.client import AgentClient
from dynctl.agents.host.processes import tagged
from dynctl.core.deployment import EngineState as S
from dynctl.errors import ConnectError, DeployError, ExitCode

pytestmark = pytest.mark.usefixtures("no_process_left")


async def until_state(client, wanted, unit_id="e0", limit_s=60):
    deadline_s = time.monotonic() + limit_s
    while True:
        status = await client.status()
        units = {unit.id: unit for unit in status.units}
        if unit_id in units and units[unit_id].state is wanted:
            return units[unit_id]
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.05)


def test_killed_agent_leaves_engines_running_and_the_next_one_adopts_them(
    agent, engine, tools, remembered, runs
):
    """G3: same pid, same incarnation, and never out of service."""

    async def up(process):
        async with process.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            return await until_state(client, S.READY)

    first = agent()
    before = asyncio.run(up(first))
    remembered(before)
    first.end(signal.SIGKILL)
    assert runs(before.pid)

    async def look(process):
        async with process.client() as client:
            status = await client.status()
            (unit,) = status.units
            await client.shutdown(now=True)
            return status, unit

    second = agent()
    status, after = asyncio.run(look(second))

    assert (after.pid, after.incarnation, after.state) == (before.pid, before.incarnation, S.READY)
    assert (status.generation, status.cluster, status.degraded) == (1, "lab", ())
    assert second.end() == 0


def test_terminated_agent_exits_alone(agent, engine, tools, root_path):
    async def up(process):
        async with process.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            return await until_state(client, S.READY)

    first = agent()
    unit = asyncio.run(up(first))

    assert first.end(signal.SIGTERM) == 0
    assert tagged(str(root_path)) == {unit.pid: unit.incarnation}

    async def down(process):
        async with process.client() as client:
            await client.shutdown(now=True)

    asyncio.run(down(agent()))


def test_shutdown_drains_ends_everything_and_the_agent(agent, engine, tools, root_path):
    one = agent()

    async def body():
        async with one.client() as client:
            await client.put_slice(
                tools.host_slice(engine("e0"), engine("e1", flags={"grandchild": ""}))
            )
            await until_state(client, S.READY, "e0")
            await until_state(client, S.READY, "e1")
            status = await client.shutdown()
            assert status.units == ()

    asyncio.run(body())

    assert one.process.wait(60) == 0
    assert tagged(str(root_path)) == {}
    assert not (root_path / "slice.json").exists()
    assert list((root_path / "run").iterdir()) == []


def test_slice_survives_a_shutdown_in_no_case(agent, engine, tools):
    """A new agent after a shutdown starts nothing."""
    one = agent()

    async def down():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            await until_state(client, S.READY)
            await client.shutdown(now=True)

    asyncio.run(down())
    one.process.wait(60)

    async def look(process):
        async with process.client() as client:
            return await client.status()

    status = asyncio.run(look(agent()))
    assert (status.units, status.generation) == ((), -1)


def test_reboot_brings_the_slice_back_without_anyone(
    agent, engine, tools, root_path, remembered, ended
):
    """G6: after a reboot there is only the directory."""
    one = agent()

    async def up():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            return await until_state(client, S.READY)

    before = asyncio.run(up())
    remembered(before)
    one.end(signal.SIGKILL)
    os.kill(before.pid, signal.SIGKILL)
    ended(before.pid)
    units = root_path / "state" / "units.json"
    boot = units.read_text().split('"boot":"')[1].split('"')[0]
    units.write_text(units.read_text().replace(boot, "0000/1"))

    two = agent()

    async def look():
        async with two.client() as client:
            unit = await until_state(client, S.READY)
            await client.shutdown(now=True)
            return unit

    assert asyncio.run(look()).incarnation != before.incarnation


def test_second_agent_in_one_root_is_turned_away(agent, root_path):
    agent()

    argv = [sys.executable, "-sP", "-m", "dynctl.agents", "--root", str(root_path)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert second.returncode == ExitCode.LOCKED
    assert "another agent runs in" in second.stderr


def test_control_socket_is_private_and_its_path_is_written_down(agent, root_path):
    agent()

    path = Path((root_path / "agent.socket-path").read_text().strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_long_root_has_its_sockets_elsewhere_and_cleans_up(agent, engine, tools, root_path):
    deep = root_path / ("d" * 60)
    deep.mkdir()
    one = agent(deep)
    path = Path((deep / "agent.socket-path").read_text().strip())

    async def body():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            await until_state(client, S.READY)
            await client.shutdown(now=True)

    asyncio.run(body())
    assert one.process.wait(60) == 0
    one.end()
    assert deep not in path.parents
    assert not path.parent.exists()


def test_errors_arrive_as_what_they_are(agent, tools, engine):
    one = agent()

    async def body():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(generation=3, fence=3))
            with pytest.raises(DeployError, match="generation 2 is older") as refused:
                await client.put_slice(tools.host_slice(generation=2, fence=3))
            assert refused.value.exit_code == ExitCode.REFUSED
            assert "dynctl status" in refused.value.hint
            with pytest.raises(DeployError, match="twice"):
                await client.put_slice(tools.host_slice(engine(), engine(), generation=4, fence=3))
            with pytest.raises(DeployError, match="no unit e9"):
                await client.drain("e9")
            for unit_id in ("..%2Fx", "nope", "a\0b"):
                with pytest.raises(DeployError, match=r"no unit|answered 400"):
                    async with client.logs(unit_id):
                        pass

    asyncio.run(body())


def test_nobody_listening_is_a_connect_error(root_path):
    async def body():
        async with AgentClient(root_path / "none.sock") as client:
            with pytest.raises(ConnectError, match="no agent answers"):
                await client.status()

    asyncio.run(body())


def test_logs_give_the_tail_and_follow_what_comes(agent, engine, tools, root_path):
    one = agent()

    async def body():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine(flags={"say": "hello"})))
            await until_state(client, S.READY)
            async with client.logs("e0", tail=1) as pieces:
                text = b"".join([piece async for piece in pieces])
            assert text == b"hello\n"
            async with client.logs("e0", tail=0, follow=True) as pieces:
                with (root_path / "logs" / "e0.log").open("ab") as file:
                    file.write(b"more\n")
                assert await anext(pieces) == b"more\n"
            await client.shutdown(now=True)

    asyncio.run(body())


def test_sample_holds_engine_figures(agent, engine, tools):
    one = agent()

    async def body():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            await until_state(client, S.READY)
            snapshot = await client.sample()
            await client.shutdown(now=True)
            return snapshot

    snapshot = asyncio.run(body())
    (sample,) = snapshot.engines
    assert (sample.id, sample.prompt_tokens_total, sample.running) == ("e0", 7, 0)
    assert sample.generation_tokens_total is None
    assert snapshot.host_name == "h0"
    assert [unit.state for unit in snapshot.units] == [S.READY]


def test_relay_table_streams_every_change(agent, engine, tools, root_path):
    one = agent()
    path = (root_path / "agent.socket-path").read_text().strip()

    async def body():
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /v1/relay-table HTTP/1.1\r\nhost: x\r\n\r\n")
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine()))
            async with asyncio.timeout(60):
                while b'"state":"ready"' not in (line := await reader.readline()):
                    assert line
            await client.restart("e0")
            async with asyncio.timeout(60):
                while b'"state":"draining"' not in (line := await reader.readline()):
                    assert line
            writer.close()
            await writer.wait_closed()
            await client.shutdown(now=True)

    asyncio.run(body())


def test_systemd_is_told_when_the_socket_answers(agent, root_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(root_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(root_path / "notify"))
        agent()
        assert b"READY=1" in manager.recv(200)


def test_orphans_do_not_stay_zombies(agent, engine, tools, runs, eventually):
    """The agent is the subreaper of what it starts."""
    one = agent()

    async def body():
        async with one.client() as client:
            await client.put_slice(tools.host_slice(engine(flags={"grandchild": ""})))
            unit = await until_state(client, S.READY)
            os.kill(unit.pid, signal.SIGKILL)
            while (again := await until_state(client, S.READY)).pid == unit.pid:
                await asyncio.sleep(0.05)
            children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children")

            def only_the_living():
                pids = [int(pid) for pid in children.read_text().split()]
                return again.pid in pids and all(runs(pid) for pid in pids)

            await eventually(only_the_living, "the agent has collected the dead")
            await client.shutdown(now=True)

    asyncio.run(body())
