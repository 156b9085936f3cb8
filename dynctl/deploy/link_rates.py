"""What a router is told of the links between its engines before anything is moved over them. Pure.

Between hosts what `linktest` measured, as far as it can be of the link that KV takes; inside one what its GPUs' links are rated at.
Of the rest nothing is said: the router's own assumption holds there.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dynctl.core.hardware import Topology
from dynctl.core.kv_links import MEASURED, NOMINAL, NVLINK, TCP, LinkClasses, LinkRate
from dynctl.core.links import LinkKind, LinkMeasurement
from dynctl.core.plan import PlannedDeployment, Role
from dynctl.deploy.engine_places import engine_places
from dynctl.planner.estimate import ETA_TRANSFER
from dynctl.planner.placement import Group, replica_groups
from dynctl.planner.transfer import Fabric
from dynctl.router.sources.split import worker_ids

_KINDS = (LinkKind.NIXL_VRAM, LinkKind.NIXL_DRAM_VRAM, LinkKind.NIXL_DRAM)
"""Those that come nearest to what moves KV first."""

_LEAST_BYTES_S = 1e6
"""No network between such hosts is slower: what looks so was stalled, and would keep every transfer away for good."""

_Links = Mapping[tuple[str, str, LinkKind], LinkMeasurement]


class _End(NamedTuple):
    """An engine that sends or receives."""

    id: str
    host_name: str
    num_ranks: int
    """Each opens connections of its own."""
    group: Group | None
    """Its GPUs; None where it has none, or none that was found."""
    outside_bytes_s: float
    """What its own devices carry by their names; 0: not known."""

    @property
    def width(self) -> tuple[int, float]:
        """All that two engines of one host can differ in towards another host, beside their class."""
        return self.num_ranks, self.outside_bytes_s


def link_rates(
    planned: PlannedDeployment, topology: Topology | None, bytes_per_token: int
) -> tuple[LinkRate, ...]:
    """Say what a token takes from each host with prefill engines to each with decode engines, by class of link.

    Where engines of the same two hosts differ, it is the slower of them. Simulated engines take as long as their flags say,
    whatever joins them; and where it is not known what a token takes, no rate is of use.
    """
    if topology is None or not bytes_per_token or planned.engine_kind == "sim":
        return ()
    # Where processors were the limit, the link has more, and nobody knows how much.
    good = [link for link in topology.links if link.bytes_s and not link.is_processor_bound]
    links = {(link.source_name, link.target_name, link.kind): link for link in good}
    fabric, classes = Fabric(good), LinkClasses(engine_places(planned, topology))
    sources, targets = (
        list(_ends(planned, topology, fabric, role)) for role in (Role.PREFILL, Role.DECODE)
    )
    found: dict[tuple[str, str, str], LinkRate] = {}
    seen = set()
    for source in sources:
        for target in targets:
            route = classes.route(source.id, target.id)
            is_near = source.host_name == target.host_name
            alike = (source.id, target.id) if is_near else (source.width, target.width)
            if (route, alike) in seen:
                continue
            seen.add((route, alike))
            if is_near:
                rate = _inside(fabric, source, target)
            else:
                rate = _between(links, fabric, source, target, route[2])
            if rate is None or rate[0] < _LEAST_BYTES_S:
                continue
            told = _told(route, *rate, bytes_per_token)
            if route not in found or told.ms_per_token > found[route].ms_per_token:
                found[route] = told
    return tuple(found[route] for route in sorted(found))


def _ends(
    planned: PlannedDeployment, topology: Topology, fabric: Fabric, role: Role
) -> Iterator[_End]:
    hosts = {host.name: host for host in topology.hosts}
    for pool in planned.pools:
        groups = replica_groups(pool, hosts)
        for replica in pool.replicas:
            if replica.role is not role:
                continue
            group, size = groups.get(replica.id), pool.parallelism
            out = fabric.outside(group).bytes_s if group is not None else 0.0
            first = worker_ids(replica.id, size.dp)[0]
            yield _End(first, replica.host_name, size.num_gpus, group, out)


def _told(
    route: tuple[str, str, str], bytes_s: float, latency_s: float, basis: str, bytes_per_token: int
) -> LinkRate:
    ms = bytes_per_token / (bytes_s * ETA_TRANSFER) * 1e3
    # No more digits than mean something: what was measured anew, and as before, is no new configuration.
    return LinkRate(*route, float(f"{ms:.2g}"), round(latency_s * 1e3, 1), basis)


def _inside(fabric: Fabric, source: _End, target: _End) -> tuple[float, float, str] | None:
    """Rate, latency and where they are from, of engines of one host."""
    if source.group is None or target.group is None:
        return None
    speed = fabric.pair(source.group, target.group)
    return (speed.bytes_s, 0.0, NOMINAL) if speed.how.startswith("nominal") else None


def _between(
    links: _Links, fabric: Fabric, source: _End, target: _End, link: str
) -> tuple[float, float, str] | None:
    """The same of engines of two: by the measurement that tells most of this class of link."""
    kinds = _KINDS if link != NVLINK else (LinkKind.NIXL_VRAM,)
    for kind in (*kinds, LinkKind.TCP) if link == TCP else kinds:
        measured = links.get((source.host_name, target.host_name, kind))
        if measured is not None:
            latency_s = measured.round_trip.p50_s if measured.round_trip else 0.0
            return _usable_bytes_s(measured, fabric, source, target), latency_s, MEASURED
    return None


def _usable_bytes_s(measured: LinkMeasurement, fabric: Fabric, source: _End, target: _End) -> float:
    """What two engines can use of a link: no more streams than they have ranks, no more than their own devices carry."""
    if measured.kind is LinkKind.TCP:
        ranks = max(source.num_ranks, target.num_ranks)
        least = min(point.num_streams for point in measured.points)
        usable = [p.bytes_s for p in measured.points if p.num_streams <= max(ranks, least)]
        bytes_s = max(usable) * (measured.evenness_ratio or 1.0)
        return min(bytes_s, measured.nominal_bytes_s or bytes_s)
    if source.group is None or target.group is None:
        return measured.steady_bytes_s or 0.0
    return fabric.pair(source.group, target.group).bytes_s
