"""Three booted hosts: a board with one dead NVLink and one port at a quarter of its rate, and a throttled host (root).

Described, measured and diagnosed by the commands an operator types; each proof is then run on the host it names.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from hostlab import network, rootfs
from hostlab.lab import HostSpec, Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        rootfs.why_impossible() is not None, reason=f"no lab: {rootfs.why_impossible()}"
    ),
]
SLOW_BITS_S = 200_000_000
ONE_LINK_DOWN = """#!/bin/sh
case "$*" in
  *nvlink*) /usr/bin/real-smi "$@" | sed '0,/Link 5: .*/s//Link 5: <inactive>/' ;;
  *) exec /usr/bin/real-smi "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(
        (HostSpec("gpu-1", gpus="hgx-h100"), HostSpec("gpu-2", gpus="hgx-h100"), HostSpec("head"))
    ) as made:
        faulty = made["gpu-1"]
        smi = faulty.root / "usr/bin/nvidia-smi"
        smi.rename(smi.with_name("real-smi"))
        smi.write_text(ONE_LINK_DOWN)
        smi.chmod(0o755)
        (faulty.root / "usr/share/dynctl-lab/infiniband/mlx5_3/ports/1/rate").write_text(
            "100 Gb/sec (4X EDR)\n"
        )
        made.write_inventory([])
        network.throttle(made.hub, made["head"].namespace, made["head"].address, SLOW_BITS_S)
        measured = made.dynctl("linktest", "-o", "json")
        assert measured.returncode == 0, measured.stderr
        yield made


@pytest.fixture(scope="module")
def report(lab):
    done = lab.dynctl("doctor", "-o", "json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def named(report, code):
    return {(f["host"], f["subject"]) for f in report["findings"] if f["code"] == code}


def test_every_host_answers_every_question(report):
    assert (report["failures"], report["unanswered"]) == ([], [])


def test_the_dead_nvlink_is_found_on_its_gpu_alone(report):
    assert named(report, "nvlink-inactive") == {("gpu-1", "GPU0")}


def test_the_slow_port_is_found_alone(report):
    assert named(report, "port-slow") == {("gpu-1", "mlx5_3")}


def test_the_throttled_pairs_are_found_and_no_other(report):
    pairs = {("gpu-1", "head"), ("gpu-2", "head"), ("head", "gpu-1"), ("head", "gpu-2")}

    assert named(report, "link-slow") == pairs


def test_the_proofs_hold_where_the_findings_do_and_not_on_a_sound_host(lab, report):
    """iperf3 is on no host: its lines are tried elsewhere, against played answers."""
    tried = 0
    for finding in report["findings"]:
        if (
            finding["verify_on"] is None
            or "iperf3" in finding["verify"]
            or finding["code"].startswith("link-")
        ):
            continue
        done = lab.ssh(finding["verify_on"], finding["verify"])
        assert done.returncode == 0, (finding["code"], finding["verify"], done.stdout, done.stderr)
        tried += 1
        if finding["code"] in ("nvlink-inactive", "port-slow"):
            assert lab.ssh("gpu-2", finding["verify"]).returncode != 0
    assert tried >= 2
