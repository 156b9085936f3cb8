"""A router gives its port to its successor while clients are at it."""

import asyncio
import json
import re
import signal
import sys
from contextlib import asynccontextmanager, suppress

from router_bench import Client, events, until
from router_fakes import FakeEngine

from dynctl.http1.upstream import Address, Upstream, UpstreamError


@asynccontextmanager
async def router_process(folder, name, *flags):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-sP", "-m", "dynctl.router", "--config", str(folder / "r.json")),
        *("--admin-socket", str(folder / f"{name}.admin"), "--offer", str(folder / f"{name}.hand")),
        *flags,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # To the end of its pipe, so that nothing is left to the garbage collector.
        await process.communicate()


async def port_of(process):
    while True:
        line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        assert line, "the router ended"
        if match := re.search(r"listening on 127\.0\.0\.1:(\d+)", line):
            return int(match[1])


async def healthy(folder, name):
    admin = Upstream(Address(path=str(folder / f"{name}.admin")))
    status = 0
    while status != 200:
        await asyncio.sleep(0.02)
        # The file is there a moment before its server.
        with suppress(UpstreamError):
            status = (await admin.fetch("GET", "/health")).status
    await admin.close()


def configure(folder, engine, **settings):
    config = {
        "listen": "127.0.0.1:0",
        "engines": [{"id": "e0", "url": engine.url}],
        "settings": {"engine_poll_s": 0.1} | settings,
    }
    (folder / "r.json").write_text(json.dumps(config))


def test_streams_and_requests_pass_through_a_hand_over_unharmed(run, short_dir):
    async def main():
        engine = await FakeEngine(tokens=200, gap_s=0.02).start()
        quick = {"max_tokens": 1}
        configure(short_dir, engine)
        async with router_process(short_dir, "old") as old:
            port = await port_of(old)
            await healthy(short_dir, "old")
            clients = [Client(port) for _ in range(3)]
            stream = asyncio.create_task(clients[0].complete(stream=True))
            await until(lambda: engine.num_running == 1)
            statuses = []
            is_over = asyncio.Event()

            async def keep_asking(client):
                while not is_over.is_set():
                    statuses.append((await client.complete(**quick)).status)
                    await asyncio.sleep(0.005)

            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(keep_asking(client)) for client in clients[1:]]
                take = ("--take-over", str(short_dir / "old.hand"))
                async with router_process(short_dir, "new", *take) as new:
                    assert await port_of(new) == port
                    await healthy(short_dir, "new")
                    old.send_signal(signal.SIGTERM)
                    answer = await stream
                    assert await asyncio.wait_for(old.wait(), 60) == 0
                    after = len(statuses)
                    while len(statuses) < after + 20:
                        await asyncio.sleep(0.01)
                    is_over.set()
                    await asyncio.wait(asking)

            assert events(answer.body)[-1] == b"[DONE]"
            assert len(events(answer.body)) > 200
            assert set(statuses) == {200}
            for client in clients:
                await client.upstream.close()
        await engine.stop()

    run(main)


def test_stream_that_outlasts_the_drain_ends_in_an_error_event(run, short_dir):
    async def main():
        engine = await FakeEngine(tokens=2000, gap_s=0.02).start()
        configure(short_dir, engine, drain_s=1)
        async with router_process(short_dir, "old") as old:
            port = await port_of(old)
            await healthy(short_dir, "old")
            client = Client(port)
            stream = asyncio.create_task(client.complete(stream=True))
            await until(lambda: engine.num_running == 1)
            take = ("--take-over", str(short_dir / "old.hand"))
            async with router_process(short_dir, "new", *take):
                await healthy(short_dir, "new")
                old.send_signal(signal.SIGTERM)
                # Said again, as by an agent that took over meanwhile: it means no more.
                old.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(old.wait(), 60) == 0
                last = events((await stream).body)[-1]
            assert "error" in json.loads(last)
            await client.upstream.close()
        await engine.stop()

    run(main)


def test_successor_that_can_serve_nothing_leaves_the_port_alone(run, short_dir):
    async def main():
        engine = await FakeEngine().start()
        configure(short_dir, engine)
        async with router_process(short_dir, "old") as old:
            port = await port_of(old)
            await healthy(short_dir, "old")
            config = json.loads((short_dir / "r.json").read_text())
            config["engines"][0]["url"] = "http://127.0.0.1:1"
            (short_dir / "r.json").write_text(json.dumps(config))
            take = ("--take-over", str(short_dir / "old.hand"))
            async with router_process(short_dir, "new", *take):
                client = Client(port)
                for _ in range(40):
                    assert (await client.complete()).status == 200
                    await asyncio.sleep(0.05)
                assert not (short_dir / "new.admin").exists()
                await client.upstream.close()
        await engine.stop()

    run(main)
