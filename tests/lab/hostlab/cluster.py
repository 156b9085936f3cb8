"""What a test asks of a cluster that is up: units, decisions of the router, metrics of engines.

IO: dynctl, processes on hosts.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from hostlab.lab import Lab
from hostlab.shell import LabError, run

_ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("unix")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.settimeout(30)
connection.sock.connect(sys.argv[1])
connection.request(sys.argv[3], sys.argv[2])
answer = connection.getresponse()
sys.stdout.write(answer.read().decode())
sys.exit(0 if answer.status == 200 else f"status {answer.status}")
"""
_PATIENCE_S = 45.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


class Cluster:
    """A deployed cluster of a lab, seen from the operator's side and from its hosts."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def json(self, *args: str) -> Any:
        """Run a dynctl command that must succeed, with `-o json`, and return what it printed."""
        done = self.lab.dynctl(*args, "-o", "json")
        if done.returncode != 0:
            raise LabError(f"dynctl {' '.join(args)}: exit {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    def units(self) -> dict[str, dict[str, Any]]:
        """Return unit id → its status with `host` added; ids of relays are `relay@HOST`."""
        done = self.lab.dynctl("status", "-o", "json")
        try:
            hosts = json.loads(done.stdout)["hosts"]
        except (ValueError, KeyError) as error:
            raise LabError(f"dynctl status: exit {done.returncode}: {done.stderr}") from error
        found = {}
        for host_name, status in hosts.items():
            for unit in status["units"]:
                name = unit["id"] if unit["kind"] != "relay" else f"relay@{host_name}"
                found[name] = unit | {"host": host_name}
        return found

    def _unit(self, is_wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Find one unit; a host whose processors are all taken is asked again before it counts as silent."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            found = next(filter(is_wanted, self.units().values()), None)
            if found is not None:
                return found
            if time.monotonic() > deadline_s:
                raise LabError(f"{what} is not among the units")
            time.sleep(0.5)

    def pid_of(self, unit_id: str) -> int:
        """Return this machine's pid of a unit, whose status tells the pid its host knows."""
        unit = self._unit(lambda u: u["id"] == unit_id, unit_id)
        host = self.lab[unit["host"]]
        for process in host.processes():
            if host.pid_inside(process.pid) == unit["pid"]:
                return process.pid
        raise LabError(f"{unit_id}: no process {unit['pid']} on {host.name}")

    def ask(self, host_name: str, socket: str, path: str, method: str = "GET") -> str:
        """Ask for a path at a Unix socket on a host."""
        argv = ["python3", "-c", _ASK, socket, path, method]
        return self.lab[host_name].run(argv, user="ops").stdout

    def decisions(self, deployment: str, limit: int = 100) -> list[dict[str, Any]]:
        """Return the router's last decisions, newest first."""
        return list(self.router(deployment, f"/decisions?limit={limit}"))

    def router(self, deployment: str, path: str, method: str = "GET") -> Any:
        """Ask the router's admin socket; returns the JSON it answers."""
        unit = self._unit(
            lambda u: u["kind"] == "router" and u["deployment"] == deployment,
            f"the router of {deployment}",
        )
        socket = self._argument(unit, "--admin-socket")
        return json.loads(self.ask(unit["host"], socket, path, method))

    def engine_get(self, unit_id: str, path: str) -> str:
        """GET a path of an engine's own API, on its socket."""
        unit = self._unit(lambda u: u["id"] == unit_id, unit_id)
        return self.ask(unit["host"], self._argument(unit, "--uds"), path)

    def metric(self, unit_id: str, name: str, **labels: str) -> float:
        """Sum an engine's samples of a metric whose labels contain these; 0 where there are none."""
        return sum_samples(self.engine_get(unit_id, "/metrics"), name, labels)

    def _argument(self, unit: Mapping[str, Any], flag: str) -> str:
        host = self.lab[unit["host"]]
        for process in host.processes():
            if host.pid_inside(process.pid) == unit["pid"] and flag in process.argv:
                return process.argv[process.argv.index(flag) + 1]
        raise LabError(f"{unit['id']}: no process {unit['pid']} with {flag} on {host.name}")


def sum_samples(text: str, name: str, labels: Mapping[str, str]) -> float:
    """Sum the samples of a metric in Prometheus text whose labels contain `labels`."""
    total = 0.0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match[1] == name:
            found = dict(_LABEL.findall(match[2] or ""))
            if labels.items() <= found.items():
                total += float(match[3])
    return total


def fetch_wheels(lab: Lab, host_name: str) -> None:
    """Fill the operator's wheel cache for a kind of host, from outside the lab: inside there is no registry."""
    facts = "import json, platform, sys; print(json.dumps([sys.version_info[:2], platform.libc_ver(), platform.machine()]))"
    version, libc, arch = json.loads(lab[host_name].run(["python3", "-c", facts]).stdout)
    target = [f"{version[0]}.{version[1]}", f"{libc[0]}-{libc[1]}", arch]
    code = "import asyncio, sys; from dynctl.deploy.bundle import Target, fetch_wheels\n"
    code += "asyncio.run(fetch_wheels(Target(*sys.argv[1:])))"
    run([sys.executable, "-c", code, *target], timeout_s=900, env=lab.env())
