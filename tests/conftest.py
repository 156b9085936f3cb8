"""What tests of every package share: waiting for what another process does, in whatever order things are scheduled."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_S = 30.0
"""Only catches hangs: also on a busy machine everything waited for happens long before."""


def _until(holds: Callable[[], object], what: str = "", limit_s: float = LIMIT_S) -> None:
    """Wait until something holds; fails with what was waited for otherwise."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what or holds}"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not: who reaps it depends on PID 1."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _ended(pid: int) -> None:
    """Wait until a process has ended: a signal that was sent takes effect when the kernel gets to it."""
    _until(lambda: not _runs(pid), f"process {pid} ends")


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(holds, what)` waits, without an event loop, for something to become true."""
    return _until


@pytest.fixture(scope="session")
def runs() -> Callable[[int], bool]:
    """`runs(pid)`: whether a process has not ended."""
    return _runs


@pytest.fixture(scope="session")
def ended() -> Callable[[int], None]:
    """`ended(pid)` waits for a process to end. In a coroutine: `await asyncio.to_thread(ended, pid)`."""
    return _ended
