"""How fast KV moves between engines: over NVLink or PCIe in one host, over the hosts' network else. Pure."""

from collections.abc import Sequence

from dynctl.core.hardware import Host
from dynctl.planner.grouping import num_nvlinks
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import Group

ETHERNET_BYTES_S = 10e9 / 8
"""Taken between hosts whose link rate is unknown."""


def transfer_bytes_s(groups: Sequence[Group]) -> float:
    """How fast KV moves between engines on these groups: the slowest way any two of them may have to go."""
    hosts = {group.host.name: group.host for group in groups}
    speeds = [_inside_bytes_s(group) for group in groups] if len(hosts) == 1 else []
    speeds += [_outside_bytes_s(host) for host in hosts.values()] if len(hosts) > 1 else []
    return min(speeds, default=ETHERNET_BYTES_S)


def _inside_bytes_s(group: Group) -> float:
    """Between engines of one host: NVLink where every GPU has it, else PCIe."""
    spec = find_spec(group.gpus[0].name)
    if spec is None:
        return ETHERNET_BYTES_S
    links = [
        cell for i in group.positions for j, cell in enumerate(group.host.gpu_links[i]) if j != i
    ]
    is_nvlink = bool(links) and all(num_nvlinks(cell) for cell in links)
    per_gpu = spec.link_bytes_s if is_nvlink and spec.link_bytes_s else spec.pcie_bytes_s / 2
    return per_gpu * len(group.positions)


def _outside_bytes_s(host: Host) -> float:
    """Out of a host: all RDMA ports that are up, else its fastest network device, else 10 Gb/s taken."""
    up = [nic for nic in host.nics if nic.state == "up" and nic.rate_bits_s]
    rdma = [nic.rate_bits_s or 0 for nic in up if nic.kind != "ethernet"]
    plain = [nic.rate_bits_s or 0 for nic in up if nic.kind == "ethernet"]
    return (sum(rdma) or max(plain, default=0)) / 8 or ETHERNET_BYTES_S
