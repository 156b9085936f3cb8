import contextlib
import os
import random
import shutil
import signal
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.command import Command
from dynctl.errors import CommandError
from dynctl.remote.shell import MarkedLines, as_signal, between, end_session, quote, wrap

NONCE = "0123abcd"


def through(shell: str, command: Command, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the line as sshd does: as the one argument of the user's login shell."""
    return subprocess.run(
        [shell, "-c", wrap(command, NONCE)], input=stdin, capture_output=True, check=False
    )


def test_output_status_and_stdin_pass_through_a_shell():
    done = through(
        "sh", Command(("sh", "-c", "cat; echo err >&2; exit 7"), env=(("A", "1"),)), b"in"
    )

    out, err = between(done.stdout, NONCE), between(done.stderr, NONCE)
    assert (out.content, out.exit_status) == (b"in", 7)
    assert err.content == b"err\n"
    assert done.returncode == 7


HOSTILE = [
    "", " ", "a b", "'", '"', "''", "\\", "\\'", "$HOME", "$(touch canary)", "`touch canary`", "; touch canary",
    "&& touch canary", "| touch canary", "> canary", "\n touch canary\n", "!!", "!1", "~", "~root", "*", "?", "[a]",
    "{a,b}", "#x", "-n", "--", "=x", "a=b", "%s", "%b", "\\0101", "\t", "\r\n", "é", "\u202e", "\x7f", "\x01", "\udcff",
    "if", "exec", "$'x'", "\\\n", "(", ")", "<(x)", "^x^y", "@", "\x1b[31m", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "csh", "fish", "busybox"])
def test_five_thousand_hostile_words_arrive_unchanged_and_run_nothing(shell, tmp_path):
    """S6: every text is one argument of the program, under whichever login shell the host has."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    rng = random.Random(5)
    alphabet = "".join(HOSTILE)
    words = HOSTILE + [
        "".join(rng.choices(alphabet, k=rng.randrange(1, 12))) for _ in range(5000 - len(HOSTILE))
    ]
    argv = [shell, "sh"] if shell == "busybox" else [shell]
    for start in range(0, len(words), 250):
        part = [w for w in words[start : start + 250] if len(w) < 200]
        command = Command(("printf", "%s\\0", *part), env=(("V", part[0]),))
        done = subprocess.run(
            [*argv, "-c", wrap(command, NONCE)], capture_output=True, check=False, cwd=tmp_path
        )
        got = between(done.stdout, NONCE).content.split(b"\0")[:-1]
        assert got == [w.encode("utf-8", "surrogateescape") for w in part]
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(
            st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30
        ),
        max_size=6,
    ),
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30),
)
def test_any_argv_and_environment_survive_a_real_sh(words, value):
    done = through(
        "sh", Command(("sh", "-c", 'printf "%s\\0" "$V" "$@"', "sh", *words), (("V", value),))
    )

    got = between(done.stdout, NONCE).content.split(b"\0")[:-1]
    assert got == [w.encode() for w in (value, *words)]


@pytest.mark.parametrize("program", ["exit", "if", "A=1", "-x", "cd", ":", "eval"])
def test_a_program_named_like_a_shell_word_is_only_looked_up_as_a_program(program):
    done = through("sh", Command((program, "3")))

    assert between(done.stdout, NONCE).exit_status in (1, 2, 126, 127)


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "somebody else's"])
def test_a_session_is_ended_only_when_it_runs_the_command_that_is_meant(is_ours, until):
    command = Command(("sh", "-c", "echo up; exec sleep 600"))
    line = wrap(command, NONCE)
    with subprocess.Popen(
        ["sh", "-c", line], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        marks = MarkedLines(NONCE)
        until(lambda: marks.feed(leader.stdout.readline()), "the command runs")
        assert marks.session == leader.pid

        try:
            subprocess.run(
                end_session(marks.session, NONCE if is_ours else "other").argv, check=True
            )
            if is_ours:
                until(lambda: leader.poll() is not None, "the command ends")
            else:
                assert leader.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)


@pytest.fixture
def shared_session():
    """A server that gives its commands no session of their own, with another command beside the one that is meant."""
    script = 'sleep 600 & echo $!; sh -c "$1" & wait'
    argv = ["sh", "-c", script, "sh", wrap(Command(("sh", "-c", "echo up; exec sleep 600")), NONCE)]
    with subprocess.Popen(
        ["sh", "-c", 'read -r line; eval "$line"'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as server:
        try:
            server.stdin.write((" ".join(quote(word) for word in argv) + "\n").encode())
            server.stdin.close()
            yield server, int(server.stdout.readline())
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def test_a_session_that_commands_share_is_left_alone(shared_session, runs, until):
    server, beside = shared_session
    marks = MarkedLines(NONCE)
    until(lambda: marks.feed(server.stdout.readline()), "the command runs")
    assert marks.session == server.pid

    subprocess.run(end_session(marks.session, NONCE).argv, check=True)

    assert runs(beside)
    assert server.poll() is None


def test_a_host_with_timeout_ends_what_ignores_signals_where_commands_share_a_session():
    script = "trap '' TERM; sh -c 'trap \"\" TERM; sleep 600' & wait; sleep 600"
    line = wrap(Command(("sh", "-c", script)), NONCE, limit_s=1)

    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)

    marked = between(done.stdout, NONCE)
    assert as_signal(marked.exit_status) == -9, done


@pytest.mark.parametrize("program", ["nothing-here", "/nothing/here", "no thing'; here", "-x"])
def test_a_program_that_is_missing_is_told_in_plain_words_under_a_limit(program):
    line = wrap(Command((program, "word")), NONCE, limit_s=60)
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)

    told = between(done.stderr, NONCE)
    assert (told.content, told.exit_status) == (f"{program}: not found\n".encode(), 127)


def test_a_limit_changes_no_status_of_what_ends_before_it():
    for script, status in (("exit 7", 7), ("kill -TERM $$", -15), ("exec nothing-here", 127)):
        line = wrap(Command(("sh", "-c", script)), NONCE, limit_s=60)
        done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
        assert as_signal(between(done.stdout, NONCE).exit_status) == status


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "fish"])
def test_what_a_command_left_behind_is_ended_once_its_shell_is_gone(shell, until, ended):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    script = "sleep 600 >/dev/null 2>&1 & echo $!"
    done = subprocess.run(
        [shell, "-c", wrap(Command(("sh", "-c", script)), NONCE)],
        capture_output=True,
        check=True,
        start_new_session=True,
    )
    marked = between(done.stdout, NONCE)

    subprocess.run(end_session(marked.session, NONCE).argv, check=True)

    ended(int(marked.content))


def test_a_session_behind_a_forced_command_is_known_by_its_environment(until):
    line = wrap(Command(("sh", "-c", "echo up; exec sleep 600")), NONCE)
    forced = 'sh -c "$SSH_ORIGINAL_COMMAND"; exit $?'
    with subprocess.Popen(
        ["sh", "-c", forced],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"SSH_ORIGINAL_COMMAND": line},
    ) as leader:
        marks = MarkedLines(NONCE)
        try:
            until(lambda: marks.feed(leader.stdout.readline()), "the command runs")
            subprocess.run(end_session(marks.session, NONCE).argv, check=True)
            until(lambda: leader.poll() is not None, "the command ends")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)


def test_noise_before_and_after_is_left_out():
    marked = f"motd\nno end of linedynctl-{NONCE}-begin 7\npayload\n\ndynctl-{NONCE}-end 0\nbye\n"

    found = between(marked.encode(), NONCE)

    assert (found.content, found.exit_status) == (b"payload\n", 0)
    assert (found.noise, found.session) == (b"motd\nno end of line", 7)


def test_a_shell_that_never_ran_the_command_shows():
    found = between(b"This account is currently not available.\n", NONCE)

    assert not found.has_begun
    assert found.noise.startswith(b"This account")


def test_output_cut_before_the_last_mark_has_no_status():
    assert between(f"dynctl-{NONCE}-begin 7\nhalf".encode(), NONCE).exit_status is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b"a", b"bc", b"dynctl-", b" "]), max_size=8),
    st.booleans(),
    st.integers(1, 9),
)
def test_streamed_lines_equal_the_whole_output_for_any_split(lines, has_last_newline, step):
    payload = b"\n".join(lines) + (b"\n" if has_last_newline else b"")
    raw = b"noise " + f"dynctl-{NONCE}-begin 7\n".encode() + payload
    raw += f"\ndynctl-{NONCE}-end 3\ntrailer\n".encode()
    stream = MarkedLines(NONCE)

    got = [line for i in range(0, len(raw), step) for line in stream.feed(raw[i : i + step])]

    assert got == payload.splitlines()
    assert stream.exit_status == 3


def test_a_line_is_given_as_soon_as_it_is_complete():
    stream = MarkedLines(NONCE)
    stream.feed(f"dynctl-{NONCE}-begin 7\n".encode())

    assert stream.feed(b"first\nsec") == [b"first"]


def test_a_command_too_long_for_a_line_is_refused():
    with pytest.raises(CommandError, match="longer than a host accepts"):
        wrap(Command(("echo", "x" * 130_000)), NONCE)


def test_shell_statuses_of_signals_are_turned_into_negative_ones():
    assert [as_signal(s) for s in (0, 1, 127, 128, 137, 143, 255)] == [0, 1, 127, 128, -9, -15, 255]
