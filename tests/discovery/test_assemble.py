"""Facts become hosts: states of GPUs, links, NICs, addresses, and the warnings a user must be told."""

import pytest

from dynctl.core.hardware import GpuState
from dynctl.core.inventory import HostEntry, SimulatedGpus
from dynctl.core.units import GIB
from dynctl.discovery.assemble import assemble, choose_python
from dynctl.discovery.facts import (
    GpuFacts,
    GpuProcessFacts,
    HostFacts,
    NetFacts,
    PciFacts,
    PciGpu,
    PythonFacts,
    RdmaPort,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.planner.grouping import nvlink_islands

GPUS = 4


def uuid(i):
    return f"GPU-0000000{i}-0000-0000-0000-000000000000"


def gpu(i, used_bytes=2**20, **change):
    facts = {
        "index": i,
        "uuid": uuid(i),
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{i:02X}:00.0",
        "memory_bytes": 80 * GIB,
        "memory_used_bytes": used_bytes,
    }
    return GpuFacts(**{**facts, **change})


def topo(numa=("0", "0", "1", "1")):
    links = tuple(tuple("X" if a == b else "NV18" for b in range(GPUS)) for a in range(GPUS))
    nic_links = (("PIX", "SYS"), ("PIX", "SYS"), ("SYS", "PIX"), ("SYS", "PIX"))
    return TopoFacts(tuple(range(GPUS)), links, ("mlx5_0", "mlx5_1"), nic_links, (None,) * 4, numa)


def system(**change):
    return SystemFacts(
        **{
            "host_name": "gpu-01",
            "machine_id": "m1",
            "num_cpus": 64,
            "num_cpus_nominal": 64,
            "memory_bytes": 512 * GIB,
            "memory_nominal_bytes": 512 * GIB,
            "disk_free_bytes": 100 * GIB,
            "libc": "glibc-2.36",
            "arch": "x86_64",
            "pythons": (PythonFacts("/usr/bin/python3", "3.11.2"),),
            "uid": 0,
            "has_systemd": True,
            "ssh_address": "10.0.0.1",
            **change,
        }
    )


def port(name, state="active", rate=400 * 10**9, **change):
    return RdmaPort(name, 1, state, None, rate, "infiniband", **change)


def facts(**change):
    found = {
        "nvidia_smi_csv": SmiFacts(tuple(gpu(i) for i in range(GPUS))),
        "nvidia_smi_topo": topo(),
        "nvidia_smi_list": (),
        "pci": PciFacts(),
        "infiniband": (port("mlx5_0", numa_node=0), port("mlx5_1", numa_node=1)),
        "system": system(),
        **change,
    }
    return HostFacts({name: fact for name, fact in found.items() if fact is not None})


def host_of(found, entry=None, own_pids=frozenset()):
    entry = entry or HostEntry("gpu-01", "192.0.2.1")
    return assemble([entry], {"gpu-01": found}, (), {"gpu-01": own_pids}).hosts[0]


def codes(host):
    return [warning.code for warning in host.warnings]


def test_a_healthy_host_has_no_warning():
    host = host_of(facts())

    assert codes(host) == []
    assert host.nvlink_islands == ((0, 1, 2, 3),)
    assert [g.numa_node for g in host.gpus] == [0, 0, 1, 1]
    assert dict(host.gpu_nics) == {0: ("mlx5_0",), 1: ("mlx5_0",), 2: ("mlx5_1",), 3: ("mlx5_1",)}
    assert (host.python, host.platform) == ("/usr/bin/python3", "glibc-2.36-x86_64")
    assert host.data_address == "10.0.0.1"


def with_process(**change):
    process = GpuProcessFacts(uuid(1), 41, "python3", "bob", 4 * GIB, **change)
    return facts(nvidia_smi_csv=SmiFacts(tuple(gpu(i, 4 * GIB) for i in range(2)), (process,)))


def test_a_gpu_held_by_a_stranger_is_busy_and_says_by_whom():
    host = host_of(with_process())

    assert host.gpus[1].state is GpuState.BUSY
    busy = next(w.text for w in host.warnings if w.code == "gpu-busy" and "GPU1" in w.text)
    assert "pid 41" in busy
    assert "bob" in busy
    assert "4 GiB" in busy


@pytest.mark.parametrize("how", ["tag", "pid"])
def test_memory_of_our_own_engines_counts_as_free(how):
    found = with_process(is_tagged=how == "tag")

    host = host_of(found, own_pids=frozenset({41}) if how == "pid" else frozenset())

    assert host.gpus[1].state is GpuState.FREE
    assert host.gpus[1].processes[0].is_ours


def test_memory_nobody_admits_to_holding_makes_a_gpu_busy():
    found = facts(nvidia_smi_csv=SmiFacts((gpu(0, 40 * GIB), gpu(1, 500 * 2**20))))

    host = host_of(found)

    assert [g.state for g in host.gpus] == [GpuState.BUSY, GpuState.FREE]


def test_lost_mig_and_broken_gpus_are_left_out_and_the_rest_is_free():
    smi = SmiFacts(
        (gpu(0), gpu(1, is_mig=True), gpu(2)),
        broken=((2, "GPU 2: ERR!"), (3, "GPU 3: [GPU is lost]")),
    )

    host = host_of(facts(nvidia_smi_csv=smi))

    assert [g.state.value for g in host.gpus] == ["free", "mig", "unknown", "lost"]
    assert {"gpu-mig", "gpu-unknown", "gpu-lost"} <= set(codes(host))


def test_a_hung_driver_leaves_gpus_of_unknown_state_never_none():
    found = facts(
        nvidia_smi_csv=None,
        nvidia_smi_topo=None,
        nvidia_smi_list=None,
        pci=PciFacts(tuple(PciGpu(f"0000:{i:02x}:00.0", "nvidia", 0) for i in range(8))),
    )
    for name in ("nvidia_smi_csv", "nvidia_smi_topo", "nvidia_smi_list"):
        found.failures[name] = "did not answer"
        found.kinds[name] = "timeout"

    host = host_of(found)

    assert [g.state for g in host.gpus] == [GpuState.UNKNOWN] * 8
    assert codes(host).count("gpu-timeout") == 1


def test_no_driver_with_devices_on_the_bus_is_said():
    found = facts(
        nvidia_smi_csv=SmiFacts(is_installed=False),
        nvidia_smi_topo=TopoFacts((), ()),
        pci=PciFacts((PciGpu("0000:01:00.0", "nvidia", None),)),
    )

    host = host_of(found)

    assert host.gpus == ()
    assert "gpu-driver-absent" in codes(host)


def test_the_numa_node_of_a_restricted_set_is_taken_from_the_bus():
    found = facts(
        nvidia_smi_topo=topo(numa=("0-1",) * 4),
        pci=PciFacts(tuple(PciGpu(f"0000:{i:02x}:00.0", "nvidia", i // 2) for i in range(GPUS))),
    )

    host = host_of(found)

    assert [g.numa_node for g in host.gpus] == [0, 0, 1, 1]
    assert "numa-shared" in codes(host)


def test_without_a_matrix_links_are_unknown_and_nics_follow_numa():
    found = facts(
        nvidia_smi_topo=None,
        pci=PciFacts(tuple(PciGpu(f"0000:{i:02x}:00.0", "nvidia", i // 2) for i in range(GPUS))),
    )

    host = host_of(found)

    assert host.gpu_links[0] == ("X", None, None, None)
    assert host.nvlink_islands == ()
    assert dict(host.gpu_nics)[3] == ("mlx5_1",)
    assert "links-unknown" in codes(host)


def test_ports_that_are_down_have_no_rate():
    found = facts(infiniband=(port("mlx5_0"), port("mlx5_1", "down", 40 * 10**9)))

    host = host_of(found)

    down = next(nic for nic in host.nics if nic.name == "mlx5_1")
    assert (down.state, down.rate_bits_s) == ("down", None)
    assert "port-down" in codes(host)


def test_declared_gpus_stand_in_only_where_there_are_none():
    entry = HostEntry("gpu-01", "local", simulated_gpus=SimulatedGpus(8, "H100", 80 * GIB))
    absent = facts(nvidia_smi_csv=SmiFacts(is_installed=False), nvidia_smi_topo=TopoFacts((), ()))

    simulated, real = host_of(absent, entry), host_of(facts(), entry)

    assert len(simulated.gpus) == 8
    assert all(g.is_simulated for g in simulated.gpus)
    assert simulated.nvlink_islands == (tuple(range(8)),)
    assert "gpu-simulated" in codes(simulated)
    assert not any(g.is_simulated for g in real.gpus)
    assert "gpu-simulated-ignored" in codes(real)


def test_hostile_facts_are_cleaned_and_bounded():
    name = "H100\x1b[31m\n[red]" + "A" * 2**20
    found = facts(
        nvidia_smi_csv=SmiFacts((gpu(0, name=name),)),
        system=system(host_name="\x1b]0;x\x07" + "h" * 2**20, machine_id="m\x00\x1b[2J"),
    )

    host = host_of(found)

    assert len(host.gpus[0].name) <= 80
    assert "\x1b" not in repr(host).encode().decode("unicode_escape", "ignore")
    assert "\n" not in host.gpus[0].name
    assert max(len(value) for _, value in host.extra) <= 2000


def test_the_data_address_follows_the_way_we_came_in():
    nets = (
        NetFacts("eth0", "up", 10**9, is_physical=True, addresses=("203.0.113.5", "10.1.0.5")),
        NetFacts("eth1", "up", 10**10, is_physical=True, addresses=("10.2.0.5",)),
    )
    own = HostEntry("gpu-01", "192.0.2.1", data_address="10.9.9.9")

    assert host_of(facts(), own).data_address == "10.9.9.9"
    assert host_of(facts(system=system(ssh_address=None, nets=nets))).data_address == "10.2.0.5"
    assert host_of(facts(), HostEntry("gpu-01", "local")).data_address == "127.0.0.1"
    assert "public-address" in codes(host_of(facts(system=system(ssh_address="8.8.8.8"))))


def test_hosts_at_one_address_are_reported():
    entries = [HostEntry("a", "192.0.2.1"), HostEntry("b", "192.0.2.1", port=2222)]

    topology = assemble(entries, {"a": facts(), "b": facts()}, (), {})

    assert [w.code for w in topology.warnings] == ["shared-address"]


def test_a_python_is_chosen_by_the_inventory_else_the_hosts_own():
    old, own, new = (
        PythonFacts("/usr/bin/python3.9", "3.9.2"),
        PythonFacts("/usr/bin/python3", "3.11.2"),
        PythonFacts("/opt/py/bin/python3", "3.13.0"),
    )

    assert choose_python((old, own, new), None) == own
    assert choose_python((old, own, new), "/opt/py/bin/python3") == new
    assert choose_python((old,), None) is None
    assert choose_python((own,), "/opt/none/python3") is None


def test_a_host_without_python_says_what_to_do():
    host = host_of(facts(system=system(pythons=())))

    assert host.python is None
    assert "no-python" in codes(host)


def test_more_gpus_than_a_host_can_have_are_cut_and_it_is_said():
    cards = tuple(gpu(i, uuid=f"GPU-{i:08x}") for i in range(5000))
    host = host_of(facts(nvidia_smi_csv=SmiFacts(cards), nvidia_smi_topo=None))

    assert [g.index for g in host.gpus] == list(range(128))
    assert "facts-cut" in codes(host)


def test_a_matrix_made_to_be_hard_ends_soon_and_its_islands_are_islands():
    """Every GPU but two of its neighbours is joined to it: 3^20 largest sets."""
    count = 60
    links = tuple(
        tuple("X" if a == b else "SYS" if a // 3 == b // 3 else "NV4" for b in range(count))
        for a in range(count)
    )
    islands = nvlink_islands(links)

    assert all(links[a][b] == "NV4" for island in islands for a in island for b in island if a != b)
    assert len(islands[0]) == 20
