"""The same against OpenSSH's own server, which is what hosts run. Skipped where it is not installed."""

import asyncio
import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import asyncssh
import pytest

from dynctl.core.command import Command
from dynctl.core.inventory import HostEntry
from dynctl.errors import CommandError, ConnectError, UnknownOutcomeError
from dynctl.remote.fleet import open_fleet
from dynctl.remote.known_hosts import lookup_name

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(SSHD is None, reason="OpenSSH's sshd is not installed here")


class Openssh:
    """One sshd per connection, as inetd would start it: no port has to be guessed, no daemon stays."""

    def __init__(self, directory: Path, home, *more: str) -> None:
        self.directory = directory
        directory.mkdir()
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(directory / "host_key"))
        (directory / "host_key").chmod(0o600)
        (directory / "authorized").write_text((home.ssh / "id_ed25519.pub").read_text())
        options = (
            f"HostKey {directory}/host_key",
            f"AuthorizedKeysFile {directory}/authorized",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "LogLevel VERBOSE",
            *more,
        )
        (directory / "config").write_text("\n".join(options) + "\n")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        line = key.export_public_key().decode().strip()
        with (home.ssh / "known_hosts").open("a") as file:
            file.write(f"{lookup_name('127.0.0.1', self.port)} {line}\n")
        self.entry = HostEntry("real", "127.0.0.1", user=getpass.getuser(), port=self.port)
        self.children: list[subprocess.Popen[bytes]] = []

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.listener.setblocking(False)
        with (self.directory / "log").open("ab") as log:
            while True:
                connection, _ = await loop.sock_accept(self.listener)
                with connection:
                    connection.setblocking(True)
                    argv = [SSHD, "-i", "-e", "-f", str(self.directory / "config")]
                    child = subprocess.Popen(
                        argv,
                        stdin=connection,
                        stdout=connection,
                        stderr=log,
                        start_new_session=True,
                    )
                    self.children.append(child)

    def cut(self) -> None:
        for child in self.children:
            child.kill()


@pytest.fixture
def reached(tmp_path, home):
    """Make a function that runs work against a remote on a fresh sshd with more configuration lines."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)

    def run(work, *more: str):
        server = Openssh(tmp_path / "sshd", home, *more)

        async def main():
            serving = asyncio.create_task(server.serve())
            try:
                async with open_fleet([server.entry], home.settings()) as fleet:
                    return await work(await fleet.reach("real"), server)
            finally:
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
                server.listener.close()
                for child in server.children:
                    child.kill()
                    child.wait()

        return asyncio.run(main())

    return run


def test_commands_files_lines_and_sockets_work(reached, tmp_path):
    async def work(remote, server):
        done = await remote.run(Command(("sh", "-c", "cat; exit 3"), stdin=b"in"))
        content = os.urandom(1_500_000)
        await remote.put(str(tmp_path / "d" / "f"), content, 0o640)
        back = await remote.get(str(tmp_path / "d" / "f"), len(content))
        async with remote.lines(Command(("sh", "-c", "echo a; echo b"))) as lines:
            got = [line async for line in lines]

        async def greet(reader, writer):
            writer.write(b"hello")
            writer.close()

        path = str(tmp_path / "s")
        async with (
            await asyncio.start_unix_server(greet, path),
            remote.forward_socket(path) as local,
        ):
            reader, writer = await asyncio.open_unix_connection(local)
            greeting = await reader.read()
            writer.close()
            await writer.wait_closed()
        return done.exit_status, done.stdout, back == content, got, greeting

    assert reached(work) == (3, b"in", True, [b"a", b"b"], b"hello")


def test_five_thousand_hostile_words_run_nothing(reached, tmp_path):
    """S6: through a real sshd and login shell, with a canary file that any slip would make."""
    canary = tmp_path / "canary"
    seeds = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} ;",
        f"\n touch {canary}\n",
    ]
    seeds += [f"' ; touch {canary} ; '", f"| touch {canary}", f"&& touch {canary}", f"> {canary}"]
    pieces = [*seeds, "'", '"', "\\", "$", "!", "~", "*", "{", "}", "%", "\t", "é", "-", "=", " "]
    rng = random.Random(6)
    words = ["".join(rng.choices(pieces, k=rng.randrange(1, 6))) for _ in range(5000)]

    async def work(remote, server):
        for start in range(0, len(words), 100):
            part = words[start : start + 100]
            command = Command(("printf", "%s\\0", *part), (("V", part[0]),))
            done = await remote.run(command)
            assert done.stdout.split(b"\0")[:-1] == [word.encode() for word in part]

    reached(work)
    assert not canary.exists()


def test_a_command_over_its_time_limit_is_ended_on_the_host(reached, tmp_path, ended):
    async def work(remote, server):
        pid_file = tmp_path / "pid"
        script = f"echo $$ > {pid_file}.new && mv {pid_file}.new {pid_file}; exec sleep 600"
        for timeout_s in (1, 10, 60):  # until it got as far as to its file
            with pytest.raises(UnknownOutcomeError, match=f"did not end within {timeout_s} s"):
                await remote.run(Command(("sh", "-c", script), timeout_s=timeout_s))
            if pid_file.exists():
                break
        pid = int(pid_file.read_text())
        await asyncio.to_thread(ended, pid)

    reached(work)


@pytest.mark.parametrize("prefix", ["", "timeout 600 "], ids=["child", "group of its own"])
def test_what_an_exited_command_left_holding_its_output_is_ended_on_the_host(
    reached, tmp_path, ended, prefix
):
    async def work(remote, server):
        pid_file = tmp_path / "pid"
        script = f"{prefix}sleep 600 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}"
        for timeout_s in (1, 10, 60):
            with pytest.raises(UnknownOutcomeError, match=f"did not end within {timeout_s} s"):
                await remote.run(Command(("sh", "-c", script), timeout_s=timeout_s))
            if pid_file.exists():
                break
        await asyncio.to_thread(ended, int(pid_file.read_text()))

    reached(work)


def test_what_ignores_being_asked_to_end_is_killed_on_the_host(reached, ended):
    async def work(remote, server):
        script = "trap '' TERM; echo $$; while :; do sleep 600; done"
        async with remote.lines(Command(("sh", "-c", script))) as lines:
            pid = int(await anext(lines))
        await asyncio.to_thread(ended, pid)

    reached(work)


def test_what_a_command_that_ended_left_running_stays(reached, runs):
    async def work(remote, server):
        done = await remote.run(Command(("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")))
        pid = int(done.stdout)
        try:
            assert runs(pid)
        finally:
            os.kill(pid, signal.SIGKILL)

    reached(work)


def test_leaving_a_stream_ends_its_command_on_the_host(reached, runs, ended):
    async def work(remote, server):
        async with remote.lines(Command(("sh", "-c", "echo $$; exec sleep 600"))) as lines:
            pid = int(await anext(lines))
            assert runs(pid)
        await asyncio.to_thread(ended, pid)

    reached(work)


def test_a_killed_sshd_leaves_the_outcome_unknown_and_the_next_command_works(
    reached, tmp_path, eventually
):
    """What the command started goes on until its time limit: nobody is left on the host who would end it before."""
    pid_file = tmp_path / "pid"

    async def work(remote, server):
        script = f"echo $$ > {pid_file}.new && mv {pid_file}.new {pid_file}; exec sleep 600"
        running = asyncio.create_task(remote.run(Command(("sh", "-c", script))))
        await eventually(pid_file.exists, "the command runs")
        try:
            server.cut()
            with pytest.raises(UnknownOutcomeError):
                await running
            return (await remote.run(Command(("echo", "back")))).stdout
        finally:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)

    assert reached(work) == b"back\n"


def test_what_a_lost_link_leaves_running_ends_with_its_time_limit(
    reached, tmp_path, eventually, ended, monkeypatch
):
    monkeypatch.setattr("dynctl.remote.ssh._HOST_LIMIT_AFTER_S", -20)
    pid_file = tmp_path / "pid"

    async def work(remote, server):
        script = f"trap '' TERM; echo $$ > {pid_file}.new && mv {pid_file}.new {pid_file}; while :; do sleep 600; done"
        running = asyncio.create_task(remote.run(Command(("sh", "-c", script), timeout_s=30.0)))
        await eventually(pid_file.exists, "the command runs")
        server.cut()
        with pytest.raises(UnknownOutcomeError):
            await running
        await asyncio.to_thread(ended, int(pid_file.read_text()))

    reached(work)


def test_fewer_sessions_than_we_would_use_only_make_it_slower(reached):
    """D6"""

    async def work(remote, server):
        commands = [Command(("sh", "-c", f"sleep 0.05; echo {i}")) for i in range(12)]
        return [done.stdout for done in await asyncio.gather(*map(remote.run, commands))]

    assert reached(work, "MaxSessions 2") == [f"{i}\n".encode() for i in range(12)]


def test_a_host_that_forbids_forwarding_names_the_setting(reached, tmp_path):
    async def work(remote, server):
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(lambda r, w: w.close(), path):
            with pytest.raises(ConnectError, match="nobody answers on socket") as caught:
                async with remote.forward_socket(path):
                    pass
        with pytest.raises(ConnectError, match="there is no socket"):
            async with remote.forward_socket(str(tmp_path / "none")):
                pass
        return caught.value.hint

    assert "AllowStreamLocalForwarding" in reached(work, "AllowStreamLocalForwarding no")


def test_a_forced_command_is_named_with_what_it_said(reached, home):
    async def work(remote, server):
        raise AssertionError("the login must not succeed")

    with pytest.raises(ConnectError, match=r"did not run the command; it said: go away"):
        reached(work, "ForceCommand echo go away")


def test_a_directory_without_permission_is_named(reached, tmp_path):
    async def work(remote, server):
        with pytest.raises(CommandError, match="/proc/none"):
            await remote.put("/proc/none/file", b"x")

    reached(work)
