"""Wire types of the agent's control API and of the relay's table, versioned.

Not here: HTTP, files, processes. A field may be added with a default; renaming or removing one raises
`PROTOCOL_VERSION`. Secrets never travel here: they lie in `ROOT/tls` and `ROOT/secrets`.
Pure.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from dynctl.core.deployment import EngineInfo, EngineState, UnitStatus
from dynctl.core.plan import PlannedGpu
from dynctl.errors import DynctlError

PROTOCOL_VERSION = 1
RELAY_ID = "relay"
"""Id of the unit that is a host's relay; no engine or router has it."""
MEMBER_CERTIFICATE = "member"
"""Stem of a host's files in `ROOT/tls` by which relays of other hosts know it as one of their cluster."""

T = TypeVar("T")

_LATER = {"ep": 1, "gang": None}
"""Fields of engines that came later, and what they are unless used: what runs since before is known by a digest without them."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another member of a gang, and the relay of its host, which tells how it stands."""

    id: str
    host_name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Gang:
    """The place of a process among those that together are one engine, one on each of several hosts.

    All run or none: each start of the engine is one incarnation of them all. Rank 0 leads, and alone is asked anything.
    """

    id: str
    """The engine they are."""
    rank: int
    nodes: int
    master_address: str
    """Where they meet: rank 0 listens there."""
    master_port: int
    peers: tuple[Peer, ...]
    """Of rank 0: all others; of others: rank 0."""
    digest: str
    """Of what all of them are to be: only members of one digest run together."""


@dataclass(frozen=True, slots=True)
class EngineWish:
    """One engine to run on this host: everything its argv and environment are made from."""

    id: str
    deployment: str
    role: str
    """`prefill`, `decode` or `aggregated`."""
    kind: str
    """A module of `agents/engines`."""
    model: str
    """Directory on the host (vllm), or a name (sim, external)."""
    served_name: str = ""
    """Name under `/v1/models`; empty: the model's."""
    python: str | None = None
    """Interpreter of the engine's own environment; None: the agent's (sim)."""
    device: str = "gpu"
    """`gpu` or `cpu`."""
    gpus: tuple[PlannedGpu, ...] = ()
    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Data-parallel ranks, each on tp × pp GPUs of its own."""
    ep: int = 1
    """Expert-parallel size: 1, or all tp × dp ranks."""
    data_address: str = "127.0.0.1"
    """Where other hosts reach this one's NIXL side channel."""
    side_channel_port: int | None = None
    """Of the first rank; each other has the next one."""
    internal_port: int | None = None
    """First of 16 loopback ports the engine may use within the host; None: the agent finds free ones."""
    nics: tuple[str, ...] = ()
    """RDMA devices next to the GPUs, for UCX."""
    max_model_len_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    args: tuple[tuple[str, str], ...] = ()
    """Extra engine flags: name without dashes to value; an empty value is a bare flag."""
    env: tuple[tuple[str, str], ...] = ()
    """Extra environment; a value `${file:NAME}` is read from `ROOT/secrets/NAME` at each start."""
    kv_transfer: bool = False
    """Whether the engine hands KV blocks to or takes them from other engines."""
    allow_old_version: bool = False
    url: str = ""
    """Where a running server answers (external)."""
    tokenizer: str | None = None
    """Directory with the tokenizer when it is not the model's."""
    revision: str | None = None
    block_hash_seed: str = ""
    """Seed of the deployment's block hashes; passed to the relay."""
    start_deadline_s: float | None = None
    """How long a start may take until a token comes; None: the engine kind's own limit."""
    gang: Gang | None = None
    """Its place in an engine over several hosts; None: it is one by itself."""

    @property
    def name(self) -> str:
        """The name clients ask for."""
        return self.served_name or self.model

    @property
    def side_channel_ports(self) -> range:
        """Where its ranks hand over KV blocks; empty: they do not."""
        first = self.side_channel_port
        return range(0) if first is None else range(first, first + self.dp)


@dataclass(frozen=True, slots=True)
class RouterUnit:
    """One router to run on this host."""

    id: str
    deployment: str
    config: dict[str, Any]
    """A `router.config.RouterConfig` as a JSON object; written to a 0600 file before the start."""
    listen: str
    """`host:port` where clients connect; only reported, the config rules."""


@dataclass(frozen=True, slots=True)
class RelayWish:
    """Where the host's relay listens."""

    listen_host: str
    port: int


@dataclass(frozen=True, slots=True)
class HostSlice:
    """What one host shall run: the desired state its agent keeps, also over reboots."""

    cluster: str
    host_name: str
    generation: int
    """Counts the plans applied to the cluster; an older one is refused."""
    fence: int = 0
    """Number of the operator's lock; an older one is refused."""
    plan_digest: str = ""
    bundle: str = ""
    relay: RelayWish | None = None
    engines: tuple[EngineWish, ...] = ()
    routers: tuple[RouterUnit, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What one agent runs now; `GET /v1/status`."""

    version: str
    cluster: str
    """Empty until the first slice."""
    host_name: str
    generation: int
    """-1 until the first slice."""
    fence: int
    plan_digest: str
    bundle: str
    boot_id: str
    """Kernel boot id and PID 1's start time: differs after every reboot, also of containers."""
    pid: int
    started_unix_s: float
    units: tuple[UnitStatus, ...] = ()
    asides: tuple[UnitStatus, ...] = ()
    """Processes beside a unit of theirs: successors not ready yet, predecessors that end."""
    degraded: tuple[str, ...] = ()
    """What the agent itself cannot do at the moment, e.g. write its state."""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """How one member of a gang stands, for the agents of the others; a line of the relay's `/v1/members` is an array of these."""

    id: str
    rank: int
    digest: str
    state: EngineState
    incarnation: str = ""
    """Of the gang's start it is part of; empty: no process of it runs."""
    last_incarnation: str = ""
    """The one it was last part of."""
    is_waiting: bool = False
    """Whether it would start now, were the others there."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class RelayEntry:
    """One engine as the relay needs it; a line of `GET /v1/relay-table` is an array of these."""

    info: EngineInfo
    socket: str
    """Unix socket of the engine's HTTP server; empty: it is reached by `url`."""
    kv_events: str | None = None
    """ZMQ endpoint where the engine publishes KV events; None: it does not."""
    kv_replay: str | None = None
    topic: str = ""
    block_hash_seed: str = ""
    url: str = ""
    """`http://host:port` of an adopted server without a Unix socket."""
    member: MemberInfo | None = None
    """How it stands in its gang; None: it is in none."""

    @property
    def is_led(self) -> bool:
        """Whether it is a part of an engine that another host leads: nothing that routers could use."""
        return self.member is not None and self.member.rank > 0


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """Body of `POST /v1/shutdown`; `now` skips draining."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class ApiError:
    """Body of every answer that is not 2xx."""

    message: str
    hint: str | None = None
    details: tuple[str, ...] = field(default=())


def encode(value: object) -> bytes:
    """Write a wire value as JSON."""
    return msgspec.json.encode(value)


def decode(content: bytes, kind: type[T]) -> T:
    """Read a wire value.

    Raises:
        DynctlError: when the content is no such value; says where it differs.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise DynctlError(f"not a {kind.__name__}: {error}") from error


def spec_digest(wish: EngineWish | RouterUnit | RelayWish) -> str:
    """Name a specification by its content, so that an unchanged one is never restarted.

    How long a start may take is no part of it: nothing that runs depends on that.
    """
    if isinstance(wish, EngineWish):
        wish = replace(wish, start_deadline_s=None)
    content = msgspec.to_builtins(wish, order="deterministic")
    for name, default in _LATER.items():
        if name in content and content[name] == default:
            del content[name]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
