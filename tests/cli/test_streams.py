"""What becomes of a command whose terminal, pipe or files are not what it hopes for: the program itself is run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DYNCTL = [sys.executable, "-m", "dynctl"]


def dynctl(words, redirect, **env):
    """Run it in a shell that redirects what is said; return its status, and what came through."""
    script = f'"$@" {redirect}; echo "status $?" >&3'
    return subprocess.run(
        ["sh", "-c", f"exec 3>&1; {script}", "sh", *DYNCTL, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("redirect", "status"),
    [("<&-", 0), (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 1), ("2>/dev/full", 0)],
)  # fmt: skip
def test_streams_that_are_closed_or_full_end_in_no_traceback(redirect, status):
    done = dynctl(["estimate", "--list"], redirect)

    assert f"status {status}\n" in done.stdout
    assert "Traceback" not in done.stderr
    if redirect == ">/dev/full":
        assert "error: No space left on device\nhint: free some space" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_failure():
    # More than a pipe holds, so that the writer notices.
    words = ["config", "schema"]
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -c 1', "bash", *DYNCTL, *words],
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"{", b"")


def test_data_that_a_terminal_cannot_show_is_shown_as_far_as_it_can():
    done = dynctl(["estimate", "--list"], "", PYTHONIOENCODING="ascii")
    told = dynctl(["config", "schema"], "", PYTHONIOENCODING="ascii")

    assert "status 0" in done.stdout
    assert not done.stderr
    assert json.loads(told.stdout.rpartition("status")[0])


WORK = """
import asyncio, sys
from dynctl.cli import main, output

async def work():
    try:
        print("begun", flush=True)
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        print("lock given back", flush=True)

stage = output.Stage("interrupted; nothing was changed")
main.build_app = lambda _: lambda *args, **options: output.wait_for(work(), stage)
sys.exit(main.run([]))
"""


@pytest.fixture
def usual_signals():
    """What this run itself ignores, under `nohup` or in the background of a shell, its commands would ignore as well."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_asks_a_command_to_end_is_taken_as_ctrl_c(number):
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(number)
        out, err = command.communicate(timeout=60)

    assert out == "lock given back\n"
    assert err.startswith("interrupted; nothing was changed\n")
    assert command.returncode == 130


SLOW_END = WORK.replace(
    "        await asyncio.sleep(0)\n",
    """
        told = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, told.set)
        print("ending", flush=True)
        await told.wait()
        await asyncio.sleep(0)
""",
)


def slowly_ending(code):
    """A command that ends once it is told to on its standard input."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_second_signal_does_not_cut_short_what_gives_locks_back(first, second):
    with slowly_ending(SLOW_END) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(first)
        assert command.stdout.readline() == "ending\n"
        command.send_signal(second)
        told = command.stderr.readline()
        out, err = command.communicate("go on\n", timeout=60)

    assert told == "still ending, so that locks are given back; after 10 s it ends at once\n"
    assert out == "lock given back\n"
    assert err.startswith("interrupted; nothing was changed\n")
    assert command.returncode == 130


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_long_after_the_first_ends_a_command_that_hangs_while_ending():
    impatient = SLOW_END.replace("async def work", "output.INSIST_S = 0.0\n\nasync def work")
    with slowly_ending(impatient) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGTERM)
        assert command.stdout.readline() == "ending\n"
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == -signal.SIGTERM


def test_a_command_that_shall_outlive_its_terminal_does():
    with subprocess.Popen(
        ["nohup", sys.executable, "-c", WORK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout.readline() == "begun\n"
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{command.pid}/status").read_text())
        command.kill()
        command.communicate(timeout=60)

    assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1
