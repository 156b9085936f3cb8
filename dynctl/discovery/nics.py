"""The network of a host, from whichever tools told of it: RDMA ports merged over tools, devices, what is near which GPU.

Not here: GPUs (`gpus`), what a user must be told (`judge`).
Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from dynctl.core.hardware import Gpu, Nic
from dynctl.core.text import clean
from dynctl.discovery import rdma
from dynctl.discovery.bounds import MAX_ITEMS
from dynctl.discovery.facts import (
    HostFacts,
    NetFacts,
    NetworkFacts,
    PciFacts,
    RdmaFacts,
    RdmaPort,
    SystemFacts,
    TopoFacts,
)
from dynctl.discovery.pcitree import PciTree
from dynctl.planner.grouping import nearest

TOOLS = ("ibstat", "ibstatus", "ibv_devinfo", "rdma_link", "show_gids", "ibdev2netdev")
"""After sysfs, which tells most; for each fact the first that knows it counts."""
_UNKNOWN = {None, "", "unknown", ()}
_STATES = {"active": "up", "down": "down", "init": "down", "armed": "down"}
_KINDS = {"infiniband": "infiniband", "ethernet": "roce"}
_MANAGED_FUNCTIONS = 3
"""This many functions of one card, beside other cards, are no ordinary dual-port NIC."""


def ports_of(found: HostFacts) -> tuple[RdmaPort, ...]:
    """Every RDMA port once, each fact from the first tool that knows it; mlx5_2 before mlx5_10."""
    sysfs = found.facts.get("infiniband")
    lists: list[Sequence[object]] = [sysfs] if isinstance(sysfs, tuple) else []
    lists += [facts.ports for tool in TOOLS if (facts := found.fact(tool, RdmaFacts))]
    merged: dict[tuple[str, int], dict[str, object]] = {}
    for ports in lists:
        for port in ports[:MAX_ITEMS]:
            if isinstance(port, RdmaPort):
                into = merged.setdefault((port.device, port.port), {})
                for each in fields(RdmaPort):
                    value = getattr(port, each.name)
                    if into.get(each.name) in _UNKNOWN:
                        into[each.name] = value
    return tuple(
        RdmaPort(**values)  # type: ignore[arg-type]  # the fields of the same class
        for _, values in sorted(merged.items(), key=lambda item: (_natural(item[0][0]), item[0][1]))
    )


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.split(r"(\d{1,9})", name)
    )


def nics_of(found: HostFacts, system: SystemFacts, topo: TopoFacts) -> tuple[Nic, ...]:
    """RDMA devices first, then those only the GPU matrix names, then network devices."""
    ports = ports_of(found)
    nets = {net.name: net for net in system.nets}
    network = found.fact("network", NetworkFacts) or NetworkFacts()
    bonds = {m: bond for bond, members in network.bonds for m in (*members, bond)}
    managed = _management(ports)
    per_device: dict[str, int] = {}
    for port in ports:
        per_device[port.device] = per_device.get(port.device, 0) + 1
    nics = [
        _rdma(port, nets, bonds, is_split=per_device[port.device] > 1, is_management=port.device in managed)
        for port in ports
    ]  # fmt: skip
    known = {nic.device for nic in nics}
    nics += [
        Nic(clean(n, 64), "rdma", "unknown", bond=n if "bond" in n else None)
        for n in topo.nic_names
        if n not in known
    ]
    nics += [
        Nic(
            clean(net.name, 64),
            "ethernet",
            net.state,
            net.rate_bits_s,
            net.numa_node,
            clean(net.name, 64),
            net.addresses,
            mtu_bytes=net.mtu_bytes,
            bond=bonds.get(net.name),
        )
        for net in system.nets
        if net.addresses or net.is_physical
    ]
    return tuple({nic.name: nic for nic in nics}.values())


def _rdma(
    port: RdmaPort,
    nets: Mapping[str, NetFacts],
    bonds: Mapping[str, str],
    *,
    is_split: bool,
    is_management: bool,
) -> Nic:
    name = clean(port.device, 64) + (f":{port.port}" if is_split else "")
    net = nets.get(port.netdev or "")
    card = clean(port.hca_type, 20) if port.hca_type else None
    bond = bonds.get(port.netdev or "")
    if bond is None and (port.netdev or "").startswith("bond"):
        bond = port.netdev
    if bond is None and "bond" in port.device:
        bond = port.device
    return Nic(
        name=name,
        kind=_KINDS.get(port.link_layer, "rdma"),
        state=_STATES.get(port.state, "unknown"),
        # The rate of a port that is not active is a placeholder.
        rate_bits_s=port.rate_bits_s if port.state == "active" else None,
        numa_node=port.numa_node,
        netdev=clean(port.netdev, 64) if port.netdev else None,
        addresses=net.addresses if net else (),
        port=port.port,
        physical=clean(port.physical, 32) if port.physical else None,
        card=card,
        rate_max_bits_s=rdma.CARD_RATES_BITS_S.get(card or ""),
        num_lanes=port.num_lanes if port.state == "active" else None,
        mtu_bytes=port.mtu_bytes or (net.mtu_bytes if net else None),
        num_link_downed=port.num_link_downed,
        gids=port.gids,
        pci_bus_id=port.pci_bus_id,
        system_guid=port.system_guid,
        bond=clean(bond, 64) if bond else None,
        is_management=is_management,
    )


def _management(ports: Sequence[RdmaPort]) -> frozenset[str]:
    """Functions of one card that serve the NVSwitch subnet manager: many behind one GUID, beside other cards."""
    cards: dict[str, set[str]] = {}
    for port in ports:
        if port.system_guid and set(port.system_guid) != {"0"} and port.link_layer == "infiniband":
            cards.setdefault(port.system_guid, set()).add(port.device)
    return frozenset(
        device
        for devices in cards.values()
        if len(devices) >= _MANAGED_FUNCTIONS and len(cards) > 1
        for device in devices
    )


def gpu_nic_links(
    gpus: Sequence[Gpu], nics: Sequence[Nic], topo: TopoFacts, pci: PciFacts
) -> tuple[tuple[str, ...], tuple[tuple[str | None, ...], ...]]:
    """Every GPU's link to every RDMA device: by the driver's matrix, else by the bridges of the PCI bus."""
    if topo.nic_names:
        where = {index: i for i, index in enumerate(topo.gpu_indexes)}
        rows = tuple(
            topo.nic_links[where[gpu.index]]
            if gpu.index in where
            else (None,) * len(topo.nic_names)
            for gpu in gpus
        )
        return tuple(clean(name, 64) for name in topo.nic_names), rows
    tree = PciTree(pci)
    placed = [nic for nic in nics if nic.kind != "ethernet" and nic.pci_bus_id]
    rows = tuple(
        tuple(
            tree.link(gpu.pci_bus_id, nic.pci_bus_id) if gpu.pci_bus_id and nic.pci_bus_id else None
            for nic in placed
        )
        for gpu in gpus
    )
    if not any(cell for row in rows for cell in row):
        return (), ()
    return tuple(nic.name for nic in placed), rows


def nearest_nics(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    names: Sequence[str],
    links: Sequence[Sequence[str | None]],
    *,
    may_lack_some: bool = False,
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Per GPU its nearest RDMA devices: by the links, else those on its NUMA node.

    Where some links are unknown, or columns are missing, only a link that no other can beat tells the nearest.
    """
    on_node = [nic for nic in nics if nic.kind != "ethernet" and not nic.is_management]
    found = []
    for i, gpu in enumerate(gpus):
        near: tuple[str, ...] = ()
        if links:
            nearer = nearest(links[i])
            is_sure = not may_lack_some and None not in links[i]
            if is_sure or any(links[i][k] == "PIX" for k in nearer):
                near = tuple(names[k] for k in nearer)
        elif gpu.numa_node is not None:
            near = tuple(nic.name for nic in on_node if nic.numa_node == gpu.numa_node)
        found.append((gpu.index, near))
    return tuple(found) if any(near for _, near in found) else ()
