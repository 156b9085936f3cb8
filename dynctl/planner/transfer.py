"""How fast KV moves between engines: NVLink or PCIe inside a host, the measured or negotiated network between hosts.

A speed says where it comes from, since a plan trusts a measurement more than a device's name.
Not here: how long a transfer takes (`estimate`), measuring (`linktest`).
Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dynctl.core.hardware import Host, Topology
from dynctl.core.links import LinkKind, LinkMeasurement
from dynctl.core.plan import Pool
from dynctl.planner.grouping import num_nvlinks
from dynctl.planner.peaks import GpuSpec, find_spec
from dynctl.planner.placement import Group, near_nics

ETHERNET_BYTES_S = 10e9 / 8
"""Taken between hosts whose link rate is unknown."""
_spec = lru_cache(maxsize=256)(find_spec)
_PCIE_SHARE = 0.5
"""Of PCIe between two cards that cannot reach each other directly: the bytes go through main memory."""
_BEST_KINDS = (LinkKind.NIXL_VRAM, LinkKind.NIXL_DRAM_VRAM, LinkKind.NIXL_DRAM)


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second from a prefill engine to a decode engine, all their links together."""

    bytes_s: float
    how: str
    """`measured`, `nominal` or `assumed`, with what it is."""

    @property
    def is_measured(self) -> bool:
        """Whether linktest saw it."""
        return self.how.startswith("measured")


ASSUMED = Speed(ETHERNET_BYTES_S, "assumed: 10 Gb/s, the link rate is unknown")


def rank_bytes_s(speed: Speed, pools: Iterable[Pool]) -> float:
    """What one rank has of it: data-parallel ranks share the links of their engine, at the end that has more of them."""
    return speed.bytes_s / max(pool.parallelism.dp for pool in pools)


class Fabric:
    """What joins the GPUs of a topology."""

    def __init__(self, links: Iterable[LinkMeasurement] = ()) -> None:
        self._links: dict[tuple[str, str], dict[LinkKind, float]] = {}
        self._outside: dict[tuple[str, tuple[int, ...]], Speed] = {}
        self._inside: dict[tuple[str, tuple[int, ...]], Speed] = {}
        for link in links:
            if link.steady_bytes_s:
                kinds = self._links.setdefault((link.source_name, link.target_name), {})
                kinds[link.kind] = link.steady_bytes_s

    @classmethod
    def of(cls, topology: Topology) -> "Fabric":
        """The fabric of a discovered cluster."""
        return cls(topology.links)

    @property
    def has_measurements(self) -> bool:
        """Whether linktest ran between any two hosts."""
        return bool(self._links)

    def outside(self, group: Group) -> Speed:
        """Out of a group's host; remembered."""
        key = group.host.name, group.positions
        if key not in self._outside:
            self._outside[key] = outside(group)
        return self._outside[key]

    def reach(self, group: Group) -> Speed:
        """To whatever counterpart a router may pair it with, in another host or beside it; the slower of the two."""
        ways = [self.outside(group)]
        if len(group.positions) < len(group.host.gpus):
            ways.append(self.inside(group))
        return min(ways, key=lambda speed: speed.bytes_s)

    def inside(self, group: Group) -> Speed:
        """To a group of equal size beside it; remembered."""
        key = group.host.name, group.positions
        if key not in self._inside:
            self._inside[key] = inside_host(group)
        return self._inside[key]

    def pair(self, prefill: Group, decode: Group) -> Speed:
        """From one prefill engine to one decode engine."""
        if prefill.host.name == decode.host.name:
            return _inside(prefill, decode)
        ends = [self.outside(group) for group in (prefill, decode)]
        nominal = min(ends, key=lambda speed: speed.bytes_s)
        measured = self._measured(prefill.host.name, decode.host.name)
        rdma = [kind for kind in _BEST_KINDS if kind in measured]
        if rdma:
            # A host pair was measured; one engine cannot have more than its own devices carry.
            is_capped = _has_rdma(ends) and not _in_one_domain(prefill, decode)
            best = min(measured[rdma[0]], nominal.bytes_s if is_capped else measured[rdma[0]])
            return Speed(best, f"measured: {rdma[0].value}")
        if LinkKind.TCP in measured and not _has_rdma(ends):
            return Speed(measured[LinkKind.TCP], "measured: tcp")
        return nominal

    def _measured(self, source: str, target: str) -> dict[LinkKind, float]:
        return self._links.get((source, target), {})

    def worst(self, prefill: Sequence[Group], decode: Sequence[Group]) -> Speed:
        """The slowest pair: a router pairs any prefill engine with any decode engine."""
        return min(
            (self.pair(a, b) for a in _distinct(prefill) for b in _distinct(decode)),
            key=lambda speed: speed.bytes_s,
            default=ASSUMED,
        )

    def joined(self, groups: Sequence[Group], least_bytes_s: float) -> list[Group]:
        """The groups of which no pair of hosts was measured below a speed; the worst connected hosts go first."""
        hosts = {group.host.name for group in groups}
        while True:
            bad = [
                (a, b)
                for (a, b), kinds in self._links.items()
                if a in hosts and b in hosts and max(kinds.values()) < least_bytes_s
            ]
            if not bad:
                return [group for group in groups if group.host.name in hosts]
            counts = {name: sum(name in pair for pair in bad) for pair in bad for name in pair}
            hosts.discard(min(counts, key=lambda name: (-counts[name], name)))


def _distinct(groups: Sequence[Group]) -> list[Group]:
    """Groups that differ in what a transfer sees, so that large pools stay cheap to compare."""
    found = {(group.host.name, group.positions): group for group in groups}
    if len(found) <= 64:
        return list(found.values())
    kept: dict[tuple[str, float], Group] = {}
    for group in found.values():
        kept.setdefault((group.host.name, outside(group).bytes_s), group)
    return list(kept.values())


def _in_one_domain(one: Group, other: Group) -> bool:
    """Whether NVLink joins engines of two hosts."""
    cliques = {gpu.health.fabric_clique for gpu in (*one.gpus, *other.gpus)}
    return len(cliques) == 1 and None not in cliques


def _has_rdma(ends: Sequence[Speed]) -> bool:
    return all("RDMA" in speed.how for speed in ends)


def _inside(prefill: Group, decode: Group) -> Speed:
    """Between engines of one host: NVLink where every pair has it, else PCIe through main memory."""
    spec = _spec(prefill.gpus[0].name)
    if spec is None:
        return ASSUMED
    links = prefill.host.gpu_links
    labels = [links[a][b] for a in prefill.positions for b in decode.positions if a != b]
    size = min(len(prefill.positions), len(decode.positions))
    return _card(spec, labels, size)


def _card(spec: GpuSpec, labels: Sequence[str | None], size: int) -> Speed:
    least = min((num_nvlinks(label) for label in labels), default=0)
    if least and spec.link_bytes_s:
        share = least / max(spec.num_nvlinks, least)
        return Speed(spec.link_bytes_s * share * size, f"nominal: NVLink (NV{least})")
    return Speed(spec.pcie_bytes_s * _PCIE_SHARE * size, "nominal: PCIe through main memory")


def inside_host(group: Group) -> Speed:
    """Between a group and one of equal size beside it in the same host."""
    others = [i for i in range(len(group.host.gpus)) if i not in group.positions]
    spec = _spec(group.gpus[0].name)
    if spec is None or not others:
        return ASSUMED
    labels = [group.host.gpu_links[a][b] for a in group.positions for b in others]
    return _card(spec, labels, len(group.positions))


def outside(group: Group) -> Speed:
    """Out of a group's host: the RDMA devices nearest to its GPUs, else its share of all, else plain Ethernet."""
    rates = {nic.name: nic.rate_bits_s or 0 for nic in group.host.nics if nic.state == "up"}
    near = [rate for name in near_nics(group) if (rate := rates.get(name))]
    if near:
        return Speed(sum(near) / 8, f"nominal: RDMA on {len(near)} near NICs")
    return _by_host(group.host, len(group.positions))


def _by_host(host: Host, size: int) -> Speed:
    up = [nic for nic in host.nics if nic.state == "up" and nic.rate_bits_s]
    rdma = sum(nic.rate_bits_s or 0 for nic in up if nic.kind != "ethernet")
    if rdma:
        share = min(1.0, size / max(1, len(host.gpus)))
        return Speed(rdma * share / 8, "nominal: RDMA, the GPUs' share of the host's NICs")
    plain = max((nic.rate_bits_s or 0 for nic in up), default=0)
    return Speed(plain / 8, "nominal: Ethernet") if plain else ASSUMED


def about_rdma(hosts: Sequence[Host]) -> list[str]:
    """What it means for KV between hosts that some of them have RDMA devices of which none works."""
    able = [host for host in hosts if host.gpus]
    dead = [
        host.name
        for host in able
        if (states := {nic.state for nic in host.nics if nic.kind != "ethernet"})
        and states == {"down"}
    ]
    if not dead or len(able) < 2:
        return []
    return [
        (
            f"{', '.join(dead)}: every RDMA port is down, so KV to and from other hosts is taken to move over Ethernet; "
            "dynctl doctor says why"
        )
    ]
