"""Parts of a machine below its GPUs and NICs: health, NUMA nodes, software, limits, routes.

Every fact that a host did not tell is None or empty: unknown, never a default.
Not here: GPUs, NICs and hosts themselves (`hardware`), what is wrong with any of it.
Pure.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """How a GPU fares, as `nvidia-smi -q` tells it."""

    has_persistence: bool | None = None
    has_ecc: bool | None = None
    has_ecc_pending: bool | None = None
    """Whether ECC will be on after the next reset; differs from `has_ecc` while a change waits."""
    num_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    num_remapped: int | None = None
    """Memory rows remapped for uncorrectable errors."""
    is_remap_pending: bool | None = None
    """Rows (or pages, on older boards) wait for a reset to be taken out of use."""
    has_remap_failed: bool | None = None
    is_reset_required: bool | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Active reasons that cost speed, in nvidia-smi's names without prefix: `sw_thermal_slowdown`, `hw_power_brake_slowdown`."""
    temperature_celsius: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    pcie_generation: int | None = None
    """At this moment; idle GPUs lower it to save power, so only the width is a fault by itself."""
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    compute_mode: str | None = None
    """`Default`, `Exclusive_Process` or `Prohibited`."""
    fabric_state: str | None = None
    """`Completed`, `In Progress`, `Not Started`; None where there is no NVSwitch."""
    fabric_status: str | None = None
    """`Success` or the NVLink fabric's error."""
    fabric_clique: str | None = None
    """`cluster uuid/clique id` of a multi-host NVLink domain, None outside of one."""
    bad_readings: tuple[str, ...] = ()
    """Sensors that answered with an error: `fan`."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of an RDMA port's address table."""

    index: int
    gid: str
    version: str
    """`v1`, `v2` or `ib`."""
    ipv4: str | None = None
    netdev: str | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node; memory of GPUs may form nodes without CPUs."""

    index: int
    cpus: str
    """Kernel list format; empty for a node without CPUs."""
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits; 0 bytes is a real limit, UNLIMITED (-1) none, None unknown."""

    memlock_bytes: int | None = None
    nofile: int | None = None


UNLIMITED = -1
UNIT_LIMITS = Limits(UNLIMITED, 1048576)
"""What the agent's own system unit asks for."""


class LimitsOf(StrEnum):
    """Whose limits engines get."""

    AGENT = "the running agent"
    UNIT = "the agent's unit"
    USER_UNITS = "the user's systemd units"
    LOGIN = "a login session, which the agent inherits"


@dataclass(frozen=True, slots=True)
class ImexNode:
    """One host of an IMEX domain, as this host's daemon sees it."""

    address: str
    state: str
    """`READY`, `UNAVAILABLE`, …"""
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Fabric:
    """What joins GPUs beyond one board."""

    num_switches: int = 0
    """NVSwitches on the PCI bus."""
    manager_state: str | None = None
    """systemd's word for nvidia-fabricmanager (`active`, `inactive`, `failed`), `absent`, or None."""
    manager_version: str | None = None
    imex_state: str | None = None
    """systemd's word for nvidia-imex."""
    num_imex_channels: int | None = None
    imex_domain_state: str | None = None
    """`UP`, `DEGRADED` or `DOWN`: whether the hosts of the domain may map each other's GPU memory."""
    imex_nodes: tuple[ImexNode, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSoftware:
    """What an engine's own interpreter has installed, by package metadata."""

    python: str
    """As the inventory names it."""
    python_version: str | None = None
    packages: tuple[tuple[str, str], ...] = ()
    """Name and version of vllm, torch, nixl, ucx, nccl and their kin, names as they are installed."""
    error: str | None = None
    """Why nothing could be told."""


@dataclass(frozen=True, slots=True)
class Software:
    """Driver and kernel side."""

    driver_version: str | None = None
    """Of the user library, as nvidia-smi says."""
    module_version: str | None = None
    """Of the loaded kernel module."""
    cuda_version: str | None = None
    """The newest the driver supports."""
    modules: tuple[str, ...] = ()
    """Loaded kernel modules that matter for GPUs and RDMA: nvidia, nvidia_peermem, gdrdrv, mlx5_ib, …"""
    memory_peers: tuple[str, ...] = ()
    """Peer memory clients registered with the RDMA stack."""
    has_dmabuf: bool | None = None
    """The open kernel module, which can hand out dma-buf handles, is loaded."""
    ofed_version: str | None = None
    """The vendor's RDMA stack; None where the kernel's own is used."""
    ucx_version: str | None = None
    """The host's own UCX; engines may bring another."""
    engines: tuple[EngineSoftware, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the routing table."""

    target: str
    """`default` or a prefix."""
    device: str
    gateway: str | None = None
    source: str | None = None
    metric: int | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's clock against ours, measured around the round trip: it differs by `skew_s` ± `error_s`."""

    skew_s: float
    """Positive: the host is ahead."""
    error_s: float


@dataclass(frozen=True, slots=True)
class Sshd:
    """What limits many sessions over one connection, as far as the server's configuration may be read."""

    max_sessions: int | None = None
    max_startups: str | None = None
    allows_forwarding: bool | None = None
