"""Simulated engines and a router before them, as processes; their CPU time and memory from /proc.

Only a router's own process tree counts, so work of others on the machine does little harm.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import relayed
import rivals

HERE = Path(__file__).parent
PEERS = HERE / "peers"
NUM_ENGINES = 4
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def free_run(number):
    """The first of some ports in a row."""
    while True:
        first = free_ports(1)[0]
        try:
            for port in range(first, first + number):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


@contextmanager
def running(command, log, env=None):
    with Path(log).open("ab") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=PEERS,
            env=os.environ | ENVIRONMENT | (env or {}),
        )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(6)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tree(pid):
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        try:
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_s(*pids):
    """User and system time of process trees."""
    ticks = 0
    for one in [one for pid in pids for one in tree(pid)]:
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_HZ


def rss_mb(*pids):
    total = 0
    for one in [one for pid in pids for one in tree(pid)]:
        status = Path(f"/proc/{one}/status").read_text()
        total += int(re.search(r"VmRSS:\s+(\d+)", status)[1])
    return total / 1024


def load(*args):
    """Run the load generator; its figures."""
    done = subprocess.run(
        [sys.executable, "loadgen.py", *map(str, args)],
        cwd=PEERS,
        capture_output=True,
        timeout=400,
        check=True,
    )
    return json.loads(done.stdout)


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read()


def wait_up(port, limit_s=60):
    """Wait until a request is served."""
    body = json.dumps(
        {"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "w1"}]}
    ).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    until_s = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.2)


@dataclass(frozen=True)
class Contender:
    """A router in one configuration."""

    name: str
    kind: str
    """`dynctl`, `relayed` (behind a relay), `bare`, or a rival's name."""
    policy: str = ""
    flags: tuple[str, ...] = ()
    num_processes: int = 1
    """Started on one port; of `bare`, which has no flag for that."""


@dataclass(frozen=True)
class Up:
    """A router that serves."""

    port: int
    pids: tuple[int, ...]
    """Of the router; with a relay, of both."""
    engine_ports: tuple[int, ...]
    """Where its engines tell what they have counted."""

    def stats(self, query=""):
        return [json.loads(get(port, f"/stats{query}")) for port in self.engine_ports]


class Stand:
    """Engines of one mode, and the routers before them."""

    def __init__(self, folder, rivals_folder, mode, engine_flags=()):
        self.folder, self.rivals_folder = folder, rivals_folder
        self.mode, self.engine_flags = mode, engine_flags
        self.model = f"{folder}/model"
        first, first_kv = free_run(NUM_ENGINES), free_run(NUM_ENGINES)
        self.engine_ports = tuple(range(first, first + NUM_ENGINES))
        self.kv_ports = tuple(range(first_kv, first_kv + NUM_ENGINES))
        self.log = f"{folder}/log"

    @contextmanager
    def engines(self):
        command = [sys.executable, "mock_engine.py", "--port", self.engine_ports[0]]
        command += ["--workers", NUM_ENGINES, "--mode", self.mode, "--kv-port", self.kv_ports[0]]
        command += ["--model-path", self.model, *self.engine_flags]
        with running(command, self.log) as pid:
            wait_up(self.engine_ports[0])
            yield pid

    @contextmanager
    def router(self, contender):
        """Start a router and wait until it serves."""
        with ExitStack() as stack:
            port = free_run(2)
            engine_ports, env, more_pids = self.engine_ports, {}, ()
            if contender.kind == "relayed":
                relay_pid, relay_port = self._relay(stack)
                more_pids = (relay_pid,)
                place = (self.folder, port, relay_port)
                command = relayed.router_command(*place, contender.policy, self.model)
            elif contender.kind == "dynamo":
                env = {"DYN_FILE_KV": tempfile.mkdtemp(dir=self.folder), "DYN_LOG": "warn"}
                engine_ports = self._dynamo_workers(stack, env)
                command = rivals.dynamo_frontend(self.rivals_folder, contender.policy, port)
            else:
                command = self._command(contender, port)
            log = f"{self.folder}/{contender.name.replace(' ', '-')}.log"
            pid = stack.enter_context(running(command, log, env))
            try:
                wait_up(port)
                up = Up(port, (pid, *more_pids), engine_ports)
                if contender.kind == "dynamo":
                    self._wait_for_workers(up)
                for _ in range(contender.num_processes - 1):
                    up = replace(up, pids=(*up.pids, stack.enter_context(running(command, log))))
            except OSError:
                print(Path(log).read_text()[-2000:])
                raise
            time.sleep(1.0)
            yield up

    def _command(self, contender, port):
        if contender.kind == "bare":
            return [sys.executable, HERE / "bare.py", port, *self.engine_ports]
        if contender.kind != "dynctl":
            where = (self.engine_ports, self.kv_ports)
            return rivals.command(
                self.rivals_folder, contender.kind, contender.policy, port, *where
            )
        command = [sys.executable, "-m", "dynctl", "route", "--listen", f"127.0.0.1:{port}"]
        for engine_port, kv_port in zip(self.engine_ports, self.kv_ports, strict=True):
            events = f"kv-events=tcp://127.0.0.1:{kv_port}"
            command += ["--engine", f"http://127.0.0.1:{engine_port},{events}"]
        return [*command, "--policy", contender.policy, "--tokenizer", self.model, *contender.flags]

    def _relay(self, stack):
        [port] = free_ports(1)
        relayed.certificates(self.folder)
        # A path of its own: those of Unix sockets are short.
        agent_socket = f"{stack.enter_context(tempfile.TemporaryDirectory(dir='/tmp'))}/agent"
        told = relayed.agent_told(agent_socket, self.engine_ports, self.kv_ports)
        stack.enter_context(told)
        command = relayed.relay_command(self.folder, port, agent_socket)
        return stack.enter_context(running(command, f"{self.folder}/relay.log")), port

    def _dynamo_workers(self, stack, env):
        first = free_run(NUM_ENGINES)
        ports = tuple(range(first, first + NUM_ENGINES))
        flags = ["--zero"] if self.mode == "zero" else self.engine_flags
        for number, port in enumerate(ports):
            command = rivals.dynamo_worker(
                self.rivals_folder, number, self.model, ["--stats-port", port, *flags]
            )
            stack.enter_context(running(command, f"{self.folder}/dynamo-worker.log", env))
        return ports

    def _wait_for_workers(self, up):
        """Every worker must have been seen before anything is measured."""
        until_s = time.monotonic() + 60
        while True:
            try:
                up.stats()
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.3)
                continue
            time.sleep(2.5)
            return
