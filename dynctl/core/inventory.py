"""What the user wrote: hosts, deployments, wishes. Loading and checking live in `dynctl.inventory`. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload


@dataclass(frozen=True, slots=True)
class SimulatedGpus:
    """GPUs declared where there are none, so that layouts can be tried."""

    count: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One host as written, after ranges were expanded and defaults applied."""

    name: str
    address: str
    """`local` means this machine, without SSH."""
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    groups: tuple[str, ...] = ()
    data_address: str | None = None
    root: str | None = None
    """Directory on the host for everything dynctl keeps there; None: `~/.dynctl` (SSH) or `.dynctl/hosts/NAME` (local)."""
    python: str | None = None
    cpu_slots: int = 0
    simulated_gpus: SimulatedGpus | None = None

    @property
    def is_local(self) -> bool:
        """Whether commands run here, without SSH."""
        return self.address == "local"


@dataclass(frozen=True, slots=True)
class SshSettings:
    """How hosts are reached."""

    config: str | None = "~/.ssh/config"
    """Path of the OpenSSH client configuration, None for none."""
    known_hosts: str = "~/.ssh/known_hosts"
    host_keys: str = "strict"
    """`strict` or `accept-new`; a changed key is always refused."""
    connect_timeout_s: float = 10.0
    keepalive_s: float = 5.0
    parallel: int = 32


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine serves a deployment, and how it is started."""

    kind: str
    """A module of `agents/engines`: `sim`, `vllm` or `external`."""
    python: str | None = None
    """Interpreter of the engine's own environment on the hosts (vllm)."""
    args: tuple[tuple[str, str], ...] = ()
    """Extra engine flags, name without dashes to value; an empty value is a bare flag."""
    env: tuple[tuple[str, str], ...] = ()
    urls: tuple[str, ...] = ()
    """Running servers to adopt (external)."""
    allow_old_version: bool = False
    """Accept an engine older than the supported floor (CPU test machines)."""
    device: str = "gpu"
    """`gpu` or `cpu`; sim engines need neither."""
    start_deadline_s: float | None = None
    """How long a start may take until a token comes; None: the kind's own limit."""


@dataclass(frozen=True, slots=True)
class PoolWish:
    """An explicit layout for one role."""

    role: Role
    replicas: int
    parallelism: Parallelism = field(default_factory=Parallelism)
    hosts: tuple[str, ...] = ()
    """Names, globs or groups; empty: any."""
    nodes: int = 1
    """Hosts each of its engines is over, with an equal share of its GPUs on each."""


@dataclass(frozen=True, slots=True)
class RouterWish:
    """Where the OpenAI entrance runs and listens."""

    host: str | None = None
    """None: a host without GPUs if there is one."""
    listen: str = "127.0.0.1:8000"
    policy: str = "kv"
    allow_insecure_listen: bool = False
    tls_cert: str | None = None
    """Certificate chain and key for clients, files on the operator's machine."""
    tls_key: str | None = None
    route_key_field: str = ""
    """Of a request's body: its text is the request's route key; empty: none."""
    settings: tuple[tuple[str, float], ...] = ()
    """Router settings that differ from their defaults, by name."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key by reference: `${env:NAME}` or `${file:PATH}`; resolved at use, never stored."""

    name: str
    reference: str
    priority: str = "high"
    """The most urgent class its requests may ask for: high, normal or low."""
    route_key: str = ""
    """Of its requests, where these do not name one; empty: the key's name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Engine limits; None lets the planner derive them."""

    max_model_len_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    """Tokens one step computes at most; prompts beside running requests come in pieces of it."""


@dataclass(frozen=True, slots=True)
class DeploymentWish:
    """One model to serve."""

    name: str
    model: str
    """Directory on the hosts (vllm), or a served name (sim, external)."""
    engine: EngineSpec
    served_name: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    """Directory on the router's host with tokenizer.json and the chat template; None: the model's."""
    pools: tuple[PoolWish, ...] = ()
    """Empty: the planner decides."""
    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    limits: Limits = field(default_factory=Limits)
    shape: tuple[tuple[str, float], ...] = ()
    """Numbers of the model by their names in config.json, where the file lacks them or its architecture is unknown."""
    router: RouterWish = field(default_factory=RouterWish)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The whole file."""

    cluster: str
    hosts: tuple[HostEntry, ...]
    deployments: tuple[DeploymentWish, ...] = ()
    ssh: SshSettings = field(default_factory=SshSettings)
    api_keys: tuple[ApiKey, ...] = ()
    port_base: int = 18800
    """First of the ports dynctl may use on hosts (relay, NIXL side channels)."""
    port_count: int = 200
    path: str = "inventory.yaml"

    def host(self, name: str) -> HostEntry:
        """Return the entry of that name; KeyError when there is none."""
        for entry in self.hosts:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def entries(self, names: Collection[str]) -> tuple[HostEntry, ...]:
        """Return the entries of those names, in the file's order."""
        return tuple(entry for entry in self.hosts if entry.name in names)
