"""One host as `up` leaves it: agent, relay, router and an engine, all real processes but for the engine's model."""

import asyncio
import os
import shlex
import signal
import socket
import time
from dataclasses import replace

import httpx
import msgspec
import pytest

from dynctl.agents.canary import CanarySettings
from dynctl.agents.host.processes import tagged
from dynctl.agents.protocol import HostSlice, RelayWish, RouterUnit
from dynctl.core.deployment import EngineState as S
from dynctl.deploy.tls import ensure_authority, ensure_leaf
from dynctl.router.config import RelayTarget, RouterConfig, TlsFiles

pytestmark = pytest.mark.usefixtures("no_process_left")


@pytest.fixture
def tls(root_path):
    authority = ensure_authority(root_path / "ca")
    (root_path / "tls").mkdir()
    (root_path / "tls" / "ca.crt").write_bytes(authority.cert)
    for name, common_name in (("host", "relay:h0"), ("router", "router:r0")):
        pair = ensure_leaf(root_path / "ca", authority, common_name, "h0", None)
        (root_path / "tls" / f"{name}.crt").write_bytes(pair.cert)
        (root_path / "tls" / f"{name}.key").write_bytes(pair.key)
    return root_path / "tls"


@pytest.fixture
def whole(engine, tls, free_ports):
    relay_port, router_port = free_ports(), free_ports()
    config = RouterConfig(
        listen=f"127.0.0.1:{router_port}",
        deployment="chat",
        relays=(RelayTarget("h0", "127.0.0.1", relay_port),),
        tls=TlsFiles(str(tls / "router.crt"), str(tls / "router.key"), str(tls / "ca.crt")),
    )
    router = RouterUnit("router-chat", "chat", msgspec.to_builtins(config), config.listen)
    return HostSlice(
        "lab",
        "h0",
        1,
        relay=RelayWish("127.0.0.1", relay_port),
        engines=(engine(),),
        routers=(router,),
    )


def test_a_relay_that_is_frozen_is_ended_and_started_again(supervised, tools, tls, free_ports):
    wished = HostSlice("lab", "h0", 1, relay=RelayWish("127.0.0.1", free_ports()))

    async def body(supervisor):
        await supervisor.apply(wished)
        await tools.until(supervisor, lambda: tools.state(supervisor, "relay") is S.READY)
        unit = supervisor.units["relay"]
        first = unit.run

        os.kill(first.identity.pid, signal.SIGSTOP)
        await tools.until(
            supervisor,
            lambda: (
                unit.run
                and unit.run.incarnation != first.incarnation
                and unit.life.state is S.READY
            ),
        )
        assert unit.life.last_error.startswith("hung: gave no answer for ")
        assert unit.life.num_restarts >= 1
        await supervisor.shutdown(now=True)

    supervised(body, replace(tools.QUICK, canary=CanarySettings(look_s=0.1, silence_s=0.5)))


async def until_ready(client):
    deadline_s = time.monotonic() + 60
    while True:
        units = (await client.status()).units
        if units and all(unit.state is S.READY for unit in units):
            return {unit.id: unit for unit in units}
        assert time.monotonic() < deadline_s, units
        await asyncio.sleep(0.1)


async def beside(client):
    return (await client.status()).asides


async def complete(url):
    body = {"model": "m", "prompt": "hi", "max_tokens": 1}
    async with httpx.AsyncClient() as http:
        return await http.post(f"{url}/v1/completions", json=body, timeout=60)


def test_request_goes_through_router_and_relay_also_after_the_agent_was_replaced(
    agent, whole, root_path, remembered
):
    one = agent()

    async def up():
        async with one.client() as client:
            await client.put_slice(whole)
            units = await until_ready(client)
            assert set(units) == {"relay", "router-chat", "e0"}
            url = units["router-chat"].url
            answer = await complete(url)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "1"
            (relay,) = (await client.sample()).relays
            assert (relay.id, relay.incarnation) == ("relay", units["relay"].incarnation)
            assert relay.kv_lag_s is not None
            assert shlex.split(units["relay"].command)[1:4] == ["-sP", "-m", "dynctl.agents.relay"]
            assert {unit.command for unit in (await client.sample()).units} == {""}
            return units

    before = asyncio.run(up())
    remembered(*before.values())
    one.end(signal.SIGKILL)
    assert asyncio.run(complete(before["router-chat"].url)).status_code == 200

    two = agent()

    async def again():
        async with two.client() as client:
            units = await until_ready(client)
            await client.put_slice(whole)
            assert {u.id: u.pid for u in (await client.status()).units} == {
                u.id: u.pid for u in before.values()
            }
            # The relay has found the new agent: a restart of the engine reaches the router.
            await client.restart("e0")
            while (await until_ready(client))["e0"].pid == units["e0"].pid:
                await asyncio.sleep(0.1)
            deadline_s = time.monotonic() + 60
            while (await complete(units["router-chat"].url)).status_code != 200:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.1)
            sample = await client.sample()
            assert [router.id for router in sample.routers] == ["router-chat"]
            assert sample.routers[0].requests_total >= 1
            await client.shutdown()

    asyncio.run(again())
    assert two.process.wait(60) == 0
    assert tagged(str(root_path)) == {}


def test_agent_that_dies_during_a_hand_over_leaves_it_to_the_next_one(
    agent, whole, engine, root_path, eventually, remembered
):
    """The predecessor lets a long answer end, whoever is the agent by then, and nothing is left at the end."""
    hang = root_path / "hang"
    slow = replace(whole, engines=(engine(flags={"hang-file": str(hang)}),))
    one = agent()

    async def hand_over():
        async with one.client() as client:
            await client.put_slice(slow)
            before = await until_ready(client)
            url = before["router-chat"].url
            hang.touch()
            answer = asyncio.create_task(complete(url))
            await eventually((root_path / "hang.asked").exists, "the engine has the request")
            await client.restart("router-chat")
            deadline_s = time.monotonic() + 60
            while S.DRAINING not in {unit.state for unit in await beside(client)}:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            after = await until_ready(client)
            assert after["router-chat"].pid != before["router-chat"].pid
            assert after["router-chat"].num_restarts == 0
            await asyncio.to_thread(remembered, *after.values(), *await beside(client))
            one.end(signal.SIGKILL)
            hang.unlink()
            return before, after, await answer

    before, after, answer = asyncio.run(hand_over())
    assert answer.status_code == 200, answer.text
    two = agent()

    async def look():
        async with two.client() as client:
            units = await until_ready(client)
            assert units["router-chat"].pid == after["router-chat"].pid
            deadline_s = time.monotonic() + 60
            while asides := await beside(client):
                assert {u.beside for u in asides} == {"router-chat"}
                assert time.monotonic() < deadline_s, asides
                await asyncio.sleep(0.1)
            assert before["router-chat"].pid not in tagged(str(root_path))
            await client.shutdown()

    asyncio.run(look())
    assert two.process.wait(60) == 0
    assert tagged(str(root_path)) == {}


def test_relay_port_taken_by_a_stranger_fails_the_relay_and_names_it(agent, whole):
    one = agent()

    async def body():
        async with one.client() as client:
            with socket.create_server(("127.0.0.1", whole.relay.port)):
                await client.put_slice(whole)
                deadline_s = time.monotonic() + 60
                while True:
                    units = {unit.id: unit for unit in (await client.status()).units}
                    if units["relay"].state is S.FAILED:
                        break
                    assert time.monotonic() < deadline_s, units
                    await asyncio.sleep(0.05)
                assert f"port {whole.relay.port} is held by" in units["relay"].last_error
            # The cause is gone: the next `up` sends the same slice.
            await client.put_slice(whole)
            await until_ready(client)
            await client.shutdown(now=True)

    asyncio.run(body())
