"""RDMA devices, the PCI bus and the system, as their scripts print them and as this machine has them."""

import os
import platform
import subprocess
import sys

import pytest

from dynctl.discovery.probes import infiniband, pci, system
from dynctl.errors import ProbeError


def run_script(probe, **env):
    done = subprocess.run(
        ["sh", "-c", probe.script],
        capture_output=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LC_ALL": "C", **env},
    )
    return done.returncode, done.stdout


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def sysfs(tmp_path):
    """Eight 400 Gb/s ports of which one is down, and a RoCE bond at 200, as files of the kernel's tree."""
    base = tmp_path / "class" / "infiniband"
    for i in range(8):
        device = base / f"mlx5_{i}"
        is_up = i != 5
        write(device / "hca_type", "MT4129\n")
        write(device / "device" / "numa_node", f"{i // 4}\n")
        write(device / "device" / "uevent", f"DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:{i:02x}:00.0\n")
        write(device / "ports" / "1" / "state", "4: ACTIVE\n" if is_up else "1: DOWN\n")
        write(device / "ports" / "1" / "phys_state", "5: LinkUp\n" if is_up else "2: Polling\n")
        rate = "400 Gb/sec (4X NDR)" if is_up else "40 Gb/sec (4X QDR)"
        write(device / "ports" / "1" / "rate", rate + "\n")
        write(device / "ports" / "1" / "link_layer", "InfiniBand\n")
    bond = base / "mlx5_bond_0"
    write(bond / "device" / "numa_node", "-1\n")
    write(bond / "ports" / "1" / "state", "4: ACTIVE\n")
    write(bond / "ports" / "1" / "rate", "200 Gb/sec (2X NDR)\n")
    write(bond / "ports" / "1" / "link_layer", "Ethernet\n")
    write(bond / "ports" / "1" / "gid_attrs" / "ndevs" / "0", "bond0\n")
    return tmp_path


def test_rdma_ports_are_read_from_the_tree_by_the_real_script(sysfs, completed):
    status, out = run_script(infiniband.PROBE, DYNCTL_SYSFS=str(sysfs))

    ports = {port.device: port for port in infiniband.parse(completed(out, status))}

    assert len(ports) == 9
    assert ports["mlx5_4"].rate_bits_s == 400 * 10**9
    assert (ports["mlx5_4"].state, ports["mlx5_4"].numa_node) == ("active", 1)
    assert ports["mlx5_4"].pci_bus_id == "0000:04:00.0"
    assert (ports["mlx5_5"].state, ports["mlx5_5"].physical) == ("down", "polling")
    assert ports["mlx5_bond_0"].link_layer == "ethernet"
    assert ports["mlx5_bond_0"].netdev == "bond0"
    assert ports["mlx5_bond_0"].numa_node is None


def test_output_of_grep_over_the_tree_is_read_too(completed):
    text = (
        "/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE\n"
        "/sys/class/infiniband/mlx5_0/ports/1/rate:100 Gb/sec (4X EDR)\n"
    )

    (port,) = infiniband.parse(completed(text))

    assert (port.state, port.rate_bits_s) == ("active", 10**11)


@pytest.mark.parametrize("text", ["bash: no such thing\n", "x/infiniband/a/ports/1/rate:fast\n"])
def test_rubbish_from_the_tree_is_a_probe_error(text, completed):
    with pytest.raises(ProbeError, match="line 1"):
        infiniband.parse(completed(text))


def test_no_tree_is_no_error(tmp_path, completed):
    status, out = run_script(infiniband.PROBE, DYNCTL_SYSFS=str(tmp_path))

    assert infiniband.parse(completed(out, status)) == ()


def test_gpus_on_the_bus_are_seen_without_a_driver(tmp_path, completed):
    for name, vendor, kind, node in (
        ("0000:1b:00.0", "0x10de", "0x030200", "0"),
        ("0000:02:00.0", "0x1a03", "0x030000", "0"),
        ("0000:c1:00.0", "0x1002", "0x120000", "-1"),
        ("0000:05:00.0", "0x15b3", "0x020000", "1"),
    ):
        for key, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            write(tmp_path / "bus/pci/devices" / name / key, value + "\n")

    status, out = run_script(pci.PROBE, DYNCTL_SYSFS=str(tmp_path))

    found = [(c.bus_id, c.vendor, c.numa_node) for c in pci.parse(completed(out, status)).gpus]
    assert found == [("0000:1b:00.0", "nvidia", 0), ("0000:c1:00.0", "amd", None)]


def test_the_system_probe_describes_this_machine(completed):
    status, out = run_script(system.PROBE, DYNCTL_PYTHON=sys.executable)

    facts = system.parse(completed(out, status))

    assert facts.host_name == platform.node()
    assert facts.arch == platform.machine()
    assert facts.uid == os.getuid()
    assert 1 <= facts.num_cpus <= (os.cpu_count() or 1)
    assert 0 < facts.memory_bytes <= facts.memory_nominal_bytes
    assert facts.disk_free_bytes is not None
    assert facts.libc.startswith(("glibc-", "musl"))
    assert facts.pythons[0].path == sys.executable
    assert facts.pythons[0].version == platform.python_version()
    assert facts.boot_id


SYSTEM = (
    "host_name\tgpu-01\ncpus_nominal\t64\ncpus_allowed\t64\nmemory_kib\t1048576\n"
    "arch\tx86_64\nlibc\tglibc 2.36\nuid\t1000\n"
)


@pytest.mark.parametrize(
    ("extra", "cpus", "memory"),
    [
        ("", 64, 2**30),
        ("cpus_allowed\t8\n", 64, 2**30),
        ("cpu_max\t400000 100000\n", 4, 2**30),
        ("cpu_max\tmax 100000\ncpu_max\t150000 100000\n", 1, 2**30),
        ("cpu_quota\t200000\ncpu_period\t100000\n", 2, 2**30),
        ("cpu_quota\t-1\ncpu_period\t100000\n", 64, 2**30),
        ("memory_max\tmax\nmemory_max\t1048576\n", 64, 2**20),
        ("memory_max\t9223372036854771712\n", 64, 2**30),
    ],
)
def test_limits_of_control_groups_count(extra, cpus, memory, completed):
    facts = system.parse(completed(SYSTEM + extra))

    assert (facts.num_cpus, facts.memory_bytes) == (cpus, memory)


def test_musl_and_df_with_long_names_are_read(completed):
    text = SYSTEM.replace("glibc 2.36", "musl libc (x86_64) Version 1.2.4 Dynamic")
    text += "disk\t/dev/mapper/a b 100 40 60 40% /data\n"

    facts = system.parse(completed(text))

    assert facts.libc == "musl-1.2.4"
    assert facts.disk_free_bytes == 60 * 1024


def test_network_devices_carry_rate_state_and_addresses(completed):
    text = SYSTEM + (
        "net\tlo\tunknown\t\t65536\t\t0\nnet\teth0\tup\t25000\t1500\t1\t1\nnet\tib0\tdown\t-1\t2044\t-1\t1\n"
        "address\teth0\t10.0.0.7\naddress\teth0\tfd00::7\n"
    )

    eth0, ib0 = system.parse(completed(text)).nets

    assert (eth0.rate_bits_s, eth0.numa_node, eth0.addresses) == (25 * 10**9, 1, ("10.0.0.7", "fd00::7"))  # fmt: skip
    assert (ib0.state, ib0.rate_bits_s, ib0.numa_node) == ("down", None, None)


@pytest.mark.parametrize("text", ["", "nothing here\n", SYSTEM.replace("64", "sixty-four")])
def test_no_facts_or_no_number_is_a_probe_error(text, completed):
    with pytest.raises(ProbeError):
        system.parse(completed(text))
