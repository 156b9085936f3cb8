"""What a closer look at one host finds beside its hardware: who listens, what is left over, how it is set up. Pure.

Asked by `doctor` only: it costs a walk through the processes. None and empty mean not known, never "all is well".
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket."""

    address: str
    """`0.0.0.0` and `::` mean every address."""
    port: int
    pid: int | None = None
    """None: owned by a process this user may not see."""
    program: str = ""
    """First words of its command line."""
    user: str = ""
    root: str = ""
    """The dynctl root it was started under; empty for a stranger."""
    is_engine: bool = False
    """Its command line is that of an inference engine (vllm, sglang, trtllm, dynctl.sim)."""


@dataclass(frozen=True, slots=True)
class TaggedProcess:
    """A process some agent of dynctl started."""

    pid: int
    root: str
    incarnation: str
    program: str = ""
    is_agent_alive: bool = False
    """An agent of the same root runs."""


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Kernel settings that cost inference time or memory; None where the file is not there."""

    numa_balancing: int | None = None
    num_numa_nodes: int | None = None
    reserved_hugepages_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swappiness: int | None = None
    iommu_translates: bool | None = None
    """DMA is translated (not passed through), which turns peer copies over PCIe into detours."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file below the host's root that others must not read or write, with its mode and owner."""

    path: str
    mode: int
    uid: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate below the host's root."""

    path: str
    subject: str
    ends_unix_s: float


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's directory on one host: names with sizes, and digests of the small files that decide its behaviour."""

    path: str
    exists: bool
    sizes_bytes: tuple[tuple[str, int], ...] = ()
    digests: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reach:
    """One TCP connection tried from a host to a place another part needs to reach."""

    target: str
    """What for, e.g. `relay of gpu-02`."""
    host_name: str
    """The host that has the address."""
    address: str
    port: int
    outcome: str
    """`open`, `refused`, `timeout`, `unreachable` or `untried`."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NixlLoad:
    """What came of loading NIXL with its UCX plugin in an engine's interpreter."""

    python: str
    outcome: str
    """`works`, `failed`, `timeout` or `killed by signal N`."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HostAudit:
    """One host, looked at closely."""

    listeners: tuple[Listener, ...] = ()
    tagged: tuple[TaggedProcess, ...] = ()
    kernel: KernelSettings | None = None
    files: tuple[KeptFile, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    models: tuple[ModelFiles, ...] = ()
    reaches: tuple[Reach, ...] = ()
    nixl: tuple[NixlLoad, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    """Questions that got no answer, with the cause."""
