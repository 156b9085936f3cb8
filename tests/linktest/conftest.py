"""Two hosts that are this machine, and two that are network namespaces joined by a cable."""

import os
import secrets
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from dynctl.core.command import Command
from dynctl.core.hardware import Host
from dynctl.linktest.pair import Ports, Seat
from dynctl.linktest.run import Pace
from dynctl.remote.local import LocalRemote

SHORT = Pace(0.1, 0.5, ((1 << 16, 1), (1 << 20, 1), (1 << 20, 2)))
FIRST_PORT = 20000 + os.getpid() % 5000
"""Ports below the kernel's own range; different for test runs at the same time."""


class Namespace(LocalRemote):
    """This machine's programs in another network namespace."""

    def __init__(self, name, namespace):
        super().__init__(name)
        self.namespace = namespace

    async def _spawn(self, command):
        argv = ("ip", "netns", "exec", self.namespace, *command.argv)
        return await super()._spawn(Command(argv, command.env, command.stdin, command.timeout_s))


def seat(name, address, remote=None, python=sys.executable, **more):
    host = Host(name, "local", address, python=sys.executable, machine_id=f"id-{name}")
    return Seat(host, remote or LocalRemote(name), python, **more)


@pytest.fixture
def short():
    return SHORT


@pytest.fixture
def make_seat():
    return seat


@pytest.fixture
def ports():
    return Ports(FIRST_PORT, FIRST_PORT + 199)


@pytest.fixture
def two_seats():
    return {"a": seat("a", "127.0.0.1"), "b": seat("b", "127.0.0.2")}


@dataclass
class Cable:
    """Two namespaces with one veth pair between them."""

    a: str
    b: str
    address_a: str = "10.99.1.1"
    address_b: str = "10.99.1.2"

    run = staticmethod(lambda *words: run(*words))

    def shape(self, namespace, *words):
        """Replace the queueing discipline at one end, e.g. `tbf rate 200mbit …`."""
        run("tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *words)

    def seats(self):
        return {
            "a": seat("a", self.address_a, Namespace("a", self.a)),
            "b": seat("b", self.address_b, Namespace("b", self.b)),
        }


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def _cable():
    mark = secrets.token_hex(3)
    made = Cable(f"dynlink-{mark}-a", f"dynlink-{mark}-b")
    try:
        for namespace in (made.a, made.b):
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        peer = ("peer", "name", "eth0", "netns", made.b)
        run("ip", "-n", made.a, "link", "add", "eth0", "type", "veth", *peer)
        for namespace, address in ((made.a, made.address_a), (made.b, made.address_b)):
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
        yield made
    finally:
        for namespace in (made.a, made.b):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


@pytest.fixture
def cable():
    if os.geteuid() != 0 or not shutil.which("tc"):
        pytest.skip("network namespaces need root, and tc")
    with _cable() as made:
        yield made
