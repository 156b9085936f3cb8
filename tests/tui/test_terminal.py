"""`dynctl top --replay` in a real terminal: sizes, colours, keys, and that the terminal is as before when it ends."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from dynctl.core.workload import Slo
from dynctl.telemetry.recorder import Recorder

LIMIT_S = 60.0
COLOUR = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|38|9[0-7])[0-9;]*m")


@pytest.fixture
def path(tmp_path, snapshots):
    """A recording of half a minute."""
    now = [0.0]
    with Recorder(
        tmp_path / "r.jsonl.gz", 2**30, "prod", {"chat": Slo(500.0)}, lambda: now[0]
    ) as it:
        for tick in range(1, 31):
            it.take(snapshots(tick))
            now[0] += 1.0
    return tmp_path / "r.jsonl.gz"  # fmt: skip


class Terminal:
    """A program in a terminal of a size, and everything it wrote there."""

    def __init__(self, args, size, env):
        self.main, program = pty.openpty()
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(program)
        inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynctl", *args], stdin=program, stdout=program, stderr=program,
            env={**inherited, "TERM": "xterm-256color", "COLORTERM": "", **env}, start_new_session=True,
        )  # fmt: skip
        self.program = program
        self.written = b""

    def read(self):
        if select.select([self.main], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                self.written += os.read(self.main, 65536)

    def until(self, wanted):
        """Read until a text was written since the last one that was waited for."""
        deadline_s = time.monotonic() + LIMIT_S
        while wanted.encode() not in self.written:
            assert time.monotonic() < deadline_s, self.written[-2000:]
            assert self.process.poll() is None, self.written[-2000:]
            self.read()
        found, self.written = self.written, b""
        return found

    def press(self, keys):
        os.write(self.main, keys.encode())

    def ended(self):
        deadline_s = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.read()
        return self.process.wait(0)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.main)
        os.close(self.program)


@pytest.fixture
def terminal():
    """Start programs in terminals."""
    with contextlib.ExitStack() as stack:

        def start(*args, size=(80, 24), **env):
            made = Terminal(args, size, env)
            stack.callback(made.close)
            return made

        yield start


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_a_replay_plays_takes_keys_and_leaves_the_terminal_as_it_was(path, terminal, size):
    it = terminal("top", "--replay", str(path), "--speed", "16", size=size)

    first = it.until("chat-prefill-0")
    assert COLOUR.search(first)
    it.until("■ end")
    it.press("2")
    it.until("verdict")
    it.press("q")
    assert it.ended() == 0
    assert termios.tcgetattr(it.program) == it.before
    assert b"\x1b[?1049l" in it.written


def test_no_color_is_followed(path, terminal):
    it = terminal("top", "--replay", str(path), "--at", "+20", NO_COLOR="1")

    assert not COLOUR.search(it.until("chat-prefill-0"))
    it.press("q")
    assert it.ended() == 0


def test_without_a_terminal_at_the_output_it_says_what_prints(path):
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", "top", "--replay", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "-o jsonl all of them" in done.stderr
    assert done.stdout == ""
