"""Which GPUs, slots and ports go to which replica: linked groups first, replicas spread over hosts, roles paired.

Not here: how many replicas of what size (`search`).
Pure: an Allocation lives inside one planning run.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dynctl.core.addresses import is_loopback
from dynctl.core.hardware import Gpu, GpuState, Host
from dynctl.core.inventory import HostEntry
from dynctl.core.plan import Member, PlannedGpu, Pool, Replica, Role
from dynctl.errors import PlanError
from dynctl.planner.grouping import (
    Near,
    group_score,
    link_rank,
    near_of,
    tp_groups,
)

_groups_of = lru_cache(maxsize=4096)(tp_groups)
"""Hosts of one make are cut alike."""
_COUNTERPARTS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, order=True)
class GpuKind:
    """GPUs that may be joined in one engine: same product, same memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs of one host for one engine, as positions in `host.gpus`."""

    host: Host
    positions: tuple[int, ...]
    quality: tuple[int, int] = field(init=False, compare=False, repr=False)
    """Whether it is whole on NVLink, and the rank of its worst pair."""

    def __post_init__(self) -> None:
        score = group_score(self.host.gpu_links, Near(), self.positions)
        object.__setattr__(self, "quality", (score[0], score[4]))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs themselves."""
        return tuple(self.host.gpus[i] for i in self.positions)

    def worst_link(self) -> str | None:
        """The label of the slowest pair; None when one is unknown or there is no pair."""
        labels = [
            self.host.gpu_links[a][b] for a in self.positions for b in self.positions if a < b
        ]
        return min(labels, key=link_rank, default=None)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Order names as people do: gpu-2 before gpu-10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d{1,12})", name)
        if part
    )


def matches(entry: HostEntry | None, name: str, patterns: Sequence[str]) -> bool:
    """Whether a host is meant by names, globs or groups; no pattern means any."""
    if not patterns:
        return True
    groups = entry.groups if entry is not None else ()
    return any(fnmatch.fnmatchcase(name, pattern) or pattern in groups for pattern in patterns)


def kind_of(gpu: Gpu) -> GpuKind:
    """The kind a GPU belongs to."""
    return GpuKind(gpu.name, gpu.memory_bytes)


def replica_groups(pool: Pool, hosts: Mapping[str, Host]) -> dict[str, Group]:
    """The GPUs of each of a pool's replicas, by replica; without those that no host has."""
    found = {}
    for replica in pool.replicas:
        host = hosts.get(replica.host_name)
        where = {gpu.uuid: i for i, gpu in enumerate(host.gpus)} if host else {}
        positions = tuple(where[gpu.uuid] for gpu in replica.gpus if gpu.uuid in where)
        if host is not None and positions:
            found[replica.id] = Group(host, positions)
    return found


def left_out(hosts: Iterable[Host]) -> tuple[str, ...]:
    """Why GPUs are not used, one sentence per host and reason; stable facts only."""
    why = {
        GpuState.BUSY: "in use by other processes",
        GpuState.MIG: "in MIG mode",
        GpuState.LOST: "lost",
        GpuState.UNKNOWN: "in an unknown state",
    }
    found = []
    for host in hosts:
        for state, text in why.items():
            indexes = [str(gpu.index) for gpu in host.gpus if gpu.state is state]
            if indexes:
                found.append(f"{host.name}: GPU {', '.join(indexes)} left out: {text}")
    return tuple(found)


def port_space(address: str) -> str:
    """Hosts with equal spaces share their ports: one address, or loopback, which is always one machine."""
    return "loopback" if is_loopback(address) else address


class Allocation:
    """What is taken while one plan is made. Hosts are visited by name, so that their order never matters."""

    def __init__(self, hosts: Iterable[Host], port_base: int, port_count: int) -> None:
        self.hosts = tuple(sorted(hosts, key=lambda host: natural(host.name)))
        self._taken: dict[str, set[int]] = {host.name: set() for host in self.hosts}
        self._engines: dict[str, int] = {host.name: 0 for host in self.hosts}
        self._roles: dict[str, dict[tuple[str, Role], int]] = {h.name: {} for h in self.hosts}
        self._ports: dict[str, int] = {}
        self._relays: dict[str, int] = {}
        self._port_base, self._port_count = port_base, port_count
        self._cache: dict[tuple[str, GpuKind, int], tuple[Group, ...]] = {}
        self._placed: dict[tuple[str, str, Role], list[Group]] = {}
        self._num_free = {host.name: len(self._free(host)) for host in self.hosts}

    def kinds(self, hosts: Sequence[Host]) -> tuple[GpuKind, ...]:
        """Kinds of which a GPU is still to be had, the largest memory first."""
        found = {kind_of(gpu) for host in hosts for gpu in self._free(host)}
        return tuple(sorted(found, key=lambda kind: (-kind.memory_bytes, kind.name)))

    def num_free(self, hosts: Sequence[Host], kinds: Collection[GpuKind] | None = None) -> int:
        """How many GPUs are still to be had, of some kinds; None: of any."""
        if kinds is None:
            return sum(self._num_free[host.name] for host in hosts)
        return sum(kind_of(gpu) in kinds for host in hosts for gpu in self._free(host))

    def open_to(self, host: Host, own: Iterable[Group]) -> tuple[int, ...]:
        """Positions of a host's GPUs that one deployment may have: those that are free, and its own groups'."""
        mine = {i for group in own if group.host.name == host.name for i in group.positions}
        taken = self._taken[host.name] - mine
        free = (i for i, gpu in enumerate(host.gpus) if gpu.state is GpuState.FREE)
        return tuple(i for i in free if i not in taken)

    def _free(self, host: Host) -> list[Gpu]:
        return [
            gpu
            for i, gpu in enumerate(host.gpus)
            if gpu.state is GpuState.FREE and i not in self._taken[host.name]
        ]

    def groups(self, host: Host, kind: GpuKind, size: int) -> tuple[Group, ...]:
        """Disjoint groups of `size` that this host still has, best linked first."""
        key = host.name, kind, size
        if key not in self._cache:
            members = [
                i
                for i, gpu in enumerate(host.gpus)
                if gpu.state is GpuState.FREE
                and i not in self._taken[host.name]
                and kind_of(gpu) == kind
            ]
            links = tuple(tuple(host.gpu_links[a][b] for b in members) for a in members)
            self._cache[key] = tuple(
                Group(host, tuple(members[i] for i in group))
                for group in _groups_of(links, near_of(host, members), size)
            )
        return self._cache[key]

    def all_groups(self, hosts: Sequence[Host], kind: GpuKind, size: int) -> list[Group]:
        """Groups of all hosts, best linked first."""
        found = [group for host in hosts for group in self.groups(host, kind, size)]
        return sorted(found, key=lambda group: (-group.quality[0], -group.quality[1]))

    def take_group(
        self,
        groups: Sequence[Group],
        deployment: str,
        role: Role,
    ) -> Group | None:
        """Take the best of some groups for one more replica; None when none is free any more.

        Spread over hosts, whole on NVLink, beside its counterpart role, well linked, on the emptiest host.
        """
        best: tuple[tuple[object, ...], Group] | None = None
        seen: set[str] = set()
        for group in groups:
            name = group.host.name
            others = self._beside(group.host, deployment, role)
            # The first of a host is its best, but where a counterpart is to be near to.
            if (name in seen and not others) or not self._is_free(group):
                continue
            seen.add(name)
            whole, total = group.quality
            key = (
                self._count(group.host, deployment, role),
                -int(whole or len(group.positions) == 1),
                -min(1, len(others)),
                -total,
                -_nearness(group, others),
                -self._num_free[name],
                natural(name),
            )
            if best is None or key < best[0]:
                best = key, group
        if best is None:
            return None
        self._take(best[1], deployment, role)
        return best[1]

    def _take(self, group: Group, deployment: str, role: Role) -> None:
        name = group.host.name
        self._taken[name].update(group.positions)
        self._num_free[name] -= len(group.positions)
        self._forget_groups(name)
        self._placed.setdefault((name, deployment, role), []).append(group)
        self._note(group.host, deployment, role)

    def give_back(self, groups: Iterable[Group], deployment: str, role: Role) -> None:
        """Undo takes of a layout that did not come together."""
        for group in groups:
            name = group.host.name
            self._taken[name].difference_update(group.positions)
            self._num_free[name] += len(group.positions)
            self._forget_groups(name)
            self._engines[name] -= 1
            self._placed[name, deployment, role].remove(group)
            self._roles[name][deployment, role] -= 1

    def _forget_groups(self, host_name: str) -> None:
        for key in [key for key in self._cache if key[0] == host_name]:
            del self._cache[key]

    def _beside(self, host: Host, deployment: str, role: Role) -> list[Group]:
        """Groups of the counterpart role on a host."""
        other = _COUNTERPARTS.get(role)
        return [] if other is None else self._placed.get((host.name, deployment, other), [])

    def _is_free(self, group: Group) -> bool:
        return self._taken[group.host.name].isdisjoint(group.positions)

    def take_slot(
        self, hosts: Sequence[Host], deployment: str, role: Role, *, must_have_slot: bool
    ) -> Host | None:
        """Take a CPU slot for one more replica; engines that need nothing also go where there is none."""

        def key(host: Host) -> tuple[object, ...]:
            return (
                int(self._engines[host.name] >= host.cpu_slots),
                self._count(host, deployment, role),
                -int(bool(host.gpus)),
                -min(1, self._counterparts(host, deployment, role)),
                self._engines[host.name],
                natural(host.name),
            )

        able = [h for h in hosts if not must_have_slot or self._engines[h.name] < h.cpu_slots]
        if not able:
            return None
        host = min(able, key=key)
        self._note(host, deployment, role)
        return host

    def _note(self, host: Host, deployment: str, role: Role) -> None:
        self._engines[host.name] += 1
        roles = self._roles[host.name]
        roles[deployment, role] = roles.get((deployment, role), 0) + 1

    def _count(self, host: Host, deployment: str, role: Role) -> int:
        return self._roles[host.name].get((deployment, role), 0)

    def _counterparts(self, host: Host, deployment: str, role: Role) -> int:
        other = _COUNTERPARTS.get(role)
        return 0 if other is None else self._count(host, deployment, other)

    def num_engines(self, host: Host) -> int:
        """Engines planned on a host so far."""
        return self._engines[host.name]

    def router_host(self, hosts: Sequence[Host]) -> Host:
        """A host without GPUs if there is one, the least busy first."""
        return min(
            hosts,
            key=lambda h: (int(bool(h.gpus)), self._engines[h.name], natural(h.name)),
        )

    def relay_port(self, host: Host) -> int:
        """The relay's port: one per host; hosts that share an address share its port range."""
        if host.name not in self._relays:
            self._relays[host.name] = self._port(host, 1)
        return self._relays[host.name]

    def side_channel_port(self, host: Host, ranks: int) -> int:
        """First of as many ports as the engine has ranks: each listens on its own."""
        self.relay_port(host)
        return self._port(host, ranks)

    def rendezvous_port(self, host: Host) -> int:
        """Where the parts of an engine over several hosts meet, on the first of them."""
        self.relay_port(host)
        return self._port(host, 1)

    def _port(self, host: Host, count: int) -> int:
        space = port_space(host.data_address)
        used = self._ports.get(space, 0)
        if used + count > self._port_count:
            raise PlanError(
                f"{host.name}: {self._port_count} ports from {self._port_base} are not enough for the planned engines",
                "raise port_count in the inventory, or plan fewer engines per host",
            )
        self._ports[space] = used + count
        return self._port_base + used


def _nearness(group: Group, others: Sequence[Group]) -> int:
    """Rank of the worst link from a group to its counterparts on the same host."""
    links = group.host.gpu_links
    return min(
        (
            link_rank(links[a][b])
            for other in others
            for a in group.positions
            for b in other.positions
        ),
        default=0,
    )


def near_nics(group: Group) -> tuple[str, ...]:
    """Nearest RDMA devices of a group's GPUs that are up, in the host's order."""
    nearest = dict(group.host.gpu_nics)
    wanted = {name for gpu in group.gpus for name in nearest.get(gpu.index, ())}
    return tuple(
        nic.name
        for nic in group.host.nics
        if {nic.name, nic.device} & wanted and nic.state != "down" and nic.kind != "ethernet"
    )


def replica_on(group: Group, replica_id: str, role: Role, side_channel_port: int | None) -> Replica:
    """The replica that runs on a group."""
    return Replica(
        id=replica_id,
        role=role,
        host_name=group.host.name,
        gpus=tuple(PlannedGpu(gpu.uuid, gpu.index) for gpu in group.gpus),
        side_channel_port=side_channel_port,
        nics=near_nics(group) if role is not Role.AGGREGATED else (),
    )


def spread(replica: Replica, groups: Sequence[Group], rendezvous_port: int) -> Replica:
    """The replica over the hosts of some groups, of which it is on the first."""
    return replace(
        replica,
        others=tuple(
            Member(group.host.name, tuple(PlannedGpu(gpu.uuid, gpu.index) for gpu in group.gpus))
            for group in groups[1:]
        ),
        rendezvous_port=rendezvous_port,
    )
