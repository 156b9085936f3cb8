"""The spine over OpenSSH without root or systemd: hosts on loopback addresses of this machine."""

import os
import signal
import urllib.error
from collections.abc import Callable
from contextlib import suppress

import pytest
from hostlab.lab import wait_until
from hostlab.loopback import Loopback, complete, units

pytestmark = [pytest.mark.lab, pytest.mark.sshd, pytest.mark.timeout(600)]

SIM = {"decode-ms": "2", "prefill-base-ms": "1", "prefill-us-per-token": "10"}


def test_up_serves_survives_a_kill_and_comes_down_clean(
    loopback: Callable[..., Loopback], free_ports: Callable[..., int]
) -> None:
    port = free_ports()
    hosts = loopback("one", "two", gpus={"one": "l40s-pair"})
    deployment = {
        "name": "chat",
        "model": "sim-model",
        "engine": {"kind": "sim", "args": SIM},
        "pools": [
            {"role": "prefill", "replicas": 1, "hosts": ["one"]},
            {"role": "decode", "replicas": 1, "hosts": ["two"]},
        ],
        "router": {"listen": f"127.0.0.1:{port}", "host": "two"},
    }
    # Hosts that share a machine differ in the addresses their relays and side channels bind.
    data = {name: {"data_address": hosts[name].address} for name in hosts.hosts}
    # Not the usual base: another cluster of this machine may be using it.
    ports = {"base": free_ports(40), "count": 40}
    hosts.write_inventory([deployment], hosts=data, ports=ports)
    done = hosts.dynctl("up", "--yes")
    assert done.returncode == 0, done.stderr
    try:
        first = complete(port, "What is a host? " * 30)
        assert first["choices"][0]["text"]
        again = hosts.dynctl("up", "--yes")
        assert "no changes" in again.stdout + again.stderr
        before = units(hosts)["chat-decode-0"]
        os.kill(before["pid"], signal.SIGKILL)

        def is_back() -> bool:
            unit = units(hosts)["chat-decode-0"]
            return unit["state"] == "ready" and unit["incarnation"] != before["incarnation"]

        def is_used() -> bool:
            # The router hears of it a moment after the agent.
            with suppress(urllib.error.HTTPError):
                return complete(port, "What is a host? " * 30)["choices"] == first["choices"]
            return False

        wait_until(is_back, "the killed engine is ready again")
        wait_until(is_used, "the engine gives the same text again")
    finally:
        down = hosts.dynctl("down", "--yes")
    assert down.returncode == 0, down.stderr
    for host in hosts.hosts.values():
        wait_until(lambda h=host: h.processes() == {}, "what was asked over SSH has ended")
        assert sorted(p.name for p in host.home.iterdir()) == []
