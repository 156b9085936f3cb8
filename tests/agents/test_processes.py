"""Processes that outlive us: spawned, recognised, ended whole."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynctl.agents.host import processes
from dynctl.agents.host.processes import Identity, Watched
from dynctl.core.deployment import EngineState as S
from dynctl.errors import EngineError

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def spawn(tmp_path):
    started = []

    def start(argv=SLEEP, incarnation="inc1", scope="", mode="none", env=None) -> Identity:
        plain = {"PATH": os.environ["PATH"]}
        one = processes.spawn(argv, env or plain, tmp_path / "log", incarnation, scope, mode)
        started.append(one)
        return one

    yield start
    for one in started:
        processes.send(processes.members(one), signal.SIGKILL)
        try:
            os.waitpid(one.pid, 0)
        except ChildProcessError:
            continue


def test_exit_status_of_a_child_is_known(spawn):
    async def body():
        for code, expected in (
            (["-c", "raise SystemExit(7)"], 7),
            (["-c", "import os; os.abort()"], -6),
        ):
            watched = Watched(spawn([sys.executable, "-S", *code]))
            assert await asyncio.wait_for(watched.gone, 60) == expected

    asyncio.run(body())


def test_process_of_someone_else_is_watched_without_its_status():
    async def body():
        process = subprocess.Popen(SLEEP)
        stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        watched = Watched(Identity(process.pid, int(stat[19]), "x"))
        process.kill()
        process.wait()
        assert await asyncio.wait_for(watched.gone, 60) in (None, -9)

    asyncio.run(body())


def test_closed_watch_leaves_the_process_alone(spawn):
    async def body():
        identity = spawn()
        watched = Watched(identity)
        watched.close()
        await asyncio.sleep(0.05)
        assert processes.is_same(identity)
        assert not watched.gone.done()

    asyncio.run(body())


def test_identity_needs_pid_start_time_and_tag(spawn, until):
    identity = spawn()
    # The kernel shows a program's environment a moment after it has begun.
    environ = Path(f"/proc/{identity.pid}/environ")
    until(environ.read_bytes, "the environment is shown")

    assert processes.is_same(identity)
    assert not processes.is_same(Identity(identity.pid, identity.start_ticks + 1, "inc1"))
    assert not processes.is_same(Identity(identity.pid, identity.start_ticks, "other"))
    assert not processes.is_same(Identity(2**22 - 1, 5, "inc1"))


def test_name_with_parentheses_and_spaces_does_not_confuse(tmp_path, spawn):
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")

    assert processes.is_same(spawn([str(odd), "600"]))


def test_members_include_those_that_left_session_or_parent(spawn, eventually):
    code = (
        "import subprocess, sys, time\n"
        f"sleep = {SLEEP!r}\n"
        "subprocess.Popen(sleep)\n"
        "subprocess.Popen(sleep, start_new_session=True)\n"
        # Its environment is gone, as with programs that rename themselves.
        "subprocess.Popen(sleep, env={})\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    identity = spawn([sys.executable, "-S", "-c", code])

    async def body():
        await eventually(lambda: len(processes.members(identity)) == 4, "all have started")
        os.kill(identity.pid, signal.SIGKILL)
        os.waitpid(identity.pid, 0)
        await eventually(lambda: len(processes.members(identity)) == 3, "all others are found")
        assert await processes.end_group(identity, 60) == []

    asyncio.run(body())


def test_missing_program_is_an_error_that_names_it(spawn):
    with pytest.raises(EngineError, match=r"cannot start /opt/none: No such file"):
        spawn(["/opt/none"])


def test_boot_identity_tells_containers_reboots_apart():
    kernel, _, first_ticks = processes.boot_identity().partition("/")

    assert len(kernel) == 36
    assert int(first_ticks) >= 0


@pytest.mark.parametrize(("mode", "flags"), [("user", ["--user"]), ("system", [])])
def test_scope_wraps_the_program_without_changing_its_pid(tmp_path, spawn, until, mode, flags):
    """A stand-in for systemd-run that notes its words and becomes the program, as the real one does."""
    fake = tmp_path / "systemd-run"
    fake.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {tmp_path}/words\n'
        'while [ "$1" != "--" ]; do shift; done; shift\n'
        'exec "$@"\n'
    )
    fake.chmod(0o755)
    old_path = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:{old_path}"
    try:
        identity = spawn(scope="dynctl-e0-inc1.scope", mode=mode)
    finally:
        os.environ["PATH"] = old_path

    # It is the shell script first, and then, under the same PID, the program.
    program = os.fsencode(sys.executable)
    line = Path(f"/proc/{identity.pid}/cmdline")
    until(lambda: line.read_bytes().startswith(program), "the program runs")
    words = (tmp_path / "words").read_text().split("--\n")[0].split()
    assert words[:5] == [
        "--scope",
        "--quiet",
        "--collect",
        "--unit=dynctl-e0-inc1.scope",
        *(flags or ["--"]),
    ]
    assert identity.scope == "dynctl-e0-inc1.scope"
    assert processes.is_same(identity)


def test_unkillable_process_fails_the_unit_and_is_not_started_again(
    supervised, engine, tools, monkeypatch
):
    """G13: a process in uninterruptible sleep survives SIGKILL; simulated by a kill that does nothing."""

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(flags={"ignore-term": ""})))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        pid = supervisor.units["e0"].run.identity.pid
        real = processes.end_group

        async def in_vain(identity, limit_s):
            return [identity.pid]

        monkeypatch.setattr(processes, "end_group", in_vain)
        (left,) = await supervisor.shutdown(now=True)
        assert left.life.state is S.FAILED
        assert f"process {pid} does not end" in supervisor.status.units[0].last_error
        assert left.run.identity.pid == pid

        monkeypatch.setattr(processes, "end_group", real)
        assert await supervisor.shutdown(now=True) == []

    supervised(body)
