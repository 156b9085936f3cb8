"""What probes find, as values: one per probe. Not here: parsing, judging. Pure."""

from dataclasses import dataclass, field


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
    memory_used_bytes: int | None
    is_mig: bool = False
    driver_version: str | None = None


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
class MigSlice:
    """One MIG device as `nvidia-smi -L` lists it."""

    profile: str
    uuid: str


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU of `nvidia-smi -L`."""

    index: int
    name: str
    uuid: str
    slices: tuple[MigSlice, ...] = ()


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
    numa_affinity: tuple[str | None, ...] = ()
    gpu_numa_id: tuple[int | None, ...] = ()
    """NUMA node the GPU's own memory forms (Grace Hopper); None elsewhere."""
    p2p: tuple[tuple[str | None, ...], ...] = ()
    """The peer-to-peer matrix when the stream holds one: OK, NS, CNS, GNS, TNS, U."""
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


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A display controller on the PCI bus, whether a driver holds it or not."""

    bus_id: str
    vendor: str
    """`nvidia` or `amd`."""
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All probes of one host: facts by probe name, and the cause for each that failed."""

    facts: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Probe name to the kind of its failure, where it has one: `driver_library_mismatch`, `gpu_lost`, `timeout`, …"""
    identity: str | None = None
    """Fingerprint of the host key: tells clones with equal machine ids apart."""
