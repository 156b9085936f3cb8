"""All probes in one round trip through a real shell: alone in failure, bounded in time, nothing left behind."""

import asyncio
import os
import subprocess

import pytest

from dynctl.core.command import Completed
from dynctl.discovery import script
from dynctl.discovery.probe import TIMEOUT_STATUS, Probe
from dynctl.errors import ProbeError
from dynctl.remote.local import LocalRemote

MARK = "0123456789abcdef0123456789abcdef"


def probe(text):
    return Probe(text, lambda done: done.stdout)


def run(probes, env=None, monkeypatch=None, limit_s=None):
    if limit_s is not None:
        monkeypatch.setattr(script, "PROBE_LIMIT_S", limit_s)
    command = script.build(probes, MARK, env or {})
    return asyncio.run(LocalRemote().run(command))


@pytest.fixture(autouse=True)
def shm(monkeypatch, tmp_path):
    """Stands for /dev/shm, so that what is left behind can be seen."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(script, "_PROLOGUE", script._PROLOGUE.replace("/dev/shm", str(place)))
    yield place
    assert list(place.iterdir()) == []


def test_each_probe_gets_its_own_output_status_and_stderr():
    done = run({"a": probe("echo one; echo bad >&2; exit 3"), "b": probe("printf 'no newline'")})

    parts = script.split(done, MARK)

    assert (parts["a"].stdout, parts["a"].stderr, parts["a"].exit_status) == (b"one\n", b"bad\n", 3)
    assert (parts["b"].stdout, parts["b"].exit_status) == (b"no newline", 0)


def test_quotes_and_data_from_the_inventory_are_never_code():
    done = run({"a": probe("""echo "it's $WORD" '$WORD'""")}, {"WORD": "$(touch /tmp/pwned) `x` '"})

    assert script.split(done, MARK)["a"].stdout == b"it's $(touch /tmp/pwned) `x` ' $WORD\n"


def test_probes_run_at_once_and_a_hanging_one_is_stopped_alone(monkeypatch):
    probes = {"slow": probe("echo begun; sleep 600"), "quick": probe("echo here")}

    done = run(probes, monkeypatch=monkeypatch, limit_s=4)

    parts = script.split(done, MARK)
    assert parts["slow"].exit_status == TIMEOUT_STATUS
    assert parts["slow"].stdout == b"begun\n"
    assert parts["quick"].stdout == b"here\n"


def test_without_the_timeout_command_the_limit_still_holds(monkeypatch, tmp_path):
    for tool in ("sh", "sleep", "mktemp", "rm", "mv", "head", "cat", "id"):
        found = subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True, check=True)
        (tmp_path / tool).symlink_to(found.stdout.decode().strip())
    monkeypatch.setattr(script, "_PROLOGUE", script._PROLOGUE.replace("PATH=$PATH:", "#"))

    probes = {"slow": probe("sleep 600"), "quick": probe("echo here")}
    done = run(probes, {"PATH": str(tmp_path)}, monkeypatch, limit_s=4)

    parts = script.split(done, MARK)
    assert parts["slow"].exit_status == TIMEOUT_STATUS
    assert parts["quick"].stdout == b"here\n"


def test_a_flood_is_cut(monkeypatch):
    monkeypatch.setattr(script, "MAX_OUT_BYTES", 1000)

    done = run({"a": probe("yes | head -c 100000"), "b": probe("echo here")})

    parts = script.split(done, MARK)
    assert len(parts["a"].stdout) == 1000
    assert parts["b"].stdout == b"here\n"


def test_noise_of_a_login_shell_is_dropped():
    done = run({"a": probe("echo fact")})
    noisy = Completed(done.command, 0, b"Welcome!\nfortune\n" + done.stdout + b"\nbye\n", b"")

    assert script.split(noisy, MARK)["a"].stdout == b"fact\n"


@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_a_cut_answer_is_an_error_not_half_an_answer(keep):
    done = run({"a": probe("echo fact"), "b": probe("seq 1 200")})
    cut = Completed(done.command, 0, done.stdout[: int(len(done.stdout) * keep)], b"lost")

    with pytest.raises(ProbeError, match=r"ended early.*lost"):
        script.split(cut, MARK)


def test_a_host_without_a_writable_directory_says_so(monkeypatch):
    monkeypatch.setattr(script, "_PROLOGUE", script._PROLOGUE.replace("mktemp -d", "false"))

    done = run({"a": probe("echo fact")}, {"TMPDIR": "/nowhere"})

    with pytest.raises(ProbeError, match="no directory can be written"):
        script.split(done, MARK)


def test_a_lost_reader_leaves_no_directory(shm):
    command = script.build({"a": probe("seq 1 100000")}, MARK, {})
    read_end, write_end = os.pipe()
    os.close(read_end)

    subprocess.run(
        command.argv, input=command.stdin, stdout=write_end, stderr=subprocess.DEVNULL, timeout=60, check=False
    )  # fmt: skip

    os.close(write_end)

    assert list(shm.iterdir()) == []
