"""Discovered machines: GPUs, NICs, links and the topology they form. Pure.

Terms follow NVML, `nvidia-smi topo -m` and hwloc.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from dynctl.core.links import LinkBook, LinkHost, LinkKind, LinkMeasurement
from dynctl.core.machine import (
    UNIT_LIMITS,
    Clock,
    Fabric,
    Gid,
    GpuHealth,
    Limits,
    LimitsOf,
    NumaNode,
    Route,
    Software,
    Sshd,
)
from dynctl.core.text import clean
from dynctl.core.units import format_bytes


class GpuState(StrEnum):
    """Whether a GPU may take an engine."""

    FREE = "free"
    BUSY = "busy"
    """Held by processes that are not ours."""
    MIG = "mig"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    name: str
    user: str | None
    memory_bytes: int | None
    is_ours: bool
    """Started by our agent: its memory counts as free when planning."""


_BRIDGED = ("H100 PCIe", "H100 NVL", "H200 NVL", "H800 PCIe")
_BRIDGED_NVLINKS = 12
"""Three bridges of four links each, of the 18 links that the chip has."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML reports it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_used_bytes: int | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    state: GpuState = GpuState.FREE
    processes: tuple[GpuProcess, ...] = ()
    is_simulated: bool = False
    """Declared in the inventory, not present; every output says so."""
    numa_affinity: str | None = None
    """NUMA nodes as the driver lists them, `0` or `0,5-11`; None when it does not tell."""
    cpu_affinity: str | None = None
    nvlink_rates_bytes_s: tuple[int | None, ...] | None = None
    """Per NVLink its rate, None for an inactive one; the whole is None when unknown."""
    mig_slices: tuple[str, ...] = ()
    """Profiles of the MIG devices it is cut into."""
    health: GpuHealth = field(default_factory=GpuHealth)

    @property
    def place(self) -> str | int | None:
        """Where it sits, as finely as is known: equal for GPUs near the same CPUs. None: unknown."""
        return self.numa_affinity or self.cpu_affinity or self.numa_node

    @property
    def dead_nvlinks(self) -> tuple[int, ...]:
        """Numbers of its inactive NVLinks, when others work; cards joined by bridges leave a third of theirs unused."""
        rates = self.nvlink_rates_bytes_s or ()
        dead = tuple(number for number, rate in enumerate(rates) if rate is None)
        is_bridged = any(words in self.name for words in _BRIDGED)
        return () if is_bridged and len(rates) - len(dead) == _BRIDGED_NVLINKS else dead

    @property
    def holders(self) -> str:
        """The processes of others on it, for a message: `pid 7 train of ana, 1.2 GiB`; empty when there are none."""
        return "; ".join(
            f"pid {p.pid} {clean(p.name, 60)} of {clean(p.user or '?', 40)}, "
            f"{'unknown' if p.memory_bytes is None else format_bytes(p.memory_bytes)} held"
            for p in self.processes
            if not p.is_ours
        )


@dataclass(frozen=True, slots=True)
class Nic:
    """One network device; RDMA devices by their verbs name (`mlx5_0`), with the port where they have several (`mlx4_0:2`)."""

    name: str
    kind: str
    """`infiniband`, `roce`, `rdma` (another RDMA link layer) or `ethernet`."""
    state: str
    """`up`, `down` or `unknown`."""
    rate_bits_s: int | None = None
    numa_node: int | None = None
    netdev: str | None = None
    addresses: tuple[str, ...] = ()
    port: int | None = None
    """RDMA port number; None for plain network devices."""
    physical: str | None = None
    """Physical state of an RDMA port, lower case: `linkup`, `polling`, `disabled`."""
    card: str | None = None
    """HCA type, `MT4129`."""
    rate_max_bits_s: int | None = None
    """What the card can do on one port, where its type is known."""
    num_lanes: int | None = None
    mtu_bytes: int | None = None
    """Active RDMA MTU, or the network device's."""
    num_link_downed: int | None = None
    gids: tuple[Gid, ...] = ()
    pci_bus_id: str | None = None
    system_guid: str | None = None
    """System image GUID: functions of one card share it."""
    bond: str | None = None
    """Bond this device belongs to, or is."""
    is_management: bool = False
    """Serves the NVSwitch subnet, not data."""

    @property
    def device(self) -> str:
        """The RDMA device a port belongs to."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class HostWarning:
    """Something a user must be told; codes are listed in docs/findings.md."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Host:
    """One discovered machine."""

    name: str
    address: str
    """Where SSH reaches it; `local` for this machine."""
    data_address: str
    """Where other hosts reach its relay and NIXL ports."""
    is_local: bool = False
    gpus: tuple[Gpu, ...] = ()
    gpu_links: tuple[tuple[str | None, ...], ...] = ()
    """Square, in `gpus` order: `X`, `NV18`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`; None where unknown."""
    nvlink_islands: tuple[tuple[int, ...], ...] = ()
    """GPU indexes of which every pair is joined by NVLink."""
    gpu_nics: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Per GPU index the nearest NICs' names."""
    nics: tuple[Nic, ...] = ()
    num_cpus: int = 1
    cpu_slots: int = 0
    """How many CPU or simulated engines the inventory lets this host run."""
    memory_bytes: int = 0
    disk_free_bytes: int | None = None
    boot_id: str = ""
    machine_id: str = ""
    python: str | None = None
    """Absolute path of a Python ≥ 3.11 on the host, None when there is none."""
    python_version: str | None = None
    platform: str = ""
    """For choosing wheels, e.g. `glibc-2.36-x86_64`."""
    has_systemd_system: bool = False
    has_systemd_user: bool = False
    """The user's own systemd answers."""
    has_linger: bool = False
    """The user's units survive logout and start at boot."""
    is_root: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    """Facts of probes that nothing uses yet, by probe name."""
    are_gpus_known: bool = True
    """False where nothing was asked that could tell of GPUs: that there are none in `gpus` means nothing."""
    nic_names: tuple[str, ...] = ()
    """Columns of `gpu_nic_links`."""
    gpu_nic_links: tuple[tuple[str | None, ...], ...] = ()
    """Per GPU its link to every NIC of `nic_names`: `PIX`, `PXB`, `PHB`, `NODE`, `SYS`; None where unknown."""
    p2p: tuple[tuple[str, tuple[tuple[str | None, ...], ...]], ...] = ()
    """Peer-to-peer matrices by capability (`read`, `write`, `nvlink`, `pcie`, `atomics`), in `gpus` order: `OK`, `NS`, …"""
    numa_nodes: tuple[NumaNode, ...] = ()
    num_cpus_nominal: int | None = None
    memory_nominal_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    session_limits: Limits = field(default_factory=Limits)
    """Of a login session, which an agent without systemd inherits."""
    unit_limits: Limits = field(default_factory=Limits)
    """Defaults for systemd units, which an agent under systemd gets."""
    agent_limits: Limits = field(default_factory=Limits)
    """Of a running agent's own process."""
    routes: tuple[Route, ...] = ()
    software: Software = field(default_factory=Software)
    fabric: Fabric = field(default_factory=Fabric)
    clock: Clock | None = None
    sshd: Sshd = field(default_factory=Sshd)
    unplaced_processes: tuple[GpuProcess, ...] = ()
    """GPU processes of which the tool did not say on which GPU."""
    listening_ports: tuple[int, ...] = ()
    """TCP ports something listens on, loopback included."""
    acs_bridges: tuple[str, ...] | None = None
    """PCI bridges that redirect requests between devices to the root; None where only root may see."""
    warnings: tuple[HostWarning, ...] = ()

    @property
    def python_problem(self) -> str:
        """Why the agent cannot run here; empty when it can."""
        if self.python is not None:
            return ""
        said = (warning.text for warning in self.warnings if warning.code == "no-python")
        return next(
            said, "no Python ≥ 3.11 found: install one, or name it with python: in the inventory"
        )

    @property
    def engine_limits(self) -> tuple[LimitsOf, Limits]:
        """Resource limits of engines here: those of the agent that runs, else those one would be started with."""
        if self.agent_limits != Limits():
            return LimitsOf.AGENT, self.agent_limits
        if self.is_root and self.has_systemd_system and not self.is_local:
            return LimitsOf.UNIT, UNIT_LIMITS
        if self.has_systemd_user and not self.is_root and self.unit_limits != Limits():
            return LimitsOf.USER_UNITS, self.unit_limits
        return LimitsOf.LOGIN, self.session_limits


@dataclass(frozen=True, slots=True)
class HostFailure:
    """A host that could not be described, and why."""

    name: str
    cause: str
    hint: str | None = None
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything discovered: complete hosts, and those that failed with their cause."""

    hosts: tuple[Host, ...]
    failures: tuple[HostFailure, ...] = ()
    warnings: tuple[HostWarning, ...] = field(default=())
    links: tuple[LinkMeasurement, ...] = ()
    """What `linktest` measured between these hosts; a pair that is not in here was never measured."""

    def host(self, name: str) -> Host:
        """Return the host of that name; KeyError when there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def link(self, source_name: str, target_name: str, kind: LinkKind) -> LinkMeasurement | None:
        """Return what was measured from one host to another, None when nothing was."""
        for link in self.links:
            if (link.source_name, link.target_name, link.kind) == (source_name, target_name, kind):
                return link
        return None

    def unmeasured(self, kind: LinkKind = LinkKind.TCP) -> tuple[tuple[str, str], ...]:
        """Directions between hosts, source first, that were not measured or failed."""
        done = {(m.source_name, m.target_name) for m in self.links if m.kind is kind and m.points}
        names = [host.name for host in self.hosts]
        pairs = [(a, b) for a in names for b in names if a != b]
        return tuple(pair for pair in pairs if pair not in done)

    def with_links(self, book: LinkBook) -> "Topology":
        """Add the measurements that were made on these very machines and data addresses."""
        hosts = [LinkHost(host.name, host.machine_id, host.data_address) for host in self.hosts]
        return replace(self, links=book.matching(hosts))
