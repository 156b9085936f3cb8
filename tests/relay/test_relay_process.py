"""The relay as the agent runs it: an own process."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from dynctl.http1.server import Exchange


async def start(root, port: int, agent_socket, *flags) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-sP", "-m", "dynctl.agents.relay",
        "--root", str(root), "--listen", f"127.0.0.1:{port}", "--agent-socket", str(agent_socket),
        *flags,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@asynccontextmanager
async def started(*arguments):
    """As `start`; uvloop would wait without end for a child a failed test had left."""
    process = await start(*arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Wait for the process and return its exit code and what it said."""
    try:
        async with asyncio.timeout(60):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, err.decode()


async def until_listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        await writer.wait_closed()
        return


def test_sigterm_drains_streams_and_exits_0(run, bench, entry_of, root, free_ports):
    async def main():
        streams = []

        def hold(exchange: Exchange) -> None:
            streams.append(exchange)
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b:
            path = await b.engine("e", hold)
            b.agent.set(entry_of("m-0", "i1", path))
            port = free_ports()
            process = await start(root, port, b.agent.path)
            await until_listening(port)
            # A client of the process, not of the relay in this one.
            await b.server.close(0)
            b.server.port = port
            pool = b.client("router")
            watch, _ = b.open_stream("/v1/engines", pool)
            await b.until(lambda: b"m-0" in watch.body)
            sink, _ = b.open_stream("/v1/engine/m-0/health", pool)
            await b.until(lambda: sink.body == b"first")
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(watch.over.wait(), 60)
            assert process.returncode is None
            streams[0].write(b" last")
            streams[0].finish()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert (sink.error, bytes(sink.body)) == (None, b"first last")
            code, err = await end(process)
            assert (code, "Traceback" in err) == (0, False), err

    run(main)


def test_successor_takes_the_port_while_a_stream_runs_through_its_predecessor(
    run, bench, entry_of, root, short_dir, free_ports
):
    async def main():
        streams = []

        def hold(exchange: Exchange) -> None:
            if streams:
                exchange.respond(200, b"short")
                return
            streams.append(exchange)
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b, AsyncExitStack() as stack:
            path = await b.engine("e", hold)
            b.agent.set(entry_of("m-0", "i1", path))
            port, hand = free_ports(), str(short_dir / "hand")
            old = await stack.enter_async_context(
                started(root, port, b.agent.path, "--offer", hand)
            )
            await until_listening(port)
            await b.server.close(0)
            b.server.port = port
            pool = b.client("router")
            watch, _ = b.open_stream("/v1/engines", pool)
            await b.until(lambda: b"m-0" in watch.body)
            sink, _ = b.open_stream("/v1/engine/m-0/health", pool)
            await b.until(lambda: sink.body == b"first")

            flags = ("--offer", f"{hand}2", "--take-over", hand)
            new = await stack.enter_async_context(started(root, port, b.agent.path, *flags))
            await b.until((short_dir / "hand2").exists)
            old.send_signal(signal.SIGTERM)
            await asyncio.wait_for(watch.over.wait(), 60)
            again, _ = b.open_stream("/v1/engines", pool)
            await b.until(lambda: b"m-0" in again.body)
            for _ in range(20):
                answer = await pool.fetch("GET", "/v1/engine/m-0/health")
                assert (answer.status, answer.body) == (200, b"short")
            streams[0].write(b" last")
            streams[0].finish()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert (sink.error, bytes(sink.body)) == (None, b"first last")
            code, err = await end(old)
            assert (code, "Traceback" in err) == (0, False), err
            new.send_signal(signal.SIGTERM)
            code, err = await end(new)
            assert (code, "Traceback" in err) == (0, False), err

    run(main)


@pytest.mark.parametrize("fault", ["busy port", "no certificates"])
def test_a_relay_that_cannot_start_says_why_in_one_line(run, root, short_dir, fault):
    async def main():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            place = root if fault == "busy port" else short_dir
            code, err = await end(await start(place, port, short_dir / "a"))
            assert code == 1
            assert len(err.strip().splitlines()) == 1
            assert f"127.0.0.1:{port}" in err

    run(main)
