"""Doctor over real OpenSSH servers, on two hosts with eight played GPUs each: one sound, one with faults.

What it names is run against the hosts by hand: each proof holds on the faulty host and fails on the sound one.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from hostlab import sysfs
from hostlab.gpus import hgx_h100
from hostlab.loopback import Loopback, why_no_sshd

pytestmark = [
    pytest.mark.skipif(why_no_sshd() is not None, reason="OpenSSH's sshd is not installed here"),
    pytest.mark.timeout(600),
]
FAULTY, SOUND = "gpu-01", "gpu-02"
ONE_LINK_DOWN = """#!/bin/sh
smi="{python} {real}"
case "$*" in
  *nvlink*) $smi "$@" | sed '0,/Link 5: .*/s//Link 5: <inactive>/' ;;
  *) exec $smi "$@" ;;
esac
"""


class Hgx(Loopback):
    """Hosts with RDMA devices as well: a tree that stands for /sys."""

    def _config(self, host, directory, enter):
        return (
            super()
            ._config(host, directory, enter)
            .replace("SetEnv ", f'SetEnv "DYNCTL_SYSFS={self.sys(host.name)}" ')
        )

    def sys(self, name):
        return self.directory / name / "sys"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = Hgx(
        [FAULTY, SOUND], tmp_path_factory.mktemp("hgx"), dict.fromkeys((FAULTY, SOUND), "hgx-h100")
    )
    with made:
        for name in (FAULTY, SOUND):
            for nic in hgx_h100(name).nics:
                sysfs._write_nic(made.sys(name) / "class/infiniband" / nic.name, nic)
        rate = made.sys(FAULTY) / "class/infiniband/mlx5_3/ports/1/rate"
        rate.chmod(0o644)  # read-only as in sysfs, which stops everybody but root
        rate.write_text("100 Gb/sec (4X EDR)\n")
        smi = made.directory / FAULTY / "gpus/bin/nvidia-smi"
        real = smi.rename(smi.with_name("real-smi.py"))
        smi.write_text(ONE_LINK_DOWN.format(python=sys.executable, real=real))
        smi.chmod(0o755)
        yield made


@pytest.fixture(scope="module")
def report(hosts, tmp_path_factory):
    path = hosts.directory / "inventory.yaml"
    path.write_text(
        "cluster: hgx\nssh: {config: false, known_hosts: " + str(hosts.known_hosts) + "}\nhosts:\n"
        + "".join(f"  - {json.dumps(entry)}\n" for entry in hosts.entries)
    )  # fmt: skip
    done = hosts.dynctl("doctor", "-i", str(path), "-o", "json")
    assert done.returncode in (0, 6), done.stderr
    return json.loads(done.stdout)


def named(report, code):
    return [finding for finding in report["findings"] if finding["code"] == code]


@pytest.mark.parametrize(
    ("code", "subject"), [("nvlink-inactive", "GPU0"), ("port-slow", "mlx5_3")]
)
def test_each_fault_is_named_where_it_is_and_nowhere_else(report, code, subject):
    assert [(f["host"], f["subject"]) for f in named(report, code)] == [(FAULTY, subject)]


def test_everything_was_answered(report):
    assert report["unanswered"] == []
    assert report["failures"] == []


@pytest.mark.parametrize("code", ["nvlink-inactive", "port-slow"])
def test_the_proof_holds_on_the_faulty_host_only(hosts, report, code):
    line = named(report, code)[0]["verify"]

    outcomes = {}
    for name in (FAULTY, SOUND):
        done = hosts.ssh(name, line.replace("/sys/", f"{hosts.sys(name)}/"))
        outcomes[name] = done.returncode == 0

    assert outcomes == {FAULTY: True, SOUND: False}


def test_every_proof_on_a_host_runs_there(hosts, report):
    """Whatever this machine has wrong itself (limits, Python, clocks) is proved by its own command.

    Not what others may have left running here: it may have ended since.
    """
    for finding in report["findings"]:
        if finding["verify_on"] is None or finding["code"].startswith(("nic-", "orphans")):
            continue
        line = finding["verify"].replace(
            "/sys/class/infiniband", f"{hosts.sys(finding['host'])}/class/infiniband"
        )
        done = hosts.ssh(finding["verify_on"], line)
        assert done.returncode == 0, (finding["code"], line, done.stdout, done.stderr)
