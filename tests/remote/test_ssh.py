import asyncio
import contextlib
import os
import stat
from pathlib import Path

import pytest

from dynctl.core.command import Command
from dynctl.errors import CommandError, ConnectError, MissingFileError, UnknownOutcomeError
from dynctl.remote.fleet import open_fleet


@contextlib.asynccontextmanager
async def reached(sshd, home, **changes):
    """Yield a remote for a running, known server."""
    async with sshd.running():
        home.known(sshd)
        async with open_fleet([home.entry(sshd, **changes)], home.settings()) as fleet:
            yield await fleet.reach("h1")


def with_remote(sshd, home, work, **changes):
    async def main():
        async with reached(sshd, home, **changes) as remote:
            return await work(remote)

    return asyncio.run(main())


def test_a_command_gives_status_output_and_errors_apart(sshd, home):
    command = Command(("sh", "-c", 'cat; echo "$X" >&2; exit 3'), (("X", "a b"),), b"in\n")

    done = with_remote(sshd, home, lambda remote: remote.run(command))

    assert (done.exit_status, done.stdout, done.stderr) == (3, b"in\n", b"a b\n")


def test_many_commands_share_one_connection(sshd, home):
    async def work(remote):
        commands = [Command(("echo", str(i))) for i in range(20)]
        return [done.stdout for done in await asyncio.gather(*map(remote.run, commands))]

    outputs = with_remote(sshd, home, work)

    assert outputs == [f"{i}\n".encode() for i in range(20)]
    assert sshd.num_logins == 1


def test_the_home_directory_and_host_key_are_known_after_login(sshd, home):
    async def work(remote):
        return remote.home, remote.identity

    where, identity = with_remote(sshd, home, work)

    assert where == str(home.path)
    assert identity == sshd.host_key.get_fingerprint()


def test_a_chatty_login_shell_changes_no_output(sshd, home):
    """D5: rc files that print, a message of the day without a line end, another locale."""
    sshd.noise = b"Welcome!\n\x1b[31mlast login: never"
    sshd.env = {"LC_ALL": "de_DE.UTF-8"}

    done = with_remote(sshd, home, lambda remote: remote.run(Command(("sh", "-c", "echo $LC_ALL"))))

    assert done.stdout == b"C\n"
    assert done.stderr == b""


def test_a_login_shell_that_runs_nothing_is_named_with_what_it_said(sshd, home):
    sshd.shell = ("sh", "-c", "echo This account is currently not available.; exit 1; :")

    with pytest.raises(ConnectError, match=r"h1: the login shell .* This account is currently"):
        with_remote(sshd, home, lambda remote: remote.run(Command(("true",))))


def test_a_link_lost_while_a_command_runs_leaves_its_outcome_unknown(sshd, home):
    """D7: it may have taken effect, so it is neither success nor failure, and never tried again."""

    async def work(remote):
        running = asyncio.create_task(remote.run(Command(("sh", "-c", "echo x; sleep 30"))))
        while len(sshd.children) < 2:
            await asyncio.sleep(0.01)
        sshd.cut()
        await running

    with pytest.raises(UnknownOutcomeError, match="connection was lost"):
        with_remote(sshd, home, work)
    assert len(sshd.commands) == 2


def test_a_link_lost_between_commands_is_opened_again(sshd, home):
    async def work(remote):
        sshd.cut()
        await asyncio.sleep(0.05)
        return await remote.run(Command(("echo", "back")))

    assert with_remote(sshd, home, work).stdout == b"back\n"
    assert sshd.num_logins == 2


def test_a_command_over_its_time_limit_is_unknown_and_ended_on_the_host(sshd, home):
    async def work(remote):
        with pytest.raises(UnknownOutcomeError, match=r"did not end within 0\.3 s"):
            await remote.run(Command(("sleep", "600"), timeout_s=0.3))
        child = sshd.children[-1]
        async with asyncio.timeout(60):
            await child.wait()

    with_remote(sshd, home, work)


def test_a_shell_that_is_killed_leaves_the_outcome_unknown(sshd, home):
    # The shell's child is `timeout`, which runs this.
    kill = 'read -r line < "/proc/$PPID/stat"; set -- ${line##*")"}; kill -9 "$2"; sleep 1'
    command = Command(("sh", "-c", kill))

    with pytest.raises(UnknownOutcomeError, match="shell was ended"):
        with_remote(sshd, home, lambda remote: remote.run(command))


def test_a_signal_shows_as_a_negative_status_as_it_does_locally(sshd, home):
    command = Command(("sh", "-c", "kill -KILL $$"))

    assert with_remote(sshd, home, lambda remote: remote.run(command)).exit_status == -9


def test_endless_output_is_stopped(sshd, home, monkeypatch):
    monkeypatch.setattr("dynctl.remote.ssh.MAX_OUTPUT_BYTES", 300_000)

    with pytest.raises(CommandError, match=r"h1: .* more than 300000 bytes"):
        with_remote(sshd, home, lambda remote: remote.run(Command(("yes",))))


def test_put_replaces_a_file_with_mode_parents_and_nothing_beside_it(sshd, home):
    big = os.urandom(2_000_000)

    async def work(remote):
        await remote.put("~/a b/$(x)/file", b"old")
        await remote.put("~/a b/$(x)/file", big, mode=0o750)
        return await remote.get("~/a b/$(x)/file", len(big))

    assert with_remote(sshd, home, work) == big
    directory = home.path / "a b" / "$(x)"
    assert [f.name for f in directory.iterdir()] == ["file"]
    assert stat.S_IMODE((directory / "file").stat().st_mode) == 0o750
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_put_sends_a_file_from_disk_and_an_empty_one(sshd, home, tmp_path):
    source = tmp_path / "bundle"
    source.write_bytes(os.urandom(700_000))

    async def work(remote):
        await remote.put(str(tmp_path / "copy"), source)
        await remote.put(str(tmp_path / "empty"), b"")

    with_remote(sshd, home, work)

    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "empty").read_bytes() == b""


def test_bytes_changed_on_the_way_never_become_the_file(sshd, home, tmp_path):
    """D11: the checksum is verified on the host before the rename."""
    target = tmp_path / "d" / "file"
    target.parent.mkdir()
    target.write_bytes(b"old")

    async def work(remote):
        sshd.corrupt_stdin = True
        await remote.put(str(target), b"abc")

    with pytest.raises(CommandError, match="other bytes arrived"):
        with_remote(sshd, home, work)
    assert target.read_bytes() == b"old"
    assert [f.name for f in target.parent.iterdir()] == ["file"]


def test_a_full_disk_is_named_and_the_old_file_stays(sshd, home, tmp_path):
    """D10: /dev/full answers every write as a full disk does."""
    target = tmp_path / "d" / "file"
    target.parent.mkdir()
    target.write_bytes(b"old")
    fake = tmp_path / "bin" / "cat"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec /bin/cat > /dev/full\n")
    fake.chmod(0o755)
    sshd.env = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}

    with pytest.raises(CommandError, match="No space left on device") as caught:
        with_remote(sshd, home, lambda remote: remote.put(str(target), b"abc"))
    assert caught.value.hint == "free some space there"
    assert target.read_bytes() == b"old"
    assert [f.name for f in target.parent.iterdir()] == ["file"]


def test_a_transfer_cut_half_way_leaves_the_old_file(sshd, home, tmp_path):
    target = tmp_path / "d" / "file"
    target.parent.mkdir()
    target.write_bytes(b"old")

    async def work(remote):
        sending = asyncio.create_task(remote.put(str(target), b"x" * 30_000_000))
        while not list(target.parent.glob(".file.*.tmp")):
            await asyncio.sleep(0.005)
        sshd.cut()
        with pytest.raises(UnknownOutcomeError):
            await sending
        async with asyncio.timeout(60):
            await sshd.children[-1].wait()

    with_remote(sshd, home, work)

    assert target.read_bytes() == b"old"


def test_put_onto_a_directory_and_get_of_nothing_are_named(sshd, home, tmp_path):
    async def work(remote):
        with pytest.raises(CommandError, match="is a directory"):
            await remote.put(str(tmp_path), b"x")
        with pytest.raises(MissingFileError, match="No such file"):
            await remote.get(str(tmp_path / "none"), 10)
        await remote.put(str(tmp_path / "f"), b"12345")
        with pytest.raises(CommandError, match="larger than 4"):
            await remote.get(str(tmp_path / "f"), 4)

    with_remote(sshd, home, work)


def test_lines_arrive_while_the_command_runs_and_leaving_ends_it(sshd, home):
    sshd.noise = b"noise\n"

    async def work(remote):
        async with remote.lines(Command(("sh", "-c", "echo a; echo; echo b; sleep 60"))) as lines:
            got = [await anext(lines) for _ in range(3)]
        async with asyncio.timeout(60):
            await sshd.children[-1].wait()
        return got

    assert with_remote(sshd, home, work) == [b"a", b"", b"b"]


def test_lines_say_when_the_command_failed_and_when_the_link_was_lost(sshd, home):
    async def work(remote):
        command = Command(("sh", "-c", "echo a; echo why >&2; exit 4"))
        async with remote.lines(command) as lines:
            assert await anext(lines) == b"a"
            with pytest.raises(CommandError, match="status 4: why"):
                await anext(lines)
        async with remote.lines(Command(("sh", "-c", "echo a; sleep 60"))) as lines:
            assert await anext(lines) == b"a"
            sshd.cut()
            with pytest.raises(UnknownOutcomeError):
                await anext(lines)

    with_remote(sshd, home, work)


async def _echo(reader, writer):
    while data := await reader.read(1000):
        writer.write(data.upper())
    writer.close()


def test_a_forwarded_socket_reaches_the_hosts_one_and_vanishes_afterwards(sshd, home, tmp_path):
    async def work(remote):
        server = await asyncio.start_unix_server(_echo, str(tmp_path / "agent.sock"))
        async with server, remote.forward_socket(str(tmp_path / "agent.sock")) as local:
            assert len(local) < 60
            assert stat.S_IMODE(Path(local).parent.stat().st_mode) == 0o700
            reader, writer = await asyncio.open_unix_connection(local)
            writer.write(b"hello")
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
        return answer, Path(local).parent.exists()

    assert with_remote(sshd, home, work) == (b"HELLO", False)


def test_forwarding_to_a_socket_nobody_serves_is_an_error_at_once(sshd, home, tmp_path):
    async def work(remote):
        with pytest.raises(ConnectError, match="there is no socket"):
            async with remote.forward_socket(str(tmp_path / "none")):
                pass

    with_remote(sshd, home, work)


def test_cancelling_a_command_ends_it_on_the_host(sshd, home):
    async def work(remote):
        running = asyncio.create_task(remote.run(Command(("sleep", "60"))))
        while len(sshd.children) < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(60):
            await sshd.children[-1].wait()
        return await remote.run(Command(("echo", "still here")))

    assert with_remote(sshd, home, work).is_ok


def test_a_frozen_link_is_noticed_and_the_outcome_is_unknown(sshd, home):
    """D7: no packet comes and none is refused; only keepalives can tell."""
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)

    async def through(reader, writer):
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", sshd.port)
        writers.extend((writer, up_writer))
        pipes.add(asyncio.create_task(pipe(reader, up_writer)))
        pipes.add(asyncio.create_task(pipe(up_reader, writer)))

    async def main():
        async with sshd.running():
            proxy = await asyncio.start_server(through, "127.0.0.1", 0)
            port = proxy.sockets[0].getsockname()[1]
            entry = home.entry(sshd, port=port)
            known = f"[127.0.0.1]:{port} {sshd.host_key.export_public_key().decode()}"
            (home.ssh / "known_hosts").write_text(known)
            async with proxy, open_fleet([entry], home.settings(keepalive_s=0.2)) as fleet:
                remote = await fleet.reach("h1")
                running = asyncio.create_task(remote.run(Command(("sleep", "60"))))
                while len(sshd.children) < 2:
                    await asyncio.sleep(0.01)
                for task in pipes:
                    task.cancel()
                try:
                    async with asyncio.timeout(60):
                        await running
                finally:
                    for writer in writers:
                        writer.transport.abort()

    writers: list[asyncio.StreamWriter] = []
    with pytest.raises(UnknownOutcomeError, match="connection was lost"):
        asyncio.run(main())
