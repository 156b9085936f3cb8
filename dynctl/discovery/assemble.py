"""Facts of all hosts and what the inventory says of them, put together into a Topology.

Not here: shell text, running anything, what a user must be told about it (`judge`).
Pure.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dynctl.core.hardware import Gpu, GpuProcess, GpuState, Host, HostFailure, Nic, Topology
from dynctl.core.inventory import HostEntry, SimulatedGpus
from dynctl.core.text import clean
from dynctl.core.units import GIB
from dynctl.discovery.facts import (
    GpuFacts,
    GpuProcessFacts,
    HostFacts,
    ListedGpu,
    PciGpu,
    PythonFacts,
    RdmaPort,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.discovery.judge import judge_host, judge_topology
from dynctl.planner.grouping import nearest, nvlink_islands
from dynctl.planner.peaks import find_spec

T = TypeVar("T")

MIN_PYTHON = (3, 11)
USED_PROBES = frozenset(
    {"infiniband", "nvidia_smi_csv", "nvidia_smi_list", "nvidia_smi_topo", "pci", "system"}
)
"""Probes whose facts have a place in Host; others are kept as text in `Host.extra`."""


def assemble(
    entries: Sequence[HostEntry],
    facts: Mapping[str, HostFacts],
    failures: Sequence[HostFailure],
    own_pids: Mapping[str, frozenset[int]],
) -> Topology:
    """Put hosts together, in the inventory's order."""
    reached = [entry for entry in entries if entry.name in facts]
    is_alone = all(entry.is_local for entry in entries)
    hosts = tuple(
        assemble_host(entry, facts[entry.name], own_pids.get(entry.name, frozenset()), is_alone)
        for entry in reached
    )
    return Topology(hosts, tuple(failures), judge_topology(hosts))


def assemble_host(
    entry: HostEntry, found: HostFacts, own_pids: frozenset[int], is_alone: bool
) -> Host:
    """Describe one host; what a failed probe would have told stays unknown and is a warning."""
    system = _fact(found, "system", SystemFacts) or SystemFacts()
    topo = _fact(found, "nvidia_smi_topo", TopoFacts) or TopoFacts((), ())
    gpus, links = _gpus(entry, found, topo, system, own_pids)
    nics = _nics(found, system, topo)
    python = choose_python(system.pythons, entry.python)
    host = Host(
        name=entry.name,
        address=entry.address,
        data_address=entry.data_address or _data_address(entry, system, is_alone),
        is_local=entry.is_local,
        gpus=gpus,
        gpu_links=links,
        nvlink_islands=tuple(
            tuple(gpus[i].index for i in island) for island in nvlink_islands(links)
        ),
        gpu_nics=_gpu_nics(gpus, nics, topo),
        nics=nics,
        num_cpus=system.num_cpus,
        cpu_slots=entry.cpu_slots,
        memory_bytes=system.memory_bytes,
        disk_free_bytes=system.disk_free_bytes,
        boot_id=clean(system.boot_id, 64),
        machine_id=clean(system.machine_id, 64),
        python=python.path if python else None,
        python_version=python.version if python else None,
        platform=_platform(system),
        has_systemd_system=system.has_systemd,
        has_systemd_user=system.has_systemd_user,
        has_linger=system.has_linger,
        is_root=system.uid == 0,
        labels=entry.labels,
        extra=_extra(found, system),
    )
    return judge_host(host, found, topo, entry)


def _fact(found: HostFacts, probe: str, kind: type[T]) -> T | None:
    fact = found.facts.get(probe)
    return fact if isinstance(fact, kind) else None


def _extra(found: HostFacts, system: SystemFacts) -> tuple[tuple[str, str], ...]:
    known = {"host_name": clean(system.host_name), "kernel": clean(system.kernel), "user": clean(system.user)}  # fmt: skip
    if found.identity:
        known["host_key"] = clean(found.identity)
    smi = _fact(found, "nvidia_smi_csv", SmiFacts)
    if smi and smi.gpus and smi.gpus[0].driver_version:
        known["driver"] = clean(smi.gpus[0].driver_version)
    known |= {
        name: clean(repr(fact), 2000)
        for name, fact in found.facts.items()
        if name not in USED_PROBES
    }
    return tuple(sorted(known.items()))


def choose_python(pythons: Sequence[PythonFacts], wanted: str | None) -> PythonFacts | None:
    """The interpreter the inventory names, else the first usable one: the host's own python3 comes first."""
    usable = [p for p in pythons if p.implementation == "cpython" and p.minor >= MIN_PYTHON]
    if wanted is not None:
        name = wanted.removeprefix("~")
        return next((p for p in usable if p.path == wanted or p.path.endswith(name)), None)
    return usable[0] if usable else None


def _platform(system: SystemFacts) -> str:
    libc = re.match(r"(glibc|musl)-(\d+\.\d+)", system.libc)
    return f"{libc[1]}-{libc[2]}-{clean(system.arch, 20)}" if libc and system.arch else ""


def _gpus(
    entry: HostEntry,
    found: HostFacts,
    topo: TopoFacts,
    system: SystemFacts,
    own_pids: frozenset[int],
) -> tuple[tuple[Gpu, ...], tuple[tuple[str | None, ...], ...]]:
    smi = _fact(found, "nvidia_smi_csv", SmiFacts)
    pci: Sequence[PciGpu] = [p for p in _all(found, "pci", PciGpu) if p.vendor == "nvidia"]
    if smi is None or (not smi.gpus and not smi.broken):
        gpus = _from_bus(pci) if "nvidia_smi_csv" in found.failures else ()
        if not gpus and entry.simulated_gpus is not None:
            return _simulated(entry.name, entry.simulated_gpus)
    else:
        slices = {g.uuid: len(g.slices) for g in _all(found, "nvidia_smi_list", ListedGpu)}
        numa = {_bus(p.bus_id): p.numa_node for p in pci}
        gpus = _real(smi, topo, system, own_pids, slices, numa)
    where = {index: i for i, index in enumerate(topo.gpu_indexes)}
    links = tuple(
        tuple(
            "X" if a.index == b.index else _link(topo, where.get(a.index), where.get(b.index))
            for b in gpus
        )
        for a in gpus
    )
    return gpus, links


def _all(found: HostFacts, probe: str, kind: type[T]) -> list[T]:
    fact = found.facts.get(probe)
    return [each for each in fact if isinstance(each, kind)] if isinstance(fact, tuple) else []


def _link(topo: TopoFacts, a: int | None, b: int | None) -> str | None:
    return None if a is None or b is None else topo.links[a][b]


def _from_bus(pci: Sequence[PciGpu]) -> tuple[Gpu, ...]:
    """GPUs the driver cannot tell about: there, but of unknown state; never taken for none."""
    return tuple(
        Gpu(
            index=i,
            uuid=f"unknown-{card.bus_id}",
            name="NVIDIA GPU",
            memory_bytes=0,
            pci_bus_id=card.bus_id,
            numa_node=card.numa_node,
            state=GpuState.UNKNOWN,
        )
        for i, card in enumerate(sorted(pci, key=lambda card: card.bus_id))
    )


def _simulated(
    host_name: str, wish: SimulatedGpus
) -> tuple[tuple[Gpu, ...], tuple[tuple[str | None, ...], ...]]:
    """Declared GPUs, joined the way boards of that product are."""
    spec = find_spec(wish.name)
    label = f"NV{spec.num_nvlinks}" if spec and spec.num_nvlinks else "SYS"
    count = range(wish.count)
    gpus = tuple(
        Gpu(
            index=i,
            uuid=f"SIM-{host_name}-{i}",
            name=wish.name,
            memory_bytes=wish.memory_bytes,
            memory_used_bytes=0,
            is_simulated=True,
        )
        for i in count
    )
    return gpus, tuple(tuple("X" if a == b else label for b in count) for a in count)


def _real(
    smi: SmiFacts,
    topo: TopoFacts,
    system: SystemFacts,
    own_pids: frozenset[int],
    slices: Mapping[str, int],
    numa: Mapping[str, int | None],
) -> tuple[Gpu, ...]:
    broken = dict(smi.broken)
    gpus = []
    for card in smi.gpus:
        processes = tuple(
            _process(process, own_pids)
            for process in smi.processes
            if process.gpu_uuid == card.uuid
        )
        memory = card.memory_bytes if card.memory_bytes is not None else system.memory_bytes
        gpus.append(
            Gpu(
                index=card.index,
                uuid=card.uuid,
                name=clean(card.name, 80),
                memory_bytes=memory,
                memory_used_bytes=card.memory_used_bytes,
                pci_bus_id=card.pci_bus_id,
                numa_node=_numa(card, topo, numa),
                state=_state(card, processes, broken, slices),
                processes=processes,
            )
        )
    seen = {gpu.index for gpu in gpus}
    for index, text in smi.broken:
        if index >= 0 and index not in seen:
            state = (
                GpuState.LOST if "lost" in text.lower() or "handle" in text else GpuState.UNKNOWN
            )
            gpus.append(Gpu(index, f"unknown-{index}", "NVIDIA GPU", 0, state=state))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _process(process: GpuProcessFacts, own_pids: frozenset[int]) -> GpuProcess:
    return GpuProcess(
        pid=process.pid,
        name=clean(process.name or "hidden", 80),
        user=process.user,
        memory_bytes=process.memory_bytes,
        is_ours=process.is_tagged or process.pid in own_pids,
    )


def _state(
    card: GpuFacts,
    processes: Sequence[GpuProcess],
    broken: Mapping[int, str],
    slices: Mapping[str, int],
) -> GpuState:
    """Lost, cut into slices, held by strangers, or free; memory nobody admits to holding counts as a stranger's."""
    if card.index in broken:
        return GpuState.LOST if "lost" in broken[card.index].lower() else GpuState.UNKNOWN
    if card.is_mig or slices.get(card.uuid):
        return GpuState.MIG
    if any(not process.is_ours for process in processes):
        return GpuState.BUSY
    if not processes and card.memory_used_bytes is not None and card.memory_bytes:
        allowed = max(GIB, card.memory_bytes // 40)
        if card.memory_used_bytes > allowed:
            return GpuState.BUSY
    return GpuState.FREE


def _bus(bus_id: str) -> str:
    """`00000000:1B:00.0` and `0000:1b:00.0` are one place."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa(card: GpuFacts, topo: TopoFacts, bus: Mapping[str, int | None]) -> int | None:
    """What the driver says, else what the bus says; a list of nodes counts by its first only where lists differ."""
    text = None
    if card.index in topo.gpu_indexes and topo.numa_affinity:
        text = topo.numa_affinity[topo.gpu_indexes.index(card.index)]
    if text is not None and text.isdigit():
        return int(text)
    if card.pci_bus_id is not None and (node := bus.get(_bus(card.pci_bus_id))) is not None:
        return node
    if text is not None and len(set(topo.numa_affinity)) == len(topo.numa_affinity) > 1:
        first = re.match(r"\d{1,4}", text)
        return int(first[0]) if first else None
    return None


def _nics(found: HostFacts, system: SystemFacts, topo: TopoFacts) -> tuple[Nic, ...]:
    ports = _all(found, "infiniband", RdmaPort)
    nets = {net.name: net for net in system.nets}
    kinds = {"infiniband": "infiniband", "ethernet": "roce"}
    nics = [
        Nic(
            name=clean(port.device, 64),
            kind=kinds.get(port.link_layer, "rdma"),
            state={"active": "up", "down": "down", "init": "down", "armed": "down"}.get(
                port.state, "unknown"
            ),
            # The rate of a port that is not active is a placeholder.
            rate_bits_s=port.rate_bits_s if port.state == "active" else None,
            numa_node=port.numa_node,
            netdev=port.netdev,
            addresses=nets[port.netdev].addresses if port.netdev in nets else (),
        )
        for port in sorted(ports, key=lambda port: (_natural(port.device), port.port))
    ]
    known = {nic.name for nic in nics}
    nics += [Nic(clean(n, 64), "rdma", "unknown") for n in topo.nic_names if n not in known]
    nics += [
        Nic(
            net.name, "ethernet", net.state, net.rate_bits_s, net.numa_node, net.name, net.addresses
        )
        for net in system.nets
        if net.addresses or net.is_physical
    ]
    return tuple({nic.name: nic for nic in nics}.values())


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """mlx5_2 before mlx5_10."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.split(r"(\d{1,9})", name)
    )


def _gpu_nics(
    gpus: Sequence[Gpu], nics: Sequence[Nic], topo: TopoFacts
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Per GPU its nearest RDMA devices: by the matrix, else those on its NUMA node."""
    rdma = [nic for nic in nics if nic.kind != "ethernet"]
    found = []
    for gpu in gpus:
        names: tuple[str, ...] = ()
        if topo.nic_names and gpu.index in topo.gpu_indexes:
            row = topo.nic_links[topo.gpu_indexes.index(gpu.index)]
            names = tuple(topo.nic_names[i] for i in nearest(row))
        elif gpu.numa_node is not None:
            names = tuple(nic.name for nic in rdma if nic.numa_node == gpu.numa_node)
        found.append((gpu.index, names))
    return tuple(found) if any(names for _, names in found) else ()


def _data_address(entry: HostEntry, system: SystemFacts, is_alone: bool) -> str:
    """Where other hosts reach this one: the address our own connection came in on; loopback when there is no other host."""
    if is_alone:
        return "127.0.0.1"
    if system.ssh_address and not entry.is_local:
        return system.ssh_address
    up = [net for net in system.nets if net.state != "down" and net.is_physical] or list(
        system.nets
    )
    addresses = [
        a for net in sorted(up, key=lambda n: -(n.rate_bits_s or 0)) for a in net.addresses
    ]
    ranked = sorted(addresses, key=_address_order)
    return ranked[0] if ranked else ("127.0.0.1" if entry.is_local else entry.address)


def _address_order(text: str) -> int:
    """Private IPv4 first, then private IPv6, then the rest."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return 9
    return (0 if address.is_private else 2) + (0 if address.version == 4 else 1)
