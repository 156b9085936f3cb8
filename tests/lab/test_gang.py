"""An engine over two booted hosts: what is open, and that it comes back by itself when one of them was gone."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hostlab.cluster import Cluster, fetch_wheels
from hostlab.lab import HostSpec, Lab, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.timeout(900)]

ENGINE, MEMBER = "chat-aggregated-0", "chat-aggregated-0.1"


@dataclass
class Gang:
    lab: Lab
    cluster: Cluster

    def complete(self) -> list[dict[str, Any]]:
        body = {"model": "sim-model", "prompt": "What is a gang? ", "max_tokens": 8}
        request = urllib.request.Request(
            f"http://{self.lab['head'].address}:8000/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with self.lab.inside(), urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.load(answer)["choices"])

    def gives(self, choices: list[dict[str, Any]]) -> bool:
        with suppress(urllib.error.HTTPError):
            return self.complete() == choices
        return False

    def incarnation(self) -> str:
        return str(self.cluster.units()[ENGINE]["incarnation"])


@pytest.fixture(scope="module")
def gang(make_lab: Callable[..., Lab]) -> Iterator[Gang]:
    lab = make_lab(HostSpec("one"), HostSpec("two"), HostSpec("head"))
    fetch_wheels(lab, "head")
    deployment = {
        "name": "chat",
        "model": "sim-model",
        "engine": "sim",
        "pools": [{"role": "aggregated", "pp": 2, "nodes": 2, "hosts": ["one", "two"]}],
        "router": {
            "host": "head",
            "listen": f"{lab['head'].address}:8000",
            "allow_insecure_listen": True,
        },
    }
    lab.write_inventory([deployment])
    done = lab.dynctl("up", "--yes")
    assert done.returncode == 0, done.stderr
    yield Gang(lab, Cluster(lab))
    lab.dynctl("down", "--yes", "--now")


def test_each_host_opens_its_relay_and_the_first_the_place_where_parts_meet(gang: Gang) -> None:
    plan = json.loads(gang.lab.dynctl("plan", "-o", "json").stdout)
    (pool,) = plan["deployments"][0]["pools"]
    (replica,) = pool["replicas"]
    relays = {host["name"]: host["relay_port"] for host in plan["hosts"]}
    first, (other,) = replica["host_name"], replica["others"]

    open_ports = {name: set(gang.lab.open_ports(name)) - {22} for name in ("one", "two")}

    assert open_ports[first] == {relays[first], replica["rendezvous_port"]}
    assert open_ports[other["host_name"]] == {relays[other["host_name"]]}


def test_without_a_host_the_engine_waits_and_says_for_whom_and_comes_back_with_it(
    gang: Gang,
) -> None:
    before = gang.incarnation()
    choices = gang.complete()
    two = gang.lab["two"]
    two.cut_power()

    def waits() -> bool:
        done = gang.lab.dynctl("status", "-o", "json", "--limit", "one")
        unit = next(
            unit
            for unit in json.loads(done.stdout)["hosts"]["one"]["units"]
            if unit["id"] == ENGINE
        )
        return bool(unit["seen"].startswith(f"waits for {MEMBER} on two: its host does not answer"))

    wait_until(waits, "rank 0 has ended and waits for the host", 240)
    two.power_on()
    two.wait_ready()

    wait_until(lambda: gang.gives(choices), "it serves again, told by nobody", 240)
    assert gang.incarnation() != before
    units = gang.cluster.units()
    assert units[MEMBER]["incarnation"] == f"{units[ENGINE]['incarnation']}.1"


def test_a_reboot_of_the_host_of_rank_0_starts_all_parts_anew(gang: Gang) -> None:
    before = gang.incarnation()
    choices = gang.complete()
    gang.lab["one"].reboot()

    wait_until(lambda: gang.gives(choices), "it serves again, told by nobody", 240)
    assert gang.incarnation() != before


def test_down_leaves_nothing_on_any_host(gang: Gang) -> None:
    done = gang.lab.dynctl("down", "--yes")
    assert done.returncode == 0, done.stderr
    assert gang.lab.left_on_hosts() == {}
