"""The intent: which replicas run where, and what is expected of them. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a replica does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one engine spreads over GPUs: tensor, pipeline, data and expert parallel sizes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs one replica takes (expert parallelism reuses the TP × DP ranks)."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """A GPU in a plan: the UUID is its identity, the index only for readers."""

    uuid: str
    index: int


@dataclass(frozen=True, slots=True)
class Member:
    """One host's part of an engine that is larger than a host."""

    host_name: str
    gpus: tuple[PlannedGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine to run."""

    id: str
    """Unique in the cluster, e.g. `chat-prefill-0`."""
    role: Role
    host_name: str
    gpus: tuple[PlannedGpu, ...] = ()
    """Empty for engines on CPU slots or simulated ones."""
    side_channel_port: int | None = None
    """NIXL side channel on the data address; None for engines that have none."""
    nics: tuple[str, ...] = ()
    """Nearest RDMA devices, for UCX."""
    others: tuple[Member, ...] = ()
    """Of an engine over several hosts: the parts beside that of `host_name`, which leads, in the order of their ranks."""
    rendezvous_port: int | None = None
    """Of an engine over several hosts: where its parts meet, on the first host; None: it is inside one."""

    @property
    def members(self) -> tuple[Member, ...]:
        """All its parts, the one that leads first; of most engines the only one."""
        return (Member(self.host_name, self.gpus), *self.others)

    def member_id(self, rank: int) -> str:
        """What the unit of one part is called; the first is the engine itself."""
        return f"{self.id}.{rank}" if rank else self.id


ENGINE_DEFAULT = "default of the engine, which is not told"
"""Source of a figure that the plan only counts with: the engine takes what it takes."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """A figure and how it was got: `measured`, `modelled`, `declared` or `default`, with detail."""

    value: float
    source: str

    @property
    def is_told(self) -> bool:
        """Whether the engine is started with it."""
        return self.source != ENGINE_DEFAULT


@dataclass(frozen=True, slots=True)
class MemorySheet:
    """Where the memory of one GPU (or CPU slot) goes, in bytes."""

    total_bytes: int
    reserve_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_capacity_tokens: int
    """Tokens of KV the whole engine holds."""
    source: str


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one role and parallelism."""

    role: Role
    parallelism: Parallelism
    replicas: tuple[Replica, ...]
    memory: MemorySheet | None = None
    max_num_batched_tokens: Sourced | None = None
    """Tokens one step of an engine computes at most; longer prompts are computed in pieces."""

    @property
    def nodes(self) -> int:
        """Hosts each of its engines is over."""
        return max((len(replica.members) for replica in self.replicas), default=1)


@dataclass(frozen=True, slots=True)
class Figure:
    """One predicted figure with its band and how it was got."""

    low: float
    expected: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted latency and throughput of a deployment."""

    ttft_ms: Figure
    itl_ms: Figure
    out_tokens_s: Figure
    goodput_rps: Figure | None = None
    """Requests per second served within the goals, of those the workload asks for; None: not said."""


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """Where the entrance of a deployment runs."""

    host_name: str
    listen: str
    policy: str


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """One model's layout."""

    name: str
    model: str
    engine_kind: str
    pools: tuple[Pool, ...]
    router: RouterPlan
    max_model_len_tokens: Sourced | None = None
    max_num_seqs: Sourced | None = None
    gpu_memory_utilization: Sourced | None = None
    """Share of each GPU's memory an engine takes; None: it has no GPU."""
    block_size_tokens: Sourced | None = None
    estimate: Estimate | None = None
    verdict: str = ""
    """`single engine`, `replicas with KV routing` or `prefill/decode`, and why."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """Per-host facts a plan rests on: stable ones only, so that replanning gives the same bytes."""

    name: str
    machine_id: str
    data_address: str
    relay_port: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The file `plan.yaml`: readable, editable, checked again before it is applied."""

    cluster: str
    hosts: tuple[PlannedHost, ...]
    deployments: tuple[PlannedDeployment, ...]
    digest: str = ""
    """Over cluster facts and layout; empty while being made."""
    warnings: tuple[str, ...] = field(default=())

    def replicas(self) -> tuple[tuple[PlannedDeployment, Pool, Replica], ...]:
        """All replicas with the pool and deployment they belong to, in plan order."""
        return tuple((d, p, r) for d in self.deployments for p in d.pools for r in p.replicas)
