"""Tools beside the GPU matrix: queries, NVLink, RDMA tools, PCI tree, sessions, engines, clocks; texts written for these tests."""

import subprocess
import sys

import pytest

from dynctl.discovery.capture import Capture, kinds_of, probes, read_captures
from dynctl.discovery.facts import PciFacts
from dynctl.discovery.pcitree import PciTree
from dynctl.discovery.probe import ToolError
from dynctl.discovery.probes import (
    engines,
    ibdev2netdev,
    ibstat,
    ibv_devinfo,
    network,
    numa,
    nvidia_smi_nvlink,
    nvidia_smi_p2p,
    nvidia_smi_q,
    nvidia_smi_qx,
    nvidia_smi_table,
    pci,
    rocm_smi,
    session,
    software,
)
from dynctl.discovery.script import clock_of
from dynctl.discovery.view import document
from dynctl.errors import ProbeError

GIB = 2**30
UUID = "GPU-12345678-aaaa-bbbb-cccc-{:012d}"


def record_xml(i, mig="Disabled", used=4, extra=""):
    """One GPU of `-q -x` as the current schema prints it."""
    return f"""
  <gpu id="00000000:{i + 1:02X}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
    <uuid>{UUID.format(i)}</uuid><minor_number>{i}</minor_number>
    <gpu_reset_status><reset_required>No</reset_required></gpu_reset_status>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>81559 MiB</total><used>{used} MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Disabled</pending_ecc></ecc_mode>
    <ecc_errors><volatile><sram_uncorrectable_parity>1</sram_uncorrectable_parity><dram_uncorrectable>2</dram_uncorrectable></volatile>
      <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
    <remapped_rows><remapped_row_unc>3</remapped_row_unc><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>
    <fabric><state>Completed</state><status>Success</status><cliqueId>7</cliqueId><clusterUuid>aaaa-1</clusterUuid></fabric>
    {extra}
  </gpu>"""


def query_xml(*records, attached=None, end="\n</nvidia_smi_log>\n"):
    count = len(records) if attached is None else attached
    head = f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>\n<driver_version>570.1</driver_version><cuda_version>12.8</cuda_version><attached_gpus>{count}</attached_gpus>'
    return head + "".join(records) + end


def host_of(text):
    topology, _ = read_captures([Capture("one.txt", text.encode())])
    return document(topology)["hosts"][0]


def codes(host):
    return {warning["code"] for warning in host["warnings"]}


def test_the_xml_query_tells_health_and_fabric(completed):
    facts = nvidia_smi_qx.parse(completed(query_xml(record_xml(0))))

    (gpu,) = facts.gpus
    assert (facts.num_attached, facts.driver_version, facts.cuda_version) == (1, "570.1", "12.8")
    assert not facts.is_cut
    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    health = gpu.health
    assert (health.pcie_width, health.pcie_width_max, health.pcie_generation) == (8, 16, 5)
    assert (health.has_ecc, health.has_ecc_pending, health.num_uncorrected) == (True, False, 3)
    assert (health.num_remapped, health.is_remap_pending) == (3, True)
    assert health.throttle_reasons == ("hw_thermal_slowdown",)
    assert (health.fabric_state, health.fabric_clique) == ("Completed", "aaaa-1/7")
    assert {"gpu-throttled", "gpu-ecc-errors", "gpu-ecc-pending", "gpu-pcie-narrow", "gpu-reset-pending"} <= codes(host_of(query_xml(record_xml(0))))  # fmt: skip


def test_entities_are_never_expanded(completed):
    bomb = '<!DOCTYPE nvidia_smi_log [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;">]>'
    text = query_xml(record_xml(0)).replace("NVIDIA H100", "&b;&lt;i&gt;")

    facts = nvidia_smi_qx.parse(completed(bomb + text))

    assert facts.gpus[0].name == "&b;<i> 80GB HBM3"


def test_fewer_records_than_gpus_are_told_and_mig_devices_counted(completed):
    piece = (
        "<mig_devices>"
        + "<mig_device><fb_memory_usage><total>20096 MiB</total></fb_memory_usage></mig_device>" * 3
        + "</mig_devices>"
    )
    host = host_of(query_xml(record_xml(0, "Enabled", extra=piece), attached=8))

    assert {"gpu-output-cut", "gpu-mig"} <= codes(host)
    assert host["gpus"][0]["state"] == "mig"
    assert len(host["gpus"][0]["mig_slices"]) == 3
    cut = query_xml(record_xml(0), record_xml(1))
    assert nvidia_smi_qx.parse(completed(cut[: cut.rindex("<compute_mode>")])).is_cut


def test_processes_of_a_query_make_a_gpu_busy():
    one = "<processes><process_info><pid>77</pid><type>C</type><process_name>python &amp; co</process_name><used_memory>900 MiB</used_memory></process_info></processes>"
    host = host_of(query_xml(record_xml(0, used=904, extra=one), record_xml(1)))

    assert [gpu["state"] for gpu in host["gpus"]] == ["busy", "free"]
    (process,) = host["gpus"][0]["processes"]
    assert (process["pid"], process["name"], process["memory_bytes"]) == (
        77,
        "python & co",
        900 * 2**20,
    )


TEXT = """
==============NVSMI LOG==============

Driver Version                            : 550.54
CUDA Version                              : 12.4

Attached GPUs                             : 2
GPU 00000000:17:00.0
    Product Name                          : NVIDIA L40S
    MIG Mode
        Current                           : N/A
    GPU UUID                              : GPU-99999999-0000-1111-2222-333333333333
    PCI
        Bus Id                            : 00000000:17:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : 16x
    Fan Speed                             : ERR!
    Clocks Throttle Reasons
        HW Slowdown                       : Active
            HW Power Brake Slowdown       : Active
    FB Memory Usage
        Total                             : 46068 MiB
        Used                              : 2 MiB
    Processes                             : None
GPU 00000000:CA:00.0
    Product Name                          : NVIDIA L40S
    GPU UUID                              : GPU-99999999-0000-1111-2222-444444444444
"""


def test_the_text_query_is_read_by_its_indentation(completed):
    facts = nvidia_smi_q.parse(completed(TEXT))

    first, second = facts.gpus
    assert (facts.num_attached, first.is_complete, second.is_complete) == (2, True, False)
    assert facts.is_cut
    assert first.health.throttle_reasons == ("hw_slowdown", "hw_power_brake_slowdown")
    assert first.health.bad_readings == ("fan",)
    assert (first.health.pcie_generation, first.health.pcie_generation_max) == (1, 4)
    assert second.memory_bytes is None


def test_the_plain_table_gives_what_its_cells_tell(completed):
    text = (
        "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |\n"
        "|   0  NVIDIA L4                 On  | 00000000:31:00.0 Off |                    0 |\n"
        "|ERR!   41C    P8    12W /  72W |    100MiB / 23034MiB |      7%      Default |\n"
        "|   1  NVIDIA L4                Off  | 00000000:32:00.0 Off |                    0 |\n"
    )
    facts = nvidia_smi_table.parse(completed(text))

    first, second = facts.gpus
    assert first.health.bad_readings == ("fan",)
    assert (first.memory_bytes, first.health.compute_mode) == (23034 * 2**20, "Default")
    assert (first.health.has_persistence, second.health.has_persistence) == (True, False)
    assert not second.is_complete


def links_text(*rates):
    lines = []
    for i, links in enumerate(rates):
        lines.append(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: {UUID.format(i)})")
        lines += [
            f"\t Link {n}: {f'{rate} GB/s' if rate else '<inactive>'}"
            for n, rate in enumerate(links)
        ]
    return "\n".join(lines)


def test_an_inactive_nvlink_is_named(completed):
    text = links_text([26.562] * 18, [26.562] * 5 + [None] + [26.562] * 12)
    host = host_of(text)

    assert [gpu["nvlinks_active"] for gpu in host["gpus"]] == [18, 17]
    (warning,) = (w["text"] for w in host["warnings"] if w["code"] == "nvlink-inactive")
    assert "GPU1" in warning
    assert " 5 of 18" in warning
    with pytest.raises(ProbeError, match="line 1"):
        nvidia_smi_nvlink.parse(completed("\t Link 0: 25 GB/s\n"))


def test_peer_matrices_keep_their_capability(completed):
    square = " \tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{0}\tX\n"
    text = "== p2p read\n" + square.format("OK") + "== p2p write\n" + square.format("CNS")

    found = nvidia_smi_p2p.parse(completed(text))

    assert {name: facts.links[0][1] for name, facts in found.items()} == {
        "read": "OK",
        "write": "CNS",
    }
    with pytest.raises(ToolError):
        nvidia_smi_p2p.parse(
            completed("Failed to initialize NVML: Driver/library version mismatch")
        )


IBSTAT = """CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tSystem image GUID: 0xaaaa000000000001
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tCA type: MT4129
\tNumber of ports: 1
\tSystem image GUID: 0xaaaa000000000002
\tPort 1:
\t\tState: Down
\t\tPhysical state: Polling
\t\tRate: 40
\t\tLink layer: InfiniBand
ibpanic: [123] main: stat of IB device 'mlx5_2' failed: No such file or directory
"""


def test_ibstat_keeps_what_came_before_a_panic(completed):
    facts = ibstat.parse(completed(IBSTAT, 255))

    assert [(p.device, p.state, p.physical) for p in facts.ports] == [
        ("mlx5_0", "active", "linkup"),
        ("mlx5_1", "down", "polling"),
    ]
    assert facts.failed[0][0] == "mlx5_2"
    host = host_of(IBSTAT)
    assert {"rdma-device-failed", "rdma-some-down", "port-down"} <= codes(host)
    assert host["nics"][1]["rate_gbit_s"] is None
    with pytest.raises(ProbeError, match="line 8"):
        ibstat.parse(completed(IBSTAT.replace("Rate: 400", "Rate: fast")))


def test_tools_that_know_different_things_of_a_port_are_merged(tmp_path):
    verbs = "hca_id:\tmlx5_0\n\tvendor_id:\t0x02c9\n\tvendor_part_id:\t4129\n\t\tport:\t1\n\t\t\tstate:\tPORT_ACTIVE (4)\n\t\t\tactive_mtu:\t4096 (5)\n\t\t\tlink_layer:\tInfiniBand\n"
    names = "0000:18:00.0 mlx5_0 (MT4129 - MCX75310AAS-NEAT) CX7 fw 28.39.1002 port 1 (ACTIVE) ==> ibp24s0 (Up)\n"
    topology, _ = read_captures([Capture("a", IBSTAT.encode()), Capture("b", verbs.encode()), Capture("c", names.encode())])  # fmt: skip

    (host,) = topology.hosts
    nic = host.nics[0]
    assert (nic.name, nic.mtu_bytes, nic.netdev, nic.card) == ("mlx5_0", 4096, "ibp24s0", "MT4129")
    assert (nic.pci_bus_id, nic.rate_bits_s) == ("0000:18:00.0", 400 * 10**9)


def test_verbs_tell_addresses_and_a_missing_device(completed):
    text = "hca_id: mlx5_0\n  port: 1\n    state: PORT_ACTIVE (4)\n    link_layer: Ethernet\n    GID[  3]:\t0000:0000:0000:0000:0000:ffff:0a00:0001, RoCE v2\n"

    assert [(g.index, g.version) for g in ibv_devinfo.parse(completed(text)).ports[0].gids] == [
        (3, "v2")
    ]
    assert ibv_devinfo.parse(completed("No IB devices found\n")).ports == ()
    with pytest.raises(ProbeError):
        ibdev2netdev.parse(completed("something else\n"))


BUS = """0000:17:00.0 0x10de 0x030200 0 /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:02.0/0000:17:00.0
0000:18:00.0 0x15b3 0x020700 0 /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:04.0/0000:18:00.0
0000:2a:00.0 0x15b3 0x020000 0 /sys/devices/pci0000:15/0000:15:05.0/0000:2a:00.0
0000:3a:00.0 0x15b3 0x020000 0 /sys/devices/pci0000:38/0000:38:01.0/0000:3a:00.0
0000:ca:00.0 0x15b3 0x020000 1 /sys/devices/pci0000:c8/0000:c8:01.0/0000:ca:00.0
0000:cb:00.0 0x15b3 0x020000 -1 /sys/devices/pci0000:c9/0000:cb:00.0
0000:dd:00.0 0x10de 0x068000 1 /sys/devices/pci0000:dc/0000:dd:00.0
"""


@pytest.mark.parametrize(
    ("nic", "link"),
    [("18", "PIX"), ("2a", "PHB"), ("3a", "NODE"), ("ca", "SYS"), ("cb", None), ("ee", None)],
)
def test_the_bus_alone_tells_how_near_a_nic_is(nic, link, completed):
    facts = pci.parse(completed(BUS))

    assert facts.num_switches == 1
    assert PciTree(facts).link("00000000:17:00.0", f"0000:{nic}:00.0") == link


def test_two_switches_between_devices_are_pxb():
    paths = (
        ("0000:05:00.0", ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0", "0000:05:00.0")),
        ("0000:09:00.0", ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:08.0", "0000:09:00.0")),
    )  # fmt: skip

    assert PciTree(PciFacts(paths=paths)).link("0000:05:00.0", "0000:09:00.0") == "PXB"


def test_numa_nodes_without_cpus_are_kept(completed):
    text = (
        "/sys/devices/system/node/node0/cpulist:0-71\n/sys/devices/system/node/node0/distance:10 80\n"
        "/sys/devices/system/node/node1/distance:80 10\n/sys/devices/system/node/node1/meminfo:Node 1 MemTotal:       99 kB\n"
    )
    nodes = numa.parse(completed(text)).nodes

    assert [(n.index, n.cpus, n.memory_bytes, n.distances) for n in nodes] == [
        (0, "0-71", None, (10, 80)),
        (1, "", 99 * 1024, (80, 10)),
    ]


def test_routes_bonds_and_listeners_are_read(completed):
    text = (
        "default via 10.0.0.1 dev eth0 proto dhcp src 10.0.0.5 metric 100\n10.0.0.0/24 dev eth0 scope link\n"
        "fe80::/64 dev eth1 metric 256\nbond bond0\nslave eth2\nslave eth3\n"
        "/proc/net/tcp:   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000\n"
    )
    facts = network.parse(completed(text))

    assert (facts.routes[0].gateway, facts.routes[0].metric) == ("10.0.0.1", 100)
    assert [route.device for route in facts.routes] == ["eth0", "eth0", "eth1"]
    assert facts.bonds == (("bond0", ("eth2", "eth3")),)
    assert facts.listening_ports == (8080,)


def test_limits_of_session_units_and_agent_are_told_apart(completed):
    text = (
        "memlock 64\nnofile 1024\nshm tmpfs 1000 10 990 1% /dev/shm\nDefaultLimitMEMLOCK=infinity\nDefaultLimitMEMLOCKSoft=8388608\nDefaultLimitNOFILE=524288\n"
        "agent Max locked memory         65536                65536                bytes\nsshd MaxSessions 4\nsshd AllowStreamLocalForwarding no\n"
    )
    facts = session.parse(completed(text))

    assert (facts.limits.memlock_bytes, facts.limits.nofile) == (65536, 1024)
    assert (facts.unit_limits.memlock_bytes, facts.unit_limits.nofile) == (8388608, 524288)
    assert facts.agent_limits.memlock_bytes == 65536
    assert (facts.shm_bytes, facts.shm_free_bytes) == (1000 * 1024, 990 * 1024)
    assert (facts.sshd.max_sessions, facts.sshd.allows_forwarding) == (4, False)
    with pytest.raises(ProbeError):
        session.parse(completed("nothing"))


def test_modules_and_peer_memory_are_read(completed):
    text = "nvidia NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nmodule nvidia_peermem 16384 0 - Live 0x0\npeer nv_mem\n"
    found = software.parse(completed(text)).software

    assert (found.module_version, found.has_dmabuf) == ("570.133.20", True)
    assert (found.modules, found.memory_peers) == (("nvidia_peermem",), ("nv_mem",))


def test_packages_of_an_engine_are_read_without_importing_them(completed, tmp_path):
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name in ("vllm-0.33.0", "nvidia_nccl_cu12-2.27.5", "requests-2.0"):
        (place / "lib" / version / "site-packages" / f"{name}.dist-info").mkdir()
    wanted = f"{place}/bin/python\n/nowhere/python"

    done = subprocess.run(["sh", "-c", engines.PROBE.script], capture_output=True, env={"DYNCTL_ENGINE_PYTHONS": wanted, "PATH": "/usr/bin:/bin"}, timeout=60, check=False)  # fmt: skip
    first, second = engines.parse(completed(done.stdout))

    assert first.packages == (("nvidia-nccl-cu12", "2.27.5"), ("vllm", "0.33.0"))
    assert first.python_version == ".".join(map(str, sys.version_info[:3]))
    assert second.error


def test_a_clock_is_known_as_well_as_the_round_trip_allows(completed):
    clock = clock_of(completed("1005.5 1006.5"), 1000.0, 1002.0)

    assert (clock.skew_s, clock.error_s) == (5.0, 0.5)
    assert clock_of(completed("1005.N 1006.N"), 1000.0, 1002.0).error_s <= 1.5
    assert clock_of(completed("later soon"), 0.0, 1.0) is None
    assert clock_of(None, 0.0, 1.0) is None


def test_amd_rows_of_another_length_are_unknown(completed):
    text = "== Link Type between two GPUs ==\n       GPU0   GPU1\nGPU0   0      XGMI\nGPU1   XGMI\nGPU[0]\t: (Topology) Numa Node: 0\n"
    facts = rocm_smi.parse(completed(text))

    assert facts.links == (("X", "XGMI"), (None, "X"))
    assert facts.numa_nodes == (0, None)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (TEXT, ["nvidia_smi_q"]),
        (IBSTAT, ["ibstat"]),
        (BUS, ["pci"]),
        ("0, GPU-12345678-1, NVIDIA L4, 00000000:01:00.0, 1, 1, 5\n", ["nvidia_smi_csv"]),
        ("hello\n", []),
    ],
)
def test_kinds_are_told_by_what_they_hold(text, kinds):
    assert kinds_of(text.encode(), probes()) == kinds
