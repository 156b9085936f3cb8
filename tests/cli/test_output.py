"""What the terminal is told, and how."""

import asyncio
import io
import os
import re
import signal
import sys

import pytest

from dynctl.cli.output import Stage, ask, confirm, progress, report, table, unasked, wait_for
from dynctl.errors import DynctlError


async def interrupted(stage, text):
    stage.if_interrupted = text
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(30)


def test_names_from_hosts_in_errors_and_progress_command_no_terminal(capsys):
    hostile = "chat\x1b]52;c;ZXZpbA==\x07-0\x1b[2J\r"
    report(DynctlError(f"not ready:\n  {hostile}", f"dynctl logs {hostile}"))
    progress("here", hostile, "ready")

    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["error: not ready:", "  chat-0", "hint: dynctl logs chat-0"]
    assert said[3].endswith("chat-0 ready")


def test_ctrl_c_says_what_is_left_at_the_stage_reached(capsys):
    stage = Stage("interrupted; nothing was changed")

    with pytest.raises(KeyboardInterrupt):
        wait_for(interrupted(stage, "interrupted; go on with dynctl up"), stage)

    assert capsys.readouterr().err == "interrupted; go on with dynctl up\n"


def test_without_a_terminal_the_very_command_is_shown_that_needs_no_answer(monkeypatch):
    monkeypatch.setattr("dynctl.cli.output.is_interactive", lambda: False)
    monkeypatch.setattr("sys.argv", ["dynctl", "down", "-i", "my hosts.yaml", "-l", "gpu-01"])

    with pytest.raises(DynctlError) as refused:
        asyncio.run(confirm("stop cluster?", yes=False))

    assert refused.value.hint == "rerun: dynctl down -i 'my hosts.yaml' -l gpu-01 --yes"


@pytest.mark.parametrize(("typed", "answer"), [(b"y\n", True), (b"no\n", False), (b"", False)])
def test_a_question_takes_one_line_at_the_terminal(monkeypatch, typed, answer):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "rb+", buffering=0) as raw, io.TextIOWrapper(raw) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, typed or b"\x04")

        assert asyncio.run(ask("are these right?")) is answer

    os.close(ours)


def test_ctrl_c_ends_a_question_nobody_answers(monkeypatch, capsys):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "rb+", buffering=0) as raw, io.TextIOWrapper(raw) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)

        async def main():
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await ask("go ahead?")

        with pytest.raises(KeyboardInterrupt):
            wait_for(main())

    os.close(ours)
    assert capsys.readouterr().err == "go ahead? [y/N] \ninterrupted\n"


def test_a_command_that_needed_no_answer_is_shown_as_it_was(monkeypatch):
    monkeypatch.setattr("sys.argv", ["dynctl", "up", "other.yaml", "-y"])

    assert unasked() == "dynctl up other.yaml -y"


def test_ctrl_c_says_so_where_nothing_is_left(capsys):
    with pytest.raises(KeyboardInterrupt):
        wait_for(interrupted(Stage(), ""))

    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("columns", [20, 40, 80, 160])
def test_no_width_of_a_terminal_breaks_a_name_an_address_or_a_figure(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    table(
        ["UNIT", "UP", "NOTE"],
        [["chat-decode-0", "4.2 s", "http://127.0.0.1:8311 and some words that may be wrapped"]],
        right=["UP"],
    )

    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for whole in ("chat-decode-0", "4.2 s", "http://127.0.0.1:8311", "wrapped"):
        assert whole in drawn
