"""A server that runs already: adopted, watched, left alone."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynctl.agents.protocol import EngineWish
from dynctl.core.deployment import EngineState as S

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def server(tmp_path, until):
    """A fake OpenAI server on a loopback port, not started by any agent."""
    running = []

    def start(port: int) -> subprocess.Popen:
        out = tmp_path / f"port{len(running)}"
        argv = [
            sys.executable,
            "-S",
            str(FAKE_ENGINE),
            "--listen",
            str(port),
            "--port-file",
            str(out),
        ]
        process = subprocess.Popen(argv)
        running.append(process)
        until(out.exists, "the server listens")
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def port(free_ports):
    return free_ports()


def wish(port, **fields):
    url = f"http://127.0.0.1:{port}"
    return EngineWish("ext-0", "chat", "aggregated", "external", "m", url=url, **fields)


def test_adopted_server_is_ready_and_survives_shutdown(supervised, tools, server, port):
    process = server(port)

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(wish(port)))
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        (entry,) = supervisor.relay_table
        assert (entry.socket, entry.url) == ("", f"http://127.0.0.1:{port}")
        assert entry.info.block_size_tokens == 16
        assert supervisor.status.units[0].pid is None
        assert await supervisor.shutdown(now=False) == []

    supervised(body)
    assert process.poll() is None


def test_server_that_goes_away_is_waited_for_and_comes_back_as_a_new_incarnation(
    supervised, tools, server, port
):
    process = server(port)

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(wish(port)))
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        first = supervisor.units["ext-0"].run.incarnation

        os.kill(process.pid, signal.SIGKILL)
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.BACKOFF)
        assert "no longer answers" in supervisor.status.units[0].last_error
        server(port)
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        assert supervisor.units["ext-0"].run.incarnation != first
        await supervisor.shutdown(now=True)

    supervised(body)


def test_next_supervisor_takes_it_over_under_the_same_incarnation(supervised, tools, server, port):
    server(port)
    seen = []

    async def first(supervisor):
        await supervisor.apply(tools.host_slice(wish(port)))
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        seen.append(supervisor.units["ext-0"].run)

    async def second(supervisor):
        assert supervisor.units["ext-0"].run == seen[0]
        assert tools.state(supervisor, "ext-0") is S.READY
        await supervisor.shutdown(now=True)

    supervised(first)
    supervised(second)


def test_another_start_deadline_leaves_it_where_it_is(supervised, tools, server, port):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(wish(port)))
        await tools.until(supervisor, lambda: "no answer" in supervisor.status.units[0].seen)
        run = supervisor.units["ext-0"].run
        await supervisor.apply(tools.host_slice(wish(port, start_deadline_s=3600), generation=2))
        server(port)
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        assert supervisor.units["ext-0"].run.incarnation == run.incarnation

        await supervisor.apply(tools.host_slice(wish(port, start_deadline_s=7200), generation=3))
        assert tools.state(supervisor, "ext-0") is S.READY
        assert supervisor.units["ext-0"].run.incarnation == run.incarnation
        assert supervisor.status.units[0].start_deadline_s == 7200
        await supervisor.shutdown(now=True)

    supervised(body)


def test_server_that_never_answers_is_named_by_its_url(supervised, tools, port):
    async def body(supervisor):
        silent = EngineWish(
            "ext-0",
            "chat",
            "aggregated",
            "external",
            "m",
            url=f"http://127.0.0.1:{port}",
            start_deadline_s=1.0,
        )
        await supervisor.apply(tools.host_slice(silent))
        # On a busy machine the first looks may end after the deadline, and then nothing was seen.
        seen = f"no token within 1.0 s; last seen: http://127.0.0.1:{port}: no answer"
        await tools.until(
            supervisor, lambda: supervisor.status.units[0].last_error.startswith(seen)
        )
        assert "onnect" in supervisor.status.units[0].last_error
        await supervisor.shutdown(now=True)

    supervised(body)


def test_what_a_server_lacks_is_told_while_it_is_waited_for(supervised, tools, server, port):
    def seen(supervisor):
        return supervisor.status.units[0].seen

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(wish(port)))
        await tools.until(supervisor, lambda: "no answer to /health" in seen(supervisor))
        assert seen(supervisor).startswith(f"http://127.0.0.1:{port}: ")
        assert tools.state(supervisor, "ext-0") is S.STARTING

        server(port)
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.READY)
        assert seen(supervisor) == ""
        await supervisor.shutdown(now=True)

    supervised(body)


def test_wrong_model_is_final(supervised, tools, server, port):
    server(port)

    async def body(supervisor):
        other = EngineWish(
            "ext-0", "chat", "aggregated", "external", "gpt", url=f"http://127.0.0.1:{port}"
        )
        await supervisor.apply(tools.host_slice(other))
        await tools.until(supervisor, lambda: tools.state(supervisor, "ext-0") is S.FAILED)
        assert "no such model" in supervisor.status.units[0].last_error
        await asyncio.sleep(0)

    supervised(body)
