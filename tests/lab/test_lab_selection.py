"""Where a test cannot run, it is left out, and one line per reason says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

REPOSITORY = Path(__file__).resolve().parents[2]


def collect(tmp_path: Path, plugin: str, *args: str) -> list[str]:
    """Collect the lab's tests in a pytest of its own, with a plugin that alters the machine it sees."""
    (tmp_path / "altered.py").write_text(plugin)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "DYNCTL"))}
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "altered"]
    done = subprocess.run(
        [*argv, "tests/lab", *args],
        cwd=REPOSITORY,
        env=env | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_plain_user_is_told_in_one_line_what_was_left_out(tmp_path: Path) -> None:
    lines = collect(tmp_path, "import os\nos.geteuid = lambda: 1000\n")
    said = [line for line in lines if "'root'" in line]
    assert len(said) == 1
    assert said[0].startswith("left out: ")
    assert said[0].endswith("(not root)")
    assert not [line for line in lines if "test_lab_hosts.py" in line]
    assert [line for line in lines if "test_lab_gpus.py" in line]


def test_real_engines_are_left_out_unless_their_environment_is_named(tmp_path: Path) -> None:
    lines = collect(tmp_path, "")
    assert [line for line in lines if "'vllm'" in line and "make lab-vllm" in line]
    assert not [line for line in lines if "test_real_engines.py::" in line]


def test_a_machine_without_sshd_is_told_so(tmp_path: Path) -> None:
    plugin = "from pathlib import Path\nreal = Path.exists\n"
    plugin += "Path.exists = lambda self, **k: str(self) != '/usr/sbin/sshd' and real(self, **k)\n"
    lines = collect(tmp_path, plugin)
    assert [line for line in lines if "'sshd'" in line and "not installed" in line]
    assert not [line for line in lines if "test_lab_loopback.py::" in line]
