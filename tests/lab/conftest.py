"""Fixtures of the lab. Tests that need root or real engines are left out where they cannot run, in one line.

`--import-mode=importlib` adds nothing to sys.path, so the lab's own package is made importable here.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hostlab import rootfs
from hostlab.engine_env import ENGINE_ENV
from hostlab.lab import HostSpec, Lab
from hostlab.loopback import Loopback, why_no_sshd

_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Name the lab's own marker."""
    config.addinivalue_line("markers", "sshd: needs OpenSSH's sshd on this machine, not root")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what cannot run here, and remember why for one line per reason."""
    reasons = {
        "root": rootfs.why_impossible(),
        "vllm": None if os.environ.get(ENGINE_ENV) else "run make lab-vllm for those",
        "sshd": why_no_sshd(),
    }
    kept: list[pytest.Item] = []
    out: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = [m for m, why in reasons.items() if why and item.get_closest_marker(m)]
        # The vllm mark decides first: such a test needs root as well.
        mark = "vllm" if "vllm" in marks else next(iter(marks), None)
        (kept if mark is None else out.setdefault(mark, [])).append(item)
    if out:
        config.hook.pytest_deselected(items=[item for group in out.values() for item in group])
    items[:] = kept
    config.stash[_LEFT_OUT] = [
        f"left out: {len(group)} tests marked {mark!r} ({reasons[mark]})"
        for mark, group in out.items()
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left out, last, where it is read."""
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Boot labs that live until the module's last test."""
    with ExitStack() as stack:
        yield lambda *specs: stack.enter_context(Lab(specs))


@pytest.fixture(scope="module")
def lab3(make_lab: Callable[..., Lab]) -> Lab:
    """Two HGX H100 with eight fake GPUs each, and one host without GPUs."""
    return make_lab(
        HostSpec("gpu-1", gpus="hgx-h100"), HostSpec("gpu-2", gpus="hgx-h100"), HostSpec("head")
    )


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Callable[..., Loopback]]:
    """Start sshd hosts on loopback addresses, without root or systemd."""
    with ExitStack() as stack:
        yield lambda *names, **more: stack.enter_context(Loopback(names, tmp_path, **more))
