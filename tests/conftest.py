"""What tests of every package share: waiting for what another process does, and ports nobody else takes."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run and no limits of time: what fails, fails everywhere and always.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

LIMIT_S = 60.0
"""Only catches hangs: also on a busy machine everything waited for happens long before."""


def _until(holds: Callable[[], object], what: str = "", limit_s: float = LIMIT_S) -> None:
    """Wait until something holds; fails with what was waited for otherwise."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what or holds}"
        time.sleep(0.01)


async def _eventually(
    holds: Callable[[], object], what: str = "", limit_s: float = LIMIT_S
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what or holds}"
        await asyncio.sleep(0.005)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not: who reaps it depends on PID 1."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _ended(pid: int) -> None:
    _until(lambda: not _runs(pid), f"process {pid} ends")


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(holds, what)` waits, without an event loop, for something to become true."""
    return _until


@pytest.fixture(scope="session")
def eventually() -> Callable[..., object]:
    """`await eventually(holds, what)` lets the event loop run until something is true."""
    return _eventually


@pytest.fixture(scope="session")
def runs() -> Callable[[int], bool]:
    """`runs(pid)`: whether a process has not ended."""
    return _runs


@pytest.fixture(scope="session")
def ended() -> Callable[[int], None]:
    """`ended(pid)` waits for a process to end. In a coroutine: `await asyncio.to_thread(ended, pid)`.

    A signal that was sent takes effect when the kernel gets to it.
    """
    return _ended


@contextlib.contextmanager
def _held_ports() -> Iterator[Callable[..., int]]:
    with contextlib.ExitStack() as held:

        def hold(count: int = 1) -> int:
            for _ in range(1000):
                first = 10_000 + secrets.randbelow(10_000)
                with contextlib.ExitStack() as tried, contextlib.suppress(OSError):
                    for port in range(first, first + count):
                        one = tried.enter_context(socket.socket())
                        one.bind(("127.0.0.1", port))
                        # Not before: two who both say so may hold the same port.
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    held.push(tried.pop_all())
                    return first
            raise AssertionError(f"no {count} free ports in a row")

        yield hold


@pytest.fixture
def free_ports() -> Iterator[Callable[..., int]]:
    """`free_ports(n)`: the first of n loopback ports in a row, for a program that is told where to listen.

    They are held without listening: nobody else is given them, and a program may still listen there, since all of
    them set SO_REUSEADDR. They lie below those the kernel takes for connections.
    """
    with _held_ports() as hold:
        yield hold


@pytest.fixture(scope="module")
def free_ports_of_module() -> Iterator[Callable[..., int]]:
    """`free_ports`, held until the module's tests are over."""
    with _held_ports() as hold:
        yield hold
