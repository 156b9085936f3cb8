"""What probes find, as values: one per probe. Not here: parsing, judging. Pure."""

from dataclasses import dataclass, field
from typing import TypeVar

from dynctl.core.machine import (
    Fabric,
    Gid,
    GpuHealth,
    ImexNode,
    Limits,
    NumaNode,
    Route,
    Software,
    Sshd,
)

T = TypeVar("T")

PLACED_PROBES = frozenset(
    [
        "acs",
        "clock",
        "engines",
        "fabric",
        "ibdev2netdev",
        "ibstat",
        "ibstatus",
        "ibv_devinfo",
        "imex",
        "infiniband",
        "models",
        "network",
        "numa",
        "nvidia_smi_csv",
        "nvidia_smi_list",
        "nvidia_smi_nvlink",
        "nvidia_smi_p2p",
        "nvidia_smi_q",
        "nvidia_smi_qx",
        "nvidia_smi_table",
        "nvidia_smi_topo",
        "nvml",
        "ofed",
        "pci",
        "rdma_link",
        "rocm_smi",
        "session",
        "show_gids",
        "software",
        "system",
        "ucx",
    ]
)
"""Probes whose facts have a place in Host; others are kept as text in `Host.extra`."""


@dataclass(frozen=True, slots=True)
class GpuProcessFacts:
    """One row of the processes on GPUs."""

    gpu_uuid: str
    pid: int
    name: str | None
    """None when the driver hides it."""
    user: str | None = None
    memory_bytes: int | None = None
    is_tagged: bool = False
    """The process carries our incarnation tag in its environment."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One row of `nvidia-smi --query-gpu`; None where the cell held no value."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str | None
    memory_bytes: int | None
    """None where the driver has no size to tell (unified memory); 0 where it was not asked."""
    memory_used_bytes: int | None
    is_mig: bool = False
    driver_version: str | None = None
    is_use_known: bool = True
    """Whether it was asked how much of the memory is in use."""


@dataclass(frozen=True, slots=True)
class SmiFacts:
    """GPUs and their processes; `is_installed` is False where there is no nvidia-smi."""

    gpus: tuple[GpuFacts, ...] = ()
    processes: tuple[GpuProcessFacts, ...] = ()
    broken: tuple[tuple[int, str], ...] = ()
    """Indexes of GPUs whose row held errors instead of facts, with the text."""
    is_installed: bool = True
    are_processes_known: bool = True


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU of `nvidia-smi -L`."""

    index: int
    name: str
    uuid: str
    slices: tuple[str, ...] = ()
    """Profiles of its MIG devices."""


@dataclass(frozen=True, slots=True)
class TopoFacts:
    """The matrix of `nvidia-smi topo -m`. Rows and columns follow `gpu_indexes`; None where it cannot be told."""

    gpu_indexes: tuple[int, ...]
    links: tuple[tuple[str | None, ...], ...]
    nic_names: tuple[str, ...] = ()
    """Device names where the legend gives them, else the column labels."""
    nic_links: tuple[tuple[str | None, ...], ...] = ()
    """Per GPU its link to every NIC, in `nic_names` order."""
    cpu_affinity: tuple[str | None, ...] = ()
    """An empty text where the driver printed an empty cell; None where it cannot be told."""
    numa_affinity: tuple[str | None, ...] = ()
    gpu_numa_id: tuple[int | None, ...] = ()
    """NUMA node the GPU's own memory forms (Grace Hopper); None elsewhere."""
    p2p: tuple[tuple[str | None, ...], ...] = ()
    """The peer-to-peer matrix when the stream holds one: OK, NS, CNS, GNS, TNS, U."""
    may_lack_nics: bool = False
    """The matrix is cut on the right, perhaps within its columns of NICs."""
    notes: tuple[str, ...] = ()
    """What was damaged, contradictory or missing."""


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """One interpreter found on a host."""

    path: str
    version: str
    """`3.11.2`"""
    implementation: str = "cpython"

    @property
    def minor(self) -> tuple[int, int]:
        """Major and minor version."""
        parts = self.version.split(".")
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True, slots=True)
class NetFacts:
    """One network device."""

    name: str
    state: str
    rate_bits_s: int | None = None
    numa_node: int | None = None
    mtu_bytes: int | None = None
    is_physical: bool = False
    """Backed by a device on a bus, or a bond."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """The machine itself, limits of its control group applied."""

    host_name: str = ""
    machine_id: str = ""
    boot_id: str = ""
    kernel: str = ""
    num_cpus: int = 1
    num_cpus_nominal: int = 1
    memory_bytes: int = 0
    memory_nominal_bytes: int = 0
    disk_free_bytes: int | None = None
    libc: str = ""
    """`glibc-2.36` or `musl-1.2.4`; empty when unknown."""
    arch: str = ""
    pythons: tuple[PythonFacts, ...] = ()
    user: str = ""
    uid: int = -1
    has_systemd: bool = False
    has_systemd_user: bool = False
    has_linger: bool = False
    ssh_address: str | None = None
    """The address of the host that our SSH connection came in on."""
    nets: tuple[NetFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    port: int
    state: str
    """`active`, `down`, `init`, `armed` or the driver's own word, lower case."""
    physical: str | None
    rate_bits_s: int | None
    link_layer: str
    """`infiniband`, `ethernet` or the driver's own word, lower case."""
    numa_node: int | None = None
    netdev: str | None = None
    hca_type: str | None = None
    pci_bus_id: str | None = None
    num_lanes: int | None = None
    system_guid: str | None = None
    num_link_downed: int | None = None
    mtu_bytes: int | None = None
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """What one of the RDMA tools tells: ports as far as it knows them, and what it failed on."""

    ports: tuple[RdmaPort, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """Device and the tool's words."""
    is_cut: bool = False
    """The closing line of the tool is missing."""


@dataclass(frozen=True, slots=True)
class QueryGpu:
    """One record of `nvidia-smi -q`, text or XML."""

    index: int
    pci_bus_id: str | None
    uuid: str | None
    name: str | None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    is_mig: bool | None = None
    mig_profiles: tuple[str, ...] = ()
    """`1g.10gb` of each MIG device, where they are named."""
    mig_memory_bytes: tuple[int, ...] = ()
    """Memory of each MIG device."""
    health: GpuHealth = field(default_factory=GpuHealth)
    processes: tuple[GpuProcessFacts, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class QueryFacts:
    """`nvidia-smi -q`."""

    num_attached: int | None
    gpus: tuple[QueryGpu, ...]
    driver_version: str | None = None
    cuda_version: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether records are missing or end in the middle."""
        return not all(gpu.is_complete for gpu in self.gpus) or (
            self.num_attached is not None and len(self.gpus) != self.num_attached
        )


@dataclass(frozen=True, slots=True)
class NvlinkGpu:
    """One GPU of `nvidia-smi nvlink --status`."""

    index: int
    name: str
    uuid: str
    rates_bytes_s: tuple[int | None, ...] = ()
    """Per link; None for an inactive one. Empty when all are inactive or it has none."""
    says_inactive: bool = False


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What the driver's library tells, in the shapes of the tools that print the same."""

    query: QueryFacts = field(default_factory=lambda: QueryFacts(None, ()))
    broken: tuple[tuple[int, str], ...] = ()
    """Indexes of GPUs that are counted but do not answer, with NVML's words."""
    nvlink: tuple[NvlinkGpu, ...] = ()
    """A rate of 0 is that of an active link whose rate is not told."""
    topo: TopoFacts = field(default_factory=lambda: TopoFacts((), ()))
    p2p: tuple[tuple[str, TopoFacts], ...] = ()
    """Matrices by capability."""
    is_cut: bool = False
    """The driver stopped answering before the end."""


@dataclass(frozen=True, slots=True)
class AmdFacts:
    """`rocm-smi --showtopo`."""

    links: tuple[tuple[str | None, ...], ...]
    """`XGMI`, `PCIE` per pair, `X` on the diagonal."""
    numa_nodes: tuple[int | None, ...] = ()
    names: tuple[str | None, ...] = ()
    is_low_power: bool = False


@dataclass(frozen=True, slots=True)
class PciFacts:
    """Accelerators and network controllers on the PCI bus, with the bridges above each."""

    gpus: tuple["PciGpu", ...] = ()
    num_switches: int = 0
    """NVSwitches."""
    paths: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Bus address to the chain from the root, itself last: `pci0000:00`, `0000:00:01.0`, `0000:01:00.0`."""
    nodes: tuple[tuple[str, int | None], ...] = ()
    """Bus address to NUMA node."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a process of ours gets on the host."""

    limits: Limits = field(default_factory=Limits)
    unit_limits: Limits = field(default_factory=Limits)
    agent_limits: Limits = field(default_factory=Limits)
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    sshd: Sshd = field(default_factory=Sshd)


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Routes, bonds and listeners."""

    routes: tuple[Route, ...] = ()
    bonds: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Bond to its member devices."""
    listening_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """Fabric manager, IMEX and NVSwitches."""

    fabric: Fabric


@dataclass(frozen=True, slots=True)
class ImexFacts:
    """The IMEX domain."""

    domain_state: str | None = None
    nodes: tuple[ImexNode, ...] = ()


@dataclass(frozen=True, slots=True)
class AcsFacts:
    """ACS of the PCI bridges."""

    redirecting: tuple[str, ...] | None
    """None where configuration space is hidden from us."""


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Driver side of the software; engines are told by their own probe."""

    software: Software


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """NUMA nodes."""

    nodes: tuple[NumaNode, ...]


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A display controller on the PCI bus, whether a driver holds it or not."""

    bus_id: str
    vendor: str
    """`nvidia` or `amd`."""
    numa_node: int | None


@dataclass(slots=True)
class HostFacts:
    """All probes of one host: facts by probe name, and the cause for each that failed."""

    facts: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Probe name to the kind of its failure, where it has one: `driver_library_mismatch`, `gpu_lost`, `timeout`, …"""
    identity: str | None = None
    """Fingerprint of the host key: tells clones with equal machine ids apart."""
    login_noise: str | None = None
    """What the login shell printed before our script could."""
    notes: list[str] = field(default_factory=list)
    """What a reader of captures has to be told: cut, of unknown kind."""
    is_capture: bool = False
    """Read from files: what is not in them was not asked."""

    def fact(self, probe: str, kind: type[T]) -> T | None:
        """What a probe found, when it is of that kind."""
        fact = self.facts.get(probe)
        return fact if isinstance(fact, kind) else None
