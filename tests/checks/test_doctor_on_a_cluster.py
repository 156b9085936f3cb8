"""Doctor on a cluster that runs on this machine: sound, then with one thing broken after another.

Every finding's proof is run by hand on the spot, before and after the cure.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)
INVENTORY = """\
cluster: t
hosts:
  - {{name: box, address: local, cpu_slots: 2}}
ports: {{base: {base}, count: 16}}
deployments:
  - name: chat
    model: sim
    engine: {{kind: sim}}
    pools:
      - {{role: aggregated, replicas: 1}}
    router: {{listen: 127.0.0.1:{listen}}}
"""


class Cluster:
    def __init__(self, directory, first_port):
        self.directory = directory
        self.base = first_port
        (directory / "inventory.yaml").write_text(
            INVENTORY.format(base=self.base, listen=self.base + 16)
        )
        (directory / "inventory.yaml").chmod(0o600)

    @property
    def root(self):
        return self.directory / ".dynctl/t/hosts/box"

    def run(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "dynctl", *words],
            cwd=self.directory, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def doctor(self, *words):
        done = self.run("doctor", "-o", "json", *words)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def agent_pid(self):
        return int((self.root / "agent.pid").read_text())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, free_ports_of_module):
    made = Cluster(tmp_path_factory.mktemp("cluster"), free_ports_of_module(17))
    done = made.run("up", "--yes")
    try:
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        made.run("up", "--yes")
        down = made.run("down", "--yes")
        assert down.returncode == 0, down.stderr


def by_code(report, code):
    return next((f for f in report["findings"] if f["code"] == code), None)


def holds(finding):
    """Run a finding's own proof."""
    done = subprocess.run(
        ["sh", "-c", finding["verify"]], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode == 0


def test_a_sound_cluster_is_sound(cluster):
    status, report = cluster.doctor()

    assert status == 0, report["findings"]
    silent = {
        "agent-degraded",
        "unit-failed",
        "unit-unready",
        "port-clash",
        "plan-not-applied",
        "host-file-open",
    }
    assert silent <= set(report["passed"])


def test_an_open_key_is_found_proved_and_cured(cluster):
    key = cluster.root / "tls/host.key"
    key.chmod(0o644)
    status, report = cluster.doctor("--check", "host-file-open")
    finding = by_code(report, "host-file-open")

    assert status == 6
    assert finding["subject"] == str(key)
    assert holds(finding)

    status, report = cluster.doctor("--check", "host-file-open", "--fix", "--yes")

    assert status == 0
    assert report["findings"] == []
    assert not holds(finding)


def test_another_plan_than_the_running_one_is_said(cluster):
    path = cluster.directory / "plan.yaml"
    before = path.read_text()
    digest = next(
        line.split()[-1].strip('"') for line in before.splitlines() if line.startswith("digest:")
    )
    try:
        path.write_text(before.replace(digest, digest[:-4] + "0000"))
        _, report = cluster.doctor("--check", "plan-not-applied")
    finally:
        path.write_text(before)

    finding = by_code(report, "plan-not-applied")
    assert finding["severity"] == "info"
    assert holds(finding)


def test_left_over_engines_are_found_once_their_agent_is_dead(cluster, ended):
    pid = cluster.agent_pid()
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    finding = orphans_of(cluster)

    assert finding is not None
    assert holds(finding)

    assert cluster.run("up", "--yes").returncode == 0
    assert orphans_of(cluster) is None


def orphans_of(cluster):
    """The finding about this cluster: others on this machine may have left something over as well."""
    _, report = cluster.doctor("--check", "orphans")
    return next((f for f in report["findings"] if f["subject"] == str(cluster.root)), None)
