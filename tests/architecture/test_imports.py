"""What a fresh interpreter really loads; import contracts see the static graph only."""

import subprocess
import sys

import pytest

HEAVY = (
    "asyncssh",
    "textual",
    "rich",
    "pydantic",
    "aiohttp",
    "httpx",
    "tokenizers",
    "zmq",
    "cryptography",
    "pynvml",
)


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["up", "--help"], ["bench", "run", "--help"], ["top", "--help"]],
)
def test_help_loads_nothing_heavy(args):
    modules = loaded_by(f"from dynctl.cli.main import run; run({args!r})")

    assert modules.isdisjoint(HEAVY)


def test_what_runs_on_hosts_loads_no_controller_module():
    modules = loaded_by(
        "import dynctl.agents.__main__, dynctl.agents.relay.__main__, dynctl.router.__main__, dynctl.sim.__main__"
    )

    controller = {
        "cli",
        "tui",
        "remote",
        "inventory",
        "planner",
        "discovery",
        "deploy",
        "bench",
        "telemetry",
        "store",
    }
    assert modules.isdisjoint({f"dynctl.{name}" for name in controller})
    assert modules.isdisjoint(
        {
            "asyncssh",
            "textual",
            "rich",
            "typer",
            "yaml",
            "pydantic",
            "aiohttp",
            "httpx",
            "cryptography",
        }
    )
