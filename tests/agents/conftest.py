"""Fixtures of agent tests: a short root, a fake engine program, an agent in its own process, supervisors in this one."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynctl.agents.client import AgentClient
from dynctl.agents.host.logs import LogLimits
from dynctl.agents.host.processes import send, tagged
from dynctl.agents.lifecycle import RestartPolicy
from dynctl.agents.protocol import EngineWish, HostSlice
from dynctl.agents.root import Root
from dynctl.agents.starting import Settings
from dynctl.agents.supervisor import Supervisor
from dynctl.core.deployment import EngineState, UnitStatus

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
QUICK = Settings(
    restart=RestartPolicy(first_s=0.05, most_s=0.2),
    drain_grace_s=0.05,
    drain_limit_s=60.0,
    now_limit_s=0.3,
    watch_s=0.1,
    log=LogLimits(max_bytes=200_000),
)


@pytest.fixture
def root_path():
    """A directory with a short name, and at the end no process that was started under it."""
    path = Path(tempfile.mkdtemp(prefix="dy", dir="/tmp"))
    yield path
    send(list(tagged(str(path))), signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def no_process_left(root_path, until):
    """Fails when processes are still there after the test."""
    yield
    until(lambda: not tagged(str(root_path)), "no process of the test runs any more")


@pytest.fixture
def engine(root_path) -> Callable[..., EngineWish]:
    """Makes wishes for a `vllm` engine whose interpreter is the fake engine."""
    script = root_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE_ENGINE} "$@"\n')
    script.chmod(0o755)

    def make(engine_id: str = "e0", **fields) -> EngineWish:
        flags = fields.pop("flags", {})
        plain = {
            "id": engine_id,
            "deployment": "chat",
            "role": "aggregated",
            "kind": "vllm",
            "model": "m",
            "python": str(script),
            "device": "cpu",
            "allow_old_version": True,
            "args": tuple(flags.items()),
        }
        return EngineWish(**(plain | fields))

    return make


def host_slice(*engines: EngineWish, generation: int = 1, fence: int = 0, **fields) -> HostSlice:
    return HostSlice("lab", "h0", generation, fence, engines=engines, **fields)


async def until(supervisor: Supervisor, holds: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until something holds; fails with the status otherwise."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, supervisor.status.units
        await supervisor.wait_change(0.05)


def state(supervisor: Supervisor, unit_id: str = "e0") -> EngineState | None:
    unit = supervisor.units.get(unit_id)
    return unit.life.state if unit else None


@pytest.fixture
def supervised(root_path):
    """Runs a coroutine with a supervisor in this process; what it leaves running is the test's affair."""

    def run(body: Callable[[Supervisor], Awaitable[None]], settings: Settings = QUICK) -> None:
        async def main() -> None:
            root = Root(root_path)
            root.prepare()
            try:
                await Supervisor(root, settings=settings).run(body)
            finally:
                root.close()

        asyncio.run(main())

    return run


class AgentProcess:
    """A real agent, as deployed."""

    def __init__(self, root_path: Path) -> None:
        self.root_path = root_path
        self._log = (root_path / "agent.err").open("ab")
        env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        env |= {n: v for n, v in os.environ.items() if n in ("PYTHONPATH", "NOTIFY_SOCKET")}
        argv = [sys.executable, "-sP", "-m", "dynctl.agents", "--root", str(root_path)]
        self.process = subprocess.Popen(argv, stderr=self._log, env=env, start_new_session=True)
        deadline_s = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)

    def _answers(self) -> bool:
        where = self.root_path / "agent.socket-path"
        if not where.exists():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(where.read_text().strip()) == 0

    def log(self) -> str:
        return (self.root_path / "agent.err").read_text()

    def client(self) -> AgentClient:
        return AgentClient((self.root_path / "agent.socket-path").read_text().strip())

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._log.close()
        return code


@pytest.fixture
def agent(root_path):
    """Starts agents; ends those still running, then what they supervised."""
    started: list[AgentProcess] = []

    def start(root: Path = root_path) -> AgentProcess:
        one = AgentProcess(root)
        started.append(one)
        return one

    yield start
    for one in started:
        one.end(signal.SIGKILL)


@pytest.fixture
def remembered(root_path, until) -> Callable[..., None]:
    """`remembered(*units)`: waits until an agent has written down what it said of them; it can be killed in between."""

    def wait(*units: UnitStatus) -> None:
        told = {(unit.id, unit.state, unit.pid) for unit in units}

        def is_written() -> bool:
            kept = Root(root_path).load_memory().units
            return told <= {
                (unit.id, unit.state, unit.run.identity.pid)
                for unit in kept
                if unit.run and unit.run.identity
            }

        until(is_written, f"units.json holds {told}")

    return wait


@pytest.fixture
def tools() -> SimpleNamespace:
    """Small functions tests share."""
    return SimpleNamespace(host_slice=host_slice, until=until, state=state, QUICK=QUICK)
