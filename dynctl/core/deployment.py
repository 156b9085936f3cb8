"""What really runs, as agents report it. Also the wire values of the relay's engine table. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """Life of a supervised process; only READY takes new requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    """Died; waits before the next start."""
    FAILED = "failed"
    """Gave up: too many deaths, or a fault a restart cannot cure."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the router must know of one engine; the relay's `/v1/engines` watch carries a list of these."""

    id: str
    """The replica's id."""
    incarnation: str
    """New at every start; blocks and bookings of an older one are void."""
    state: EngineState
    role: str
    deployment: str
    kind: str
    model: str
    """Name the engine serves under `/v1/models`."""
    block_size_tokens: int = 0
    """0: not known yet."""
    kv_capacity_tokens: int = 0
    """Of all its ranks together."""
    max_model_len_tokens: int = 0
    max_num_seqs: int = 0
    """Of each rank."""
    side_channel_host: str = ""
    side_channel_port: int = 0
    """Of its first rank; each other has the next one."""
    ranks: int = 1
    """Data-parallel ranks: each has a cache, a queue and a side channel of its own behind the one HTTP server."""
    kv_identity: str = ""
    """Digest, with the number of its recipe in front, of what its KV blocks stand for and how they are laid out; empty: not
    known."""
    tp: int = 0
    """Tensor-parallel size; 0: not known."""


def may_exchange_kv(one: EngineInfo, other: EngineInfo) -> bool:
    """Whether nothing that is known speaks against handing KV blocks from one engine to the other."""
    if one.tp and other.tp and max(one.tp, other.tp) % min(one.tp, other.tp):
        return False
    ours, theirs = one.kv_identity, other.kv_identity
    return ours == theirs or ours.partition(":")[0] != theirs.partition(":")[0]


@dataclass(frozen=True, slots=True)
class UnitStatus:
    """One supervised process (engine, router or relay) as the agent sees it."""

    id: str
    kind: str
    """`engine`, `member` (the part of an engine that another host leads), `router` or `relay`."""
    state: EngineState
    incarnation: str = ""
    pid: int | None = None
    started_unix_s: float | None = None
    num_restarts: int = 0
    last_error: str = ""
    """Why it last died or failed, one line."""
    spec_digest: str = ""
    """Of the specification it was started with, or will be; differs from the wish while a change is under way."""
    role: str = ""
    deployment: str = ""
    url: str = ""
    """Where a router listens."""
    gpu_uuids: tuple[str, ...] = ()
    bundle: str = ""
    """Of the code it was started with; empty: not from a bundle."""
    beside: str = ""
    """The unit it takes over from or has handed over to; empty: it is a unit itself."""
    is_held: bool = False
    """Drained by a person, and kept down until that is undone."""
    seen: str = ""
    """What one that starts was last found to lack, one line; empty: nobody looked yet, or it is ready."""
    start_deadline_s: float | None = None
    """How long a start may take, as wished; None: the engine kind's own limit. No part of `spec_digest`."""
    command: str = ""
    """What was started, as a shell would read it; empty: not known. Samples leave it out."""
    leader: str = ""
    """Of a member: the engine it is a part of."""
