"""A topology as the JSON document of `dynctl discover -o json`, and as lines for a terminal. Pure."""

from collections.abc import Sequence
from typing import Any

from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.text import clean
from dynctl.core.units import format_bytes
from dynctl.planner.grouping import near_of, tp_groups

SCHEMA = "dynctl.topology/1"
_GROUP_SIZES = (2, 4, 8)


def document(topology: Topology) -> dict[str, Any]:
    """Make the JSON document: stable keys, everything from hosts cleaned when the topology was assembled."""
    return {
        "schema": SCHEMA,
        "hosts": [_host(host) for host in topology.hosts],
        "failures": [
            {"name": f.name, "cause": f.cause, "hint": f.hint, "exit_code": f.exit_code}
            for f in topology.failures
        ],
        "warnings": [{"code": w.code, "text": w.text} for w in topology.warnings],
    }


def groups_of(host: Host) -> dict[str, list[list[int]]]:
    """Tensor-parallel groups of a host by size, as GPU indexes, best first."""
    near = near_of(host)
    found = {}
    for size in _GROUP_SIZES:
        groups = tp_groups(host.gpu_links, near, size)
        if groups:
            found[str(size)] = [[host.gpus[i].index for i in group] for group in groups]
    return found


def _host(host: Host) -> dict[str, Any]:
    nearest = dict(host.gpu_nics)
    return {
        "name": host.name,
        "address": host.address,
        "data_address": host.data_address,
        "gpus": [_gpu(gpu, nearest.get(gpu.index, ())) for gpu in host.gpus],
        "gpu_links": [list(row) for row in host.gpu_links],
        "nvlink_islands": [list(island) for island in host.nvlink_islands],
        "tp_groups": groups_of(host),
        "nics": [_nic(nic) for nic in host.nics],
        "cpus": host.num_cpus,
        "cpu_slots": host.cpu_slots,
        "memory_bytes": host.memory_bytes,
        "disk_free_bytes": host.disk_free_bytes,
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
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes or None,
        "memory_used_bytes": gpu.memory_used_bytes,
        "pci_bus_id": gpu.pci_bus_id,
        "numa_node": gpu.numa_node,
        "nearest_nics": list(nearest),
        "state": gpu.state.value,
        "is_simulated": gpu.is_simulated,
        "processes": [
            {
                "pid": p.pid,
                "name": p.name,
                "user": p.user,
                "memory_bytes": p.memory_bytes,
                "is_ours": p.is_ours,
            }
            for p in gpu.processes
        ],
    }


def _nic(nic: Nic) -> dict[str, Any]:
    return {
        "name": nic.name,
        "kind": nic.kind,
        "state": nic.state,
        "rate_gbit_s": None if nic.rate_bits_s is None else nic.rate_bits_s / 1e9,
        "numa_node": nic.numa_node,
        "netdev": nic.netdev,
        "addresses": list(nic.addresses),
    }


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
    return (text or "none") + (f" ({odd})" if odd else "")


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


def drawings(topology: Topology) -> list[tuple[list[str], tuple[str, ...]]]:
    """Each different matrix once, with the hosts that have it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for host in topology.hosts:
        if drawn := tuple(drawing(host)):
            found.setdefault(drawn, []).append(host.name)
    return [(names, drawn) for drawn, names in found.items()]


def drawing(host: Host, max_columns: int = 80) -> list[str]:
    """The GPU matrix of one host, with NUMA node and nearest NICs, at most `max_columns` wide."""
    if not host.gpus or len(host.gpus) < 2:
        return []
    width = max([4, *(len(cell or "?") for row in host.gpu_links for cell in row)]) + 1
    if 7 + width * len(host.gpus) > max_columns:
        return []
    nearest = dict(host.gpu_nics)
    lines = ["       " + "".join(f"GPU{g.index}".rjust(width) for g in host.gpus) + "  NUMA  NICs"]
    for gpu, row in zip(host.gpus, host.gpu_links, strict=True):
        cells = "".join((cell or "?").rjust(width) for cell in row)
        nics = ",".join(nearest.get(gpu.index, ())) or "–"
        numa = "–" if gpu.numa_node is None else str(gpu.numa_node)
        lines.append(clean_row(f"  {f'GPU{gpu.index}':<5}{cells}  {numa:>4}  {nics}", max_columns))
    return lines


def clean_row(text: str, max_columns: int) -> str:
    """Cut a drawn row to the width without joining its blanks."""
    return text if len(text) <= max_columns else text[: max_columns - 1] + "…"


def memory_summary(host: Host) -> str:
    """`2.0 TiB` of the host, and its CPUs."""
    return f"{host.num_cpus} CPU, {format_bytes(host.memory_bytes)}"


def failure_lines(topology: Topology) -> list[str]:
    """One line per host that failed, with the next step."""
    return [
        f"{clean(f.name, 60)}: {f.cause}" + (f" ({f.hint})" if f.hint else "")
        for f in topology.failures
    ]
