import asyncio
import hashlib
import os
import signal
import sys

import pytest

from dynctl.core.command import Command
from dynctl.errors import CommandError, ConnectError, MissingFileError, UnknownOutcomeError
from dynctl.remote.local import LocalRemote

REMOTE = LocalRemote()


def run(*argv: str, **kwargs):
    return asyncio.run(REMOTE.run(Command(argv, **kwargs)))


def test_a_command_gives_status_output_and_errors_apart():
    done = run("sh", "-c", "echo out; echo err >&2; exit 3")

    assert (done.exit_status, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_stdin_and_environment_reach_the_command_and_its_locale_is_c():
    done = run("sh", "-c", 'cat; echo "$X $LC_ALL"', stdin=b"in\n", env=(("X", "a b"),))

    assert done.stdout == b"in\na b C\n"


def test_large_stdin_to_a_command_that_ignores_it_is_no_error():
    assert run("true", stdin=b"x" * 1_000_000).is_ok


def test_a_signal_shows_as_a_negative_status():
    assert run("sh", "-c", "kill -TERM $$").exit_status == -15


def test_a_missing_program_ends_with_127_as_under_a_shell():
    done = run("no-such-program-here")

    assert done.exit_status == 127
    assert b"no-such-program-here: not found" in done.stderr


def test_a_command_over_its_time_limit_is_killed_with_its_children_and_the_outcome_is_unknown(
    tmp_path, ended
):
    pid_file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid_file}.new && mv {pid_file}.new {pid_file}; wait"
    for timeout_s in (0.5, 5, 60):  # until it got as far as to its child
        with pytest.raises(UnknownOutcomeError, match=f"within {timeout_s:g} s"):
            run("sh", "-c", script, timeout_s=timeout_s)
        if pid_file.exists():
            break

    ended(int(pid_file.read_text()))


@pytest.mark.parametrize("prefix", ["", "timeout 600 "], ids=["child", "group of its own"])
def test_what_an_exited_command_left_holding_its_output_is_killed_at_the_time_limit(
    tmp_path, ended, prefix
):
    pid_file = tmp_path / "pid"
    script = f"{prefix}sleep 600 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}"
    for timeout_s in (0.5, 5, 60):
        with pytest.raises(UnknownOutcomeError, match=f"within {timeout_s:g} s"):
            run("sh", "-c", script, timeout_s=timeout_s)
        if pid_file.exists():
            break

    ended(int(pid_file.read_text()))


def test_what_a_command_that_ended_left_running_stays(tmp_path, runs):
    """Only what still holds the output belongs to the command: else nothing could be started to stay."""
    done = run("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)

    try:
        assert runs(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_endless_output_is_stopped(monkeypatch):
    monkeypatch.setattr("dynctl.remote.local.MAX_OUTPUT_BYTES", 100_000)

    with pytest.raises(CommandError, match="more than 100000 bytes"):
        run("yes")


def test_nul_and_bad_environment_names_are_refused():
    with pytest.raises(CommandError, match="NUL"):
        run("echo", "a\0b")
    with pytest.raises(CommandError, match="no name"):
        run("echo", env=(("A;rm", "x"),))


def test_put_replaces_a_file_with_mode_and_makes_parents(tmp_path):
    target = tmp_path / "a" / "b" / "file"
    asyncio.run(REMOTE.put(str(target), b"old"))
    asyncio.run(REMOTE.put(str(target), b"new", mode=0o640))

    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert target.parent.stat().st_mode & 0o777 == 0o700
    assert [f.name for f in target.parent.iterdir()] == ["file"]


def test_put_copies_a_file_from_disk(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    asyncio.run(REMOTE.put(str(tmp_path / "copy"), source))

    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_put_on_a_full_disk_names_the_cause_and_keeps_the_old_file(tmp_path):
    """A file-size limit of the process stands for a full disk: the same write fails half-way."""
    target = tmp_path / "file"
    target.write_bytes(b"old")
    script = (
        "import asyncio, resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from dynctl.errors import CommandError\n"
        "from dynctl.remote.local import LocalRemote\n"
        "try:\n"
        "    asyncio.run(LocalRemote().put(sys.argv[1], b'x' * 5000))\n"
        "except CommandError as error:\n"
        "    print(error.message)\n"
    )
    done = run(sys.executable, "-c", script, str(target))

    assert b"File too large" in done.stdout
    assert target.read_bytes() == b"old"
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_get_reads_up_to_a_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")

    assert asyncio.run(REMOTE.get(str(file), 5)) == b"12345"
    with pytest.raises(CommandError, match="larger than 4"):
        asyncio.run(REMOTE.get(str(file), 4))
    with pytest.raises(MissingFileError, match="No such file"):
        asyncio.run(REMOTE.get(str(tmp_path / "none"), 4))


def test_lines_arrive_while_the_command_runs_and_leaving_ends_it(ended):
    async def main():
        script = "echo $$; echo b; sleep 600"
        async with REMOTE.lines(Command(("sh", "-c", script))) as lines:
            pid = int(await anext(lines))
            assert await anext(lines) == b"b"
        return pid

    ended(asyncio.run(main()))


def test_leaving_lines_ends_what_an_exited_command_left_holding_them(ended):
    async def main():
        async with REMOTE.lines(Command(("sh", "-c", "sleep 600 & echo $!"))) as lines:
            return int(await anext(lines))

    ended(asyncio.run(main()))


def test_lines_say_when_the_command_failed():
    async def main():
        command = Command(("sh", "-c", "printf 'a\\nb'; echo why >&2; exit 4"))
        async with REMOTE.lines(command) as lines:
            got = [await anext(lines), await anext(lines)]
            with pytest.raises(CommandError, match="status 4: why"):
                await anext(lines)
        return got

    assert asyncio.run(main()) == [b"a", b"b"]


def test_lines_longer_than_the_limit_come_in_pieces_and_lose_nothing():
    async def main():
        command = Command(
            (sys.executable, "-c", "print('x' * 200_000, end='\\n'); print('end', end='')")
        )
        async with REMOTE.lines(command) as lines:
            return [line async for line in lines]

    got = asyncio.run(main())
    assert b"".join(got[:-1]) == b"x" * 200_000
    assert got[-1] == b"end"


def test_forwarding_gives_a_path_only_when_somebody_listens(tmp_path):
    async def main():
        path = str(tmp_path / "s")
        with pytest.raises(ConnectError, match="nothing listens"):
            async with REMOTE.forward_socket(path):
                pass
        server = await asyncio.start_unix_server(lambda _, w: w.close(), path)
        async with server, REMOTE.forward_socket(path) as local:
            assert local == path

    asyncio.run(main())


def test_checksums_come_from_the_disk(tmp_path, monkeypatch):
    """A transfer that went wrong is noticed before the rename."""
    monkeypatch.setattr(
        "dynctl.remote.local._digest", lambda path: hashlib.sha256(b"other").digest()
    )
    with pytest.raises(CommandError, match="other bytes"):
        asyncio.run(REMOTE.put(str(tmp_path / "f"), b"x"))
    assert list(tmp_path.iterdir()) == []
