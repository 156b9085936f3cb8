"""What lies between GPUs beyond their links, and the stacks beside them: ACS, IMEX, OFED, UCX."""

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from dynctl.core.hardware import GpuState
from dynctl.core.inventory import HostEntry
from dynctl.core.machine import GpuHealth, ImexNode, Limits, LimitsOf
from dynctl.discovery.assemble import assemble
from dynctl.discovery.facts import (
    AcsFacts,
    GpuFacts,
    HostFacts,
    ImexFacts,
    NvmlFacts,
    PciFacts,
    QueryFacts,
    QueryGpu,
    SmiFacts,
)
from dynctl.discovery.probes import acs, engines, imex, ofed, ucx
from dynctl.errors import ProbeError

IMEX = """Connectivity Table Legend:
I - Invalid - Node wasn't reachable, no connection status available
C - Connected - Ready for operation

5/12/2025 06:08:10.580
Nodes:
Node #0   - 172.16.1.81     - READY                - Version: 570.172.08
Node #1   - 172.16.1.82     - UNAVAILABLE          - Version: 570.172.08
Node #2   - 172.16.1.83     - READY

 Nodes From\\To  0   1   2
       0        C   N   C
Domain State: DEGRADED
"""


def config(*capabilities, size=4096):
    """Configuration space with extended capabilities of these ids, ACS with this control register."""
    space = bytearray(size)
    at = 0x100
    for number, (capability, control) in enumerate(capabilities):
        last = number == len(capabilities) - 1
        following = 0 if last else at + 0x40
        struct.pack_into("<IHH", space, at, capability | 1 << 16 | following << 20, 0x1F, control)
        at = following
    return bytes(space)


def bridge(sysfs, address, content, pci_class="0x060400"):
    device = sysfs / "bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "class").write_text(pci_class + "\n")
    (device / "vendor").write_text("0x10de\n")
    (device / "config").write_bytes(content)


def test_acs_is_read_from_configuration_space_by_the_real_script(tmp_path, completed):
    bridge(tmp_path, "0000:00:01.0", config((0x0001, 0), (0x0019, 0), (0x000D, 0x001D)))
    bridge(tmp_path, "0000:00:02.0", config((0x000D, 0)))
    bridge(tmp_path, "0000:00:03.0", config((0x0001, 0)))
    bridge(tmp_path, "0000:00:04.0", config((0x000D, 0x0011)))
    bridge(tmp_path, "0000:00:05.0", config())
    bridge(tmp_path, "0000:01:00.0", config((0x000D, 0x001D)), "0x030200")
    endless = bytearray(config((0x0001, 0)))
    struct.pack_into("<I", endless, 0x100, 0x0001 | 0x100 << 20)
    bridge(tmp_path, "0000:00:06.0", bytes(endless))
    env = {"PATH": os.environ["PATH"], "DYNCTL_SYSFS": str(tmp_path), "LC_ALL": "C"}
    done = subprocess.run(["sh", "-c", acs.PROBE.script], env=env, capture_output=True, check=True, timeout=60)  # fmt: skip

    assert acs.parse(completed(done.stdout)) == AcsFacts(("0000:00:01.0",))

    bridge(tmp_path, "0000:00:07.0", config(size=64))
    done = subprocess.run(["sh", "-c", acs.PROBE.script], env=env, capture_output=True, check=True, timeout=60)  # fmt: skip
    assert acs.parse(completed(done.stdout)) == AcsFacts(None)


def test_an_imex_domain_is_read(completed):
    facts = imex.parse(completed(IMEX))
    assert facts.domain_state == "DEGRADED"
    assert facts.nodes == (
        ImexNode("172.16.1.81", "READY", "570.172.08"),
        ImexNode("172.16.1.82", "UNAVAILABLE", "570.172.08"),
        ImexNode("172.16.1.83", "READY"),
    )


def test_an_imex_daemon_that_does_not_answer_is_named(completed):
    with pytest.raises(ProbeError, match="Connection refused"):
        imex.parse(completed("", exit_status=1, stderr=b"Error: Connection refused\n"))


@pytest.mark.parametrize(
    ("probe", "text", "expected"),
    [
        (ofed, "MLNX_OFED_LINUX-24.10-1.1.4.0:\n", "MLNX_OFED_LINUX-24.10-1.1.4.0"),
        (ofed, "OFED-internal-25.10-1.7.1.413:\n", "OFED-internal-25.10-1.7.1.413"),
        (ucx, "# Library version: 1.18.1\n# Library path: /opt/ucx/lib/libucs.so.0\n", "1.18.1"),
        (ucx, "# UCT version=1.8.1 revision 6b29558\n", "1.8.1"),
    ],
)
def test_versions_of_stacks(probe, text, expected, completed):
    assert probe.parse(completed(text)) == expected
    assert probe.parse(completed("", exit_status=127)) is None
    for rubbish in ("", "Segmentation fault\n", "\x1b[31m"):
        with pytest.raises(ProbeError):
            probe.parse(completed(rubbish))


def host(name="h", clique="c1/7", **facts):
    gpus = range(2)
    cards = [GpuFacts(i, f"GPU-{i}", "NVIDIA GB200", f"0000:0{i}:00.0", 2**37, 0) for i in gpus]
    health = GpuHealth(fabric_state="Completed", fabric_clique=clique)
    records = [QueryGpu(i, f"0000:0{i}:00.0", f"GPU-{i}", None, health=health) for i in gpus]
    paths = tuple((f"0000:0{i}:00.0", ("pci0000:00", "0000:00:01.0", f"0000:0{i}:00.0")) for i in gpus)  # fmt: skip
    found = {
        "nvidia_smi_csv": SmiFacts(tuple(cards)),
        "nvidia_smi_qx": QueryFacts(2, tuple(records)),
        "pci": PciFacts(paths=paths),
        "nvml": NvmlFacts(),
    } | facts
    return assemble([HostEntry(name, name)], {name: HostFacts(found)}, (), {}).hosts[0]


def codes(found):
    return {warning.code: warning.text for warning in found.warnings}


def test_bridges_that_redirect_count_where_gpus_are_below_them():
    assert "0000:00:01.0" in codes(host(acs=AcsFacts(("0000:00:01.0", "0000:00:1f.0"))))["acs-on"]
    assert "acs-on" not in codes(host(acs=AcsFacts(("0000:00:1f.0",))))
    assert "acs-on" not in codes(host(acs=AcsFacts(None)))
    assert host(acs=AcsFacts(None)).acs_bridges is None


def test_nvlink_to_other_hosts_needs_its_daemon():
    up = ImexFacts("UP", (ImexNode("10.0.0.1", "READY"),))
    assert not {"imex-down", "imex-node-away"} & set(codes(host(imex=up)))
    assert "imex-down" not in codes(host(clique=None))
    assert "not there" in codes(host())["imex-down"]
    away = ImexFacts("DEGRADED", (ImexNode("10.0.0.1", "READY"), ImexNode("10.0.0.2", "UNAVAILABLE")))  # fmt: skip
    assert "DEGRADED" in codes(host(imex=away))["imex-down"]
    assert "10.0.0.2 UNAVAILABLE" in codes(host(imex=away))["imex-node-away"]


def test_two_domains_in_one_clique_are_told():
    entries = [HostEntry(name, name) for name in ("a", "b", "c")]

    def facts(*addresses):
        health = GpuHealth(fabric_clique="c1/7")
        record = QueryGpu(0, None, "GPU-0", "NVIDIA GB200", memory_bytes=1, health=health)
        nodes = tuple(ImexNode(address, "READY") for address in addresses)
        return HostFacts({"nvidia_smi_qx": QueryFacts(1, (record,)), "imex": ImexFacts("UP", nodes)})  # fmt: skip

    one, other = facts("10.0.0.1", "10.0.0.2"), facts("10.0.0.3")
    topology = assemble(entries, {"a": one, "b": one, "c": other}, (), {})
    (text,) = [w.text for w in topology.warnings if w.code == "imex-domains-differ"]
    assert text.endswith("a, b; c")
    assert topology.hosts[0].gpus[0].state is GpuState.UNKNOWN
    assert assemble(entries, {"a": one, "b": one}, (), {}).warnings == ()


def test_an_engine_with_ucx_of_its_own_tells_its_version(tmp_path, completed):
    """The library is asked itself: a C file stands in for it."""
    libs = tmp_path / "site" / "nixl_cu12.libs"
    libs.mkdir(parents=True)
    (tmp_path / "site" / "nixl-1.5.1.dist-info").mkdir()
    source = tmp_path / "ucp.c"
    source.write_text('const char *ucp_get_version_string(void) { return "1.19.0"; }\n')
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = libs / "libucp-1234.so.0"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    (libs / "libucp-damaged.so.0").write_text("no library")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "import sys; sys.path.insert(0, \'{tmp_path}/site\'); exec(sys.argv[1])" "$1"\n')  # fmt: skip
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "DYNCTL_ENGINE_PYTHONS": str(python)}
    done = subprocess.run(["sh", "-c", engines.PROBE.script], env=env, capture_output=True, check=True, timeout=60)  # fmt: skip
    (engine,) = engines.parse(completed(done.stdout))
    assert engine.error is None
    assert dict(engine.packages)["ucx-of-nixl-cu12"] == "1.19.0"
    assert dict(engine.packages)["nixl"] == "1.5.1"


def test_engines_get_the_limits_of_what_starts_them():
    low, high = Limits(65536, 1024), Limits(-1, 4096)
    base = host()
    user = replace(base, has_systemd_user=True, unit_limits=low, session_limits=high)
    assert user.engine_limits == (LimitsOf.USER_UNITS, low)
    assert replace(user, has_systemd_user=False).engine_limits == (LimitsOf.LOGIN, high)
    root = replace(user, is_root=True, has_systemd_system=True)
    assert root.engine_limits[0] is LimitsOf.UNIT
    assert replace(root, agent_limits=low).engine_limits == (LimitsOf.AGENT, low)
