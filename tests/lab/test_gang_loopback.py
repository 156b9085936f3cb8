"""An engine over two hosts, by the command line: it serves, dies and comes back as one, and goes down clean."""

import os
import signal
import urllib.error
from collections.abc import Callable
from contextlib import suppress

import pytest
from hostlab.lab import wait_until
from hostlab.loopback import Loopback, complete, units

pytestmark = [pytest.mark.lab, pytest.mark.sshd, pytest.mark.timeout(600)]

ENGINE, MEMBER = "chat-aggregated-0", "chat-aggregated-0.1"

PROMPT = "What is a gang? "


def test_an_engine_over_two_hosts_lives_and_dies_as_one(
    loopback: Callable[..., Loopback], free_ports: Callable[..., int]
) -> None:
    port = free_ports()
    hosts = loopback("one", "two")
    deployment = {
        "name": "chat",
        "model": "sim-model",
        "engine": "sim",
        "pools": [{"role": "aggregated", "pp": 2, "nodes": 2}],
        "router": {"listen": f"127.0.0.1:{port}", "host": "two"},
    }
    data = {name: {"data_address": hosts[name].address} for name in hosts.hosts}
    hosts.write_inventory([deployment], hosts=data, ports={"base": free_ports(40), "count": 40})
    done = hosts.dynctl("up", "--yes")
    assert done.returncode == 0, done.stderr
    try:
        first = complete(port, PROMPT)["choices"]
        before = units(hosts)
        assert (before[ENGINE]["kind"], before[MEMBER]["kind"]) == ("engine", "member")
        assert before[MEMBER]["incarnation"] == f"{before[ENGINE]['incarnation']}.1"
        again = hosts.dynctl("up", "--yes")
        assert "no changes" in again.stdout + again.stderr

        os.kill(before[MEMBER]["pid"], signal.SIGKILL)

        def is_back() -> bool:
            now = units(hosts)
            return {now[name]["state"] for name in (ENGINE, MEMBER)} == {"ready"} and (
                now[ENGINE]["incarnation"] != before[ENGINE]["incarnation"]
            )

        def is_used() -> bool:
            with suppress(urllib.error.HTTPError):
                return complete(port, PROMPT)["choices"] == first
            return False

        wait_until(is_back, "all of it started again", 120)
        wait_until(is_used, "its router uses it", 60)
        now = units(hosts)
        assert now[ENGINE]["pid"] != before[ENGINE]["pid"]
        assert now[MEMBER]["incarnation"] == f"{now[ENGINE]['incarnation']}.1"
        assert f"{MEMBER} on two ended" in now[ENGINE]["last_error"]
        logs = hosts.dynctl("logs", MEMBER, "--tail", "3")
        assert "node 1 of 2" in logs.stdout

        # By the host of a part as by its own name.
        drained = hosts.dynctl("drain", "two", "--yes")
        assert drained.returncode == 0, drained.stderr
        wait_until(lambda: units(hosts)[MEMBER]["pid"] is None, "its other part ends too", 60)
        assert units(hosts)[ENGINE]["state"] == "stopped"
        assert hosts.dynctl("drain", "--undo", ENGINE, "--yes").returncode == 0
        wait_until(is_used, "it serves again", 60)
    finally:
        down = hosts.dynctl("down", "--yes")
    assert down.returncode == 0, down.stderr
