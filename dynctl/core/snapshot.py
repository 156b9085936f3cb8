"""The cluster at one instant, each part with its age. None means not known, never zero. Pure."""

from dataclasses import dataclass

from dynctl.core.deployment import UnitStatus


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU now."""

    index: int
    uuid: str
    name: str
    util_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative Prometheus histogram: `counts[i]` observations were ≤ `bounds[i]`; the last count is of all.

    The bound of infinity is left out, since JSON cannot carry it: there is one more count than bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Sum of the observed values."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine's counters as last scraped; cumulative ones end in `_total`."""

    id: str
    incarnation: str
    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    prefix_queries_tokens_total: float | None = None
    prefix_hits_tokens_total: float | None = None
    external_queries_tokens_total: float | None = None
    external_hits_tokens_total: float | None = None
    preemptions_total: float | None = None
    ttft_s: Histogram | None = None
    itl_s: Histogram | None = None
    transfer_s: Histogram | None = None
    """KV pulled from prefill engines (NIXL): how long each transfer took."""
    transfer_bytes_total: float | None = None
    transfers_failed_total: float | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One router's counters as last scraped."""

    id: str
    deployment: str
    requests_total: float | None = None
    errors_total: float | None = None
    inflight: float | None = None
    queued: float | None = None
    prompt_tokens_total: float | None = None
    predicted_hit_tokens_total: float | None = None
    possible_hit_tokens_total: float | None = None
    output_tokens_total: float | None = None
    hit_tokens_total: float | None = None
    """Of prompts in whole blocks: taken from a cache, …"""
    routing_tokens_total: float | None = None
    """… lost since another engine held them, …"""
    eviction_tokens_total: float | None = None
    """… or none did any more, …"""
    cold_tokens_total: float | None = None
    """… or never seen before."""
    moved_nvlink_tokens_total: float | None = None
    """KV handed over from prefill to decode engines, by class of link (`core.kv_links`)."""
    moved_host_tokens_total: float | None = None
    moved_rdma_tokens_total: float | None = None
    moved_tcp_tokens_total: float | None = None
    moved_unknown_tokens_total: float | None = None
    kv_bytes_per_token: float | None = None
    """0: not known."""
    caches_known: float | None = None
    """Engines whose cache is known, …"""
    caches_doubtful: float | None = None
    """… known in part, since messages are missing, …"""
    caches_reading: float | None = None
    """… being read, or not heard of yet, …"""
    caches_untold: float | None = None
    """… or told by nobody."""
    index_blocks: float | None = None
    findings: tuple[tuple[str, str], ...] = ()
    """What it finds wrong: engine (empty: itself) and cause."""
    ttft_s: Histogram | None = None
    itl_s: Histogram | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RelaySample:
    """One host's relay as last scraped."""

    id: str
    incarnation: str
    kv_lag_s: Histogram | None = None
    """How old the oldest event of each KV message was when it went out to routers."""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """One host as its agent reports it."""

    host_name: str
    units: tuple[UnitStatus, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    engines: tuple[EngineSample, ...] = ()
    routers: tuple[RouterSample, ...] = ()
    age_s: float = 0.0
    error: str = ""
    """Why the host could not be asked; its figures are then the last known ones."""
    relays: tuple[RelaySample, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole cluster at one instant."""

    cluster: str
    taken_unix_s: float
    hosts: tuple[HostSnapshot, ...]
