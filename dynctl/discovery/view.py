"""A topology as the JSON document of `dynctl discover -o json`, and as cells of its table.

Not here: drawings (`drawing`).
Pure.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.links import LinkMeasurement
from dynctl.core.units import format_bytes
from dynctl.discovery.linkage import as_nvlink
from dynctl.planner.grouping import near_of, tp_groups

SCHEMA = "dynctl.topology/1"
_GROUP_SIZES = (2, 4, 8)
_UNCOUNTED = {
    f"gpu-{kind}"
    for kind in ("timeout", "driver-library-mismatch", "driver-not-loaded", "nvml-failed", "failed", "no-permission")
}  # fmt: skip
"""Warnings after which no GPU in the list does not mean that there is none."""


def document(topology: Topology) -> dict[str, Any]:
    """Make the JSON document: stable keys, everything from hosts cleaned when the topology was assembled."""
    return {
        "schema": SCHEMA,
        "hosts": [_host(host) for host in topology.hosts],
        "failures": [
            {"name": f.name, "cause": f.cause, "hint": f.hint, "exit_code": f.exit_code}
            for f in topology.failures
        ],
        "links": [_link(link) for link in topology.links],
        "unmeasured_links": [list(pair) for pair in topology.unmeasured()],
        "warnings": [{"code": w.code, "text": w.text} for w in topology.warnings],
    }


def _link(link: LinkMeasurement) -> dict[str, Any]:
    """One direction as `linktest` measured it, in short."""
    return {
        "source": link.source_name,
        "target": link.target_name,
        "kind": link.kind.value,
        "measured_unix_s": link.measured_unix_s,
        "bytes_s": link.bytes_s,
        "steady_bytes_s": link.steady_bytes_s,
        "nominal_bytes_s": link.nominal_bytes_s,
        "round_trip_p50_s": link.round_trip.p50_s if link.round_trip else None,
        "error": link.error,
    }


def groups_of(host: Host) -> dict[str, list[list[int]]]:
    """Tensor-parallel groups of a host by size, as GPU indexes, best first; GPUs in MIG mode form none."""
    near = near_of(host)
    links = as_nvlink(host.gpu_links)
    found = {}
    for size in _GROUP_SIZES:
        groups = tp_groups(links, near, size)
        if groups and not any(gpu.mig_slices for gpu in host.gpus):
            found[str(size)] = [[host.gpus[i].index for i in group] for group in groups]
    return found


def are_gpus_known(host: Host) -> bool:
    """Whether a host without GPUs in its list has none."""
    return host.are_gpus_known and not _UNCOUNTED & {warning.code for warning in host.warnings}


def _host(host: Host) -> dict[str, Any]:
    nearest = dict(host.gpu_nics)
    return {
        "name": host.name,
        "address": host.address,
        "data_address": host.data_address,
        "gpus": [_gpu(gpu, nearest.get(gpu.index, ())) for gpu in host.gpus],
        "gpus_known": are_gpus_known(host),
        "gpu_links": [list(row) for row in host.gpu_links],
        "nvlink_islands": [list(island) for island in host.nvlink_islands],
        "tp_groups": groups_of(host),
        "gpu_nic_links": {
            "nics": list(host.nic_names),
            "links": [list(row) for row in host.gpu_nic_links],
        },
        "p2p": {name: [list(row) for row in square] for name, square in host.p2p},
        "nics": [_nic(nic) for nic in host.nics],
        "numa_nodes": [asdict(node) for node in host.numa_nodes],
        "cpus": host.num_cpus,
        "cpus_nominal": host.num_cpus_nominal,
        "cpu_slots": host.cpu_slots,
        "memory_bytes": host.memory_bytes,
        "memory_nominal_bytes": host.memory_nominal_bytes,
        "disk_free_bytes": host.disk_free_bytes,
        "shm_bytes": host.shm_bytes,
        "shm_free_bytes": host.shm_free_bytes,
        "limits": {
            "session": asdict(host.session_limits),
            "unit": asdict(host.unit_limits),
            "agent": asdict(host.agent_limits),
        },
        "routes": [asdict(route) for route in host.routes],
        "listening_ports": list(host.listening_ports),
        "software": {
            **asdict(host.software),
            "engines": [
                {**asdict(engine), "packages": dict(engine.packages)}
                for engine in host.software.engines
            ],
        },
        "fabric": asdict(host.fabric),
        "acs_bridges": None if host.acs_bridges is None else list(host.acs_bridges),
        "clock": asdict(host.clock) if host.clock else None,
        "sshd": asdict(host.sshd),
        "unplaced_processes": [asdict(process) for process in host.unplaced_processes],
        "machine_id": host.machine_id,
        "boot_id": host.boot_id,
        "python": host.python,
        "python_version": host.python_version,
        "platform": host.platform,
        "systemd": {
            "system": host.has_systemd_system,
            "user": host.has_systemd_user,
            "linger": host.has_linger,
        },
        "is_root": host.is_root,
        "labels": dict(host.labels),
        "extra": dict(host.extra),
        "warnings": [{"code": w.code, "text": w.text} for w in host.warnings],
    }


def _gpu(gpu: Gpu, nearest: Sequence[str]) -> dict[str, Any]:
    rates = gpu.nvlink_rates_bytes_s
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes or None,
        "memory_used_bytes": gpu.memory_used_bytes,
        "pci_bus_id": gpu.pci_bus_id,
        # What the driver says, as it says it: a list of nodes is no node.
        "numa_node": gpu.numa_affinity if _is_list(gpu.numa_affinity) else gpu.numa_node,
        "cpu_numa_node": gpu.numa_node,
        "numa_affinity": gpu.numa_affinity,
        "cpu_affinity": gpu.cpu_affinity,
        "nearest_nics": list(nearest),
        "state": gpu.state.value,
        "is_simulated": gpu.is_simulated,
        "mig_slices": list(gpu.mig_slices),
        "nvlinks_active": None if rates is None else sum(rate is not None for rate in rates),
        "nvlink_gbyte_s": [None if rate is None else rate / 1e9 for rate in rates or ()],
        "health": asdict(gpu.health),
        "processes": [asdict(process) for process in gpu.processes],
    }


def _is_list(affinity: str | None) -> bool:
    return affinity is not None and not affinity.isdecimal()


def _nic(nic: Nic) -> dict[str, Any]:
    return {
        "name": nic.name,
        "kind": nic.kind,
        "state": nic.state,
        "rate_gbit_s": _gbit_s(nic.rate_bits_s),
        "rate_max_gbit_s": _gbit_s(nic.rate_max_bits_s),
        "numa_node": nic.numa_node,
        "netdev": nic.netdev,
        "addresses": list(nic.addresses),
        "port": nic.port,
        "physical": nic.physical,
        "card": nic.card,
        "lanes": nic.num_lanes,
        "mtu_bytes": nic.mtu_bytes,
        "link_downed": nic.num_link_downed,
        "gids": [asdict(gid) for gid in nic.gids],
        "pci_bus_id": nic.pci_bus_id,
        "bond": nic.bond,
        "is_management": nic.is_management,
    }


def _gbit_s(bits_s: int | None) -> float | None:
    return None if bits_s is None else bits_s / 1e9


def gpu_summary(host: Host) -> str:
    """`8 × H100 80GB HBM3 (1 busy)` in one cell; kinds and states that differ are all named."""
    kinds: dict[str, int] = {}
    for gpu in host.gpus:
        name = gpu.name.removeprefix("NVIDIA ") + (" simulated" if gpu.is_simulated else "")
        kinds[name] = kinds.get(name, 0) + 1
    states: dict[str, int] = {}
    for gpu in host.gpus:
        if gpu.state.value != "free":
            states[gpu.state.value] = states.get(gpu.state.value, 0) + 1
    text = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    odd = ", ".join(f"{count} {state}" for state, count in states.items())
    return (text or ("none" if are_gpus_known(host) else "unknown")) + (f" ({odd})" if odd else "")


def link_summary(host: Host) -> str:
    """`NV18 all` where every pair has the same link, else the islands."""
    count = len(host.gpus)
    labels = {host.gpu_links[a][b] for a in range(count) for b in range(a)}
    if not labels:
        return "–"
    if len(labels) == 1:
        return f"{labels.pop() or 'unknown'} all"
    if host.nvlink_islands:
        return "NVLink " + " ".join("{" + ",".join(map(str, i)) + "}" for i in host.nvlink_islands)
    known = sorted(label or "unknown" for label in labels)
    return "/".join(known)


def nic_summary(host: Host) -> str:
    """`8 × 400G ib` for the RDMA devices that are up, else the fastest network device."""
    rates: dict[tuple[str, int], int] = {}
    for nic in host.nics:
        if nic.state != "down" and (nic.kind != "ethernet" or nic.addresses):
            key = nic.kind, int((nic.rate_bits_s or 0) / 1e9)
            rates[key] = rates.get(key, 0) + 1
    rdma = {key: count for key, count in rates.items() if key[0] != "ethernet"}
    short = {"infiniband": "ib", "ethernet": "eth"}
    cells = [
        f"{count} × {f'{rate}G ' if rate else ''}{short.get(kind, kind)}"
        for (kind, rate), count in sorted(
            (rdma or rates).items(), key=lambda item: (-item[0][1], item[0][0])
        )
    ]
    return ", ".join(cells) or "none"


def memory_summary(host: Host) -> str:
    """`2.0 TiB` of the host, and its CPUs; nothing where no capture tells."""
    if not host.memory_bytes:
        return "–"
    return f"{host.num_cpus} CPU, {format_bytes(host.memory_bytes)}"
