"""What a user must be told about a host: each warning with a code of docs/findings.md.

Not here: how facts are found or put together.
Pure.
"""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dynctl.core.hardware import GpuState, Host, HostWarning
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.core.units import GIB, format_bytes
from dynctl.discovery.facts import (
    HostFacts,
    ListedGpu,
    PciGpu,
    RdmaPort,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.planner.grouping import link_rank, num_nvlinks

_MIN_DISK_BYTES = 2 * GIB
_SLOW_BITS_S = 50 * 10**9


@dataclass(frozen=True, slots=True)
class _Case:
    host: Host
    found: HostFacts
    topo: TopoFacts
    entry: HostEntry


def judge_host(host: Host, found: HostFacts, topo: TopoFacts, entry: HostEntry) -> Host:
    """Return the host with its warnings, in a fixed order."""
    case = _Case(host, found, topo, entry)
    warnings = [HostWarning(code, clean(text, 400)) for rule in _RULES for code, text in rule(case)]
    return replace(host, warnings=tuple(warnings))


def judge_topology(hosts: Sequence[Host]) -> tuple[HostWarning, ...]:
    """Warnings that only the whole shows."""
    found = []
    by_address: dict[str, list[str]] = {}
    for host in hosts:
        by_address.setdefault(host.data_address, []).append(host.name)
    for address, names in sorted(by_address.items()):
        if len(names) > 1:
            found.append(
                HostWarning(
                    "shared-address",
                    f"{', '.join(names)} share the address {clean(address)}: they are taken for one machine when ports are given out",
                )
            )
    drivers = {dict(h.extra).get("driver") for h in hosts if h.gpus and "driver" in dict(h.extra)}
    if len(drivers) > 1:
        found.append(
            HostWarning(
                "drivers-differ",
                f"GPU drivers differ between hosts: {', '.join(sorted(str(d) for d in drivers))}",
            )
        )
    return tuple(found)


_Found = Iterator[tuple[str, str]]


def _probes(case: _Case) -> _Found:
    for name, cause in sorted(case.found.failures.items()):
        kind = case.found.kinds.get(name, "")
        code = (
            f"gpu-{kind.replace('_', '-')}"
            if name.startswith("nvidia_smi") and kind
            else "probe-failed"
        )
        if (
            name in {"nvidia_smi_list", "nvidia_smi_topo"}
            and case.found.kinds.get("nvidia_smi_csv") == kind != ""
        ):
            continue  # the same fault, said once
        yield code, f"{name}: {cause}"


def _gpu_states(case: _Case) -> _Found:
    listed = case.found.facts.get("nvidia_smi_list")
    slices = (
        {g.uuid: [s.profile for s in g.slices] for g in listed if isinstance(g, ListedGpu)}
        if isinstance(listed, tuple)
        else {}
    )
    for gpu in case.host.gpus:
        name = f"GPU{gpu.index}"
        if gpu.state is GpuState.MIG:
            cut = ", ".join(slices.get(gpu.uuid, [])) or "no slices"
            yield (
                "gpu-mig",
                f"{name} is in MIG mode ({cut}): slices cannot be joined for tensor parallelism; not used",
            )
        elif gpu.state is GpuState.BUSY:
            holders = ", ".join(
                f"{p.name} (pid {p.pid}, {p.user or 'unknown user'}, {format_bytes(p.memory_bytes) if p.memory_bytes is not None else 'unknown memory'})"
                for p in gpu.processes
                if not p.is_ours
            )
            used = (
                format_bytes(gpu.memory_used_bytes) if gpu.memory_used_bytes is not None else "some"
            )
            yield (
                "gpu-busy",
                f"{name} is in use: {holders or used + ' held by a process that cannot be seen'}",
            )
        elif gpu.state is GpuState.LOST:
            yield (
                "gpu-lost",
                f"{name} does not answer the driver: see dmesg for Xid 79, reboot the host; not used",
            )
        elif gpu.state is GpuState.UNKNOWN:
            yield "gpu-unknown", f"{name}: state unknown; not used"


def _gpu_count(case: _Case) -> _Found:
    smi = case.found.facts.get("nvidia_smi_csv")
    cards = case.found.facts.get("pci")
    on_bus = [c for c in cards if isinstance(c, PciGpu)] if isinstance(cards, tuple) else []
    nvidia = [c for c in on_bus if c.vendor == "nvidia"]
    if isinstance(smi, SmiFacts):
        if smi.is_installed and len(nvidia) > len(case.host.gpus):
            yield (
                "gpu-missing",
                f"{len(nvidia)} NVIDIA devices on the PCI bus, the driver shows {len(case.host.gpus)}",
            )
        if not smi.is_installed and nvidia:
            yield (
                "gpu-driver-absent",
                f"{len(nvidia)} NVIDIA devices on the PCI bus but no nvidia-smi: install the driver",
            )
        if not smi.are_processes_known:
            yield (
                "gpu-owners-hidden",
                "the driver hides who holds GPU memory: judged by free memory alone",
            )
        if any(gpu.memory_bytes is None for gpu in smi.gpus):
            yield (
                "gpu-memory-unified",
                "nvidia-smi gives no memory size (unified memory): the host's memory is taken instead",
            )
    if not case.host.gpus and any(c.vendor == "amd" for c in on_bus) and _has_amd_compute(on_bus):
        yield "gpu-amd", "AMD GPUs are recognised but not supported by the engines yet"
    if len({gpu.name for gpu in case.host.gpus if not gpu.is_simulated and gpu.memory_bytes}) > 1:
        yield "gpu-mixed", "GPUs of different kinds: never joined into one tensor-parallel group"
    if any(gpu.is_simulated for gpu in case.host.gpus):
        yield (
            "gpu-simulated",
            f"{len(case.host.gpus)} × {case.host.gpus[0].name} are declared in the inventory, not present",
        )
    elif case.entry.simulated_gpus is not None and case.host.gpus:
        yield "gpu-simulated-ignored", "real GPUs found: simulated_gpus of the inventory is ignored"


def _has_amd_compute(cards: Sequence[PciGpu]) -> bool:
    return sum(1 for card in cards if card.vendor == "amd") > 1


def _links(case: _Case) -> _Found:
    host, count = case.host, len(case.host.gpus)
    for note in case.topo.notes[:5]:
        yield "topology-damaged", f"topo -m: {note}"
    if count < 2:
        return
    pairs = [host.gpu_links[a][b] for a in range(count) for b in range(a)]
    unknown = sum(1 for label in pairs if label is None)
    if unknown:
        yield (
            "links-unknown",
            f"the link of {unknown} of {len(pairs)} GPU pairs is unknown: taken as the slowest when planning",
        )
    if not any(num_nvlinks(label) for label in pairs):
        yield "no-nvlink", "no NVLink between GPUs: tensor parallelism runs over PCIe"
    elif len(host.nvlink_islands) != 1 or len(host.nvlink_islands[0]) != count:
        yield (
            "nvlink-partial",
            f"NVLink joins only {' and '.join(str(list(i)) for i in host.nvlink_islands)}: larger groups cross PCIe",
        )
    if case.topo.p2p and any(
        cell not in {"OK", "X"} for row in case.topo.p2p for cell in row if cell
    ):
        yield (
            "p2p-off",
            "peer-to-peer is not supported between some GPUs: copies go through host memory",
        )


def _numa(case: _Case) -> _Found:
    topo = case.topo
    if len(topo.gpu_indexes) > 1 and topo.numa_affinity and len(set(topo.numa_affinity)) == 1:
        if topo.numa_affinity[0] is None:
            if all(gpu.numa_node is None for gpu in case.host.gpus):
                yield "numa-unknown", "the NUMA node of the GPUs is unknown"
        elif not topo.numa_affinity[0].isdigit():
            yield (
                "numa-shared",
                f"NUMA affinity is {topo.numa_affinity[0]} for every GPU (restricted CPU set or virtual machine): not used for pinning",
            )
    if any(node is not None for node in topo.gpu_numa_id):
        yield (
            "gpu-memory-node",
            "GPU memory forms NUMA nodes of its own: pin processes to nodes that have CPUs",
        )


def _nics(case: _Case) -> _Found:
    host, topo = case.host, case.topo
    rdma = [nic for nic in host.nics if nic.kind != "ethernet"]
    for nic in rdma:
        if nic.state == "down":
            yield "port-down", f"{nic.name} is down"
    ports = case.found.facts.get("infiniband")
    for port in ports if isinstance(ports, tuple) else ():
        if isinstance(port, RdmaPort) and port.state == "init":
            yield (
                "port-init",
                f"{port.device} port {port.port} waits in INIT: no subnet manager configured it",
            )
    if (
        topo.gpu_indexes
        and not topo.nic_names
        and not host.gpu_nics
        and host.gpus
        and not host.gpus[0].is_simulated
    ):
        yield (
            "nic-affinity-unknown",
            "which NIC is near which GPU is unknown (none listed by topo -m)",
        )
    if topo.nic_names:
        near = {name for _, names in host.gpu_nics for name in names}
        far = [
            i
            for i, row in zip(topo.gpu_indexes, topo.nic_links, strict=True)
            if max((link_rank(c) for c in row), default=0) == 1
        ]
        if far:
            yield (
                "nic-far",
                f"{', '.join(f'GPU{i}' for i in far)}: the nearest NIC is across the socket link (SYS)",
            )
        lonely = [name for name in topo.nic_names if name not in near]
        if lonely:
            yield (
                "nic-near-no-gpu",
                f"{', '.join(lonely)}: nearest to no GPU (management or storage)",
            )
    bonds = [
        nic.name for nic in rdma if "bond" in nic.name or (nic.netdev or "").startswith("bond")
    ]
    if bonds:
        yield "nic-bonded", f"{', '.join(bonds)}: bonded devices"
    up = [nic.rate_bits_s for nic in rdma if nic.state == "up" and nic.rate_bits_s]
    if up and max(up) < _SLOW_BITS_S:
        yield (
            "rdma-slow",
            f"the fastest RDMA port runs at {max(up) / 1e9:g} Gb/s: slow for KV transfer",
        )


def _system(case: _Case) -> _Found:
    host = case.host
    system = case.found.facts.get("system")
    if host.python is None:
        wanted = (
            f"{case.entry.python} is not one"
            if case.entry.python
            else "none found on the usual paths"
        )
        yield (
            "no-python",
            f"no Python ≥ 3.11 ({wanted}): install one, or name it with python: in the inventory",
        )
    if not host.platform:
        yield "platform-unknown", "libc unknown: wheels for this host cannot be chosen"
    if isinstance(system, SystemFacts):
        if system.num_cpus < system.num_cpus_nominal:
            yield (
                "cpus-limited",
                f"{system.num_cpus} of {system.num_cpus_nominal} CPUs may be used (control group or affinity)",
            )
        if system.memory_bytes < system.memory_nominal_bytes:
            yield (
                "memory-limited",
                f"{format_bytes(system.memory_bytes)} of {format_bytes(system.memory_nominal_bytes)} memory may be used (control group)",
            )
    if host.disk_free_bytes is not None and host.disk_free_bytes < _MIN_DISK_BYTES:
        yield (
            "disk-low",
            f"only {format_bytes(host.disk_free_bytes)} free where dynctl keeps its files",
        )
    if not host.is_local and not host.is_root and host.has_systemd_system and not host.has_linger:
        yield (
            "no-linger",
            "without linger user units end at logout: run `loginctl enable-linger` on the host",
        )
    if _is_public(host.data_address):
        yield (
            "public-address",
            f"the data address {host.data_address} is public: set data_address to a private one",
        )


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


_RULES: tuple[Callable[[_Case], _Found], ...] = (
    _probes,
    _gpu_states,
    _gpu_count,
    _links,
    _numa,
    _nics,
    _system,
)
