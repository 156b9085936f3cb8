"""Snapshot + History → what an operator reads: per engine, pool and deployment. `dynctl top -o json` prints these.

None means not known, never zero. Not here: layout, colour, units for people. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.kv_links import LINK_CLASSES
from dynctl.core.snapshot import (
    EngineSample,
    GpuSample,
    Histogram,
    HostSnapshot,
    RouterSample,
    Snapshot,
)
from dynctl.core.workload import Slo
from dynctl.telemetry.history import History, Latency, latency, merge, share_within
from dynctl.telemetry.known import first_of, mean_of, ratio_of, sum_int, sum_of

STALE_S = 5.0
"""Figures older than this are shown as old, and left out of sums."""
STALE = "stale"
"""Shown instead of the state that was true when the host last answered."""

Goals = Mapping[str, Slo]
"""By deployment."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine."""

    id: str
    host_name: str
    deployment: str
    role: str
    state: str
    """An EngineState, or `stale`."""
    age_s: float
    num_restarts: int = 0
    last_error: str = ""
    gpu_indices: tuple[int, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    hit_ratio: float | None = None
    """Share of queried prompt tokens found in the engine's own prefix cache, over the latency window."""
    ttft: Latency | None = None
    itl: Latency | None = None
    prompt_tokens_s: float | None = None
    output_tokens_s: float | None = None
    preemptions_s: float | None = None
    gpu_util_ratio: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_power_w: float | None = None
    gpu_temperature_celsius: float | None = None
    pid: int | None = None
    started_unix_s: float | None = None
    seen: str = ""
    """What one that starts was last found to lack."""
    transfer: Latency | None = None
    """KV pulled from prefill engines: how long one transfer took, …"""
    transfer_bytes_s: float | None = None
    transfers_failed_total: float | None = None
    """… and how many failed since its start."""

    @property
    def tokens_s(self) -> float | None:
        """The tokens it is there for: of prompts where it only prefills, else generated ones."""
        return self.prompt_tokens_s if self.role == "prefill" else self.output_tokens_s


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The engines of one role in one deployment; stale ones count in `num_engines` only."""

    deployment: str
    role: str
    num_ready: int
    num_engines: int
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None
    """Mean over engines."""
    hit_ratio: float | None
    ttft: Latency | None
    itl: Latency | None
    prompt_tokens_s: float | None
    output_tokens_s: float | None
    transfer: Latency | None = None
    """KV its engines pulled from prefill engines: how long one transfer took, and how much they pull."""
    transfer_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class MovedFigures:
    """KV handed over on links of one class."""

    link: str
    """A class of `core.kv_links`."""
    tokens_s: float
    bytes_s: float | None
    """None: nobody said what a token takes."""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """How many engines' caches a router knows; of several routers the one that knows the fewest."""

    num_known: int
    num_doubtful: int
    """Known in part: messages are missing, or come too late."""
    num_reading: int
    """Being read, or not heard of yet."""
    num_untold: int
    """Nobody tells."""
    num_blocks: int
    """In the index so far."""

    @property
    def num_engines(self) -> int:
        """All of them."""
        return self.num_known + self.num_doubtful + self.num_reading + self.num_untold


@dataclass(frozen=True, slots=True)
class DeploymentFigures:
    """One model as its clients meet it: from the router's counters."""

    name: str
    requests_s: float | None
    error_ratio: float | None
    inflight: float | None
    queued: float | None
    prompt_tokens_s: float | None
    output_tokens_s: float | None
    ttft: Latency | None
    itl: Latency | None
    predicted_hit_ratio: float | None
    """Share of prompt tokens the router expected to be cached where it sent them."""
    reported_hit_ratio: float | None
    """Share the engines that computed prompts (prefill, aggregated) found cached. They count a prompt when it begins, a router
    once it is answered: while conversations grow, this is ahead. Routers' own questions are in it, a few hundred tokens."""
    possible_hit_ratio: float | None = None
    """Share that caches without limit would have had."""
    lost_routing_ratio: float | None = None
    """Share that another engine held, …"""
    lost_eviction_ratio: float | None = None
    """… that none held any more, …"""
    lost_cold_ratio: float | None = None
    """… and that was never seen before."""
    moved: tuple[MovedFigures, ...] = ()
    """KV handed over from prefill to decode engines; classes of links without any are left out."""
    caches: CacheFigures | None = None
    findings: tuple[tuple[str, str], ...] = ()
    """What routers find wrong: engine (empty: the router itself) and cause."""
    routers: tuple[str, ...] = ()
    """Those that answer."""
    slo: Slo = field(default_factory=Slo)
    ttft_within_ratio: float | None = None
    """Share of requests whose first token came within its goal, over the latency window, …"""
    itl_within_ratio: float | None = None
    """… and of tokens after it; None also without a goal."""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """One host: its GPUs, and how fresh its report is."""

    name: str
    age_s: float
    error: str
    gpus: tuple[GpuSample, ...]
    units: tuple[tuple[str, str], ...] = ()
    """Id and kind (`engine`, `router`, `relay`) of what it runs."""
    kv_lag: Latency | None = None
    """How old events of its engines' caches are when its relay sends them."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything the overview shows, at one instant."""

    cluster: str
    taken_unix_s: float
    deployments: tuple[DeploymentFigures, ...]
    pools: tuple[PoolFigures, ...]
    engines: tuple[EngineFigures, ...]
    hosts: tuple[HostFigures, ...]

    @property
    def age_s(self) -> float | None:
        """Age of the oldest host report that still counts as live; None when there is none."""
        return max(
            (h.age_s for h in self.hosts if h.age_s <= STALE_S and not h.error), default=None
        )

    def slo_of(self, deployment: str) -> Slo:
        """The goals of a deployment."""
        return next((d.slo for d in self.deployments if d.name == deployment), Slo())


def summarize(snapshot: Snapshot, history: History, goals: Goals | None = None) -> Overview:
    """Work out every figure of a snapshot that `history` has already taken in."""
    engines = tuple(
        _engine(host, unit, history)
        for host in snapshot.hosts
        for unit in host.units
        if unit.kind == "engine"
    )
    routers = [(host.age_s, router) for host in snapshot.hosts for router in host.routers]
    names = sorted({e.deployment for e in engines} | {r.deployment for _, r in routers})
    pools = [
        _pool(name, role, [e for e in engines if (e.deployment, e.role) == (name, role)], history)
        for name in names
        for role in _roles(engines, name)
    ]
    deployments = [
        _deployment(
            name,
            [r for age_s, r in routers if r.deployment == name and age_s + r.age_s <= STALE_S],
            [p for p in pools if p.deployment == name],
            history,
            [e for e in engines if e.deployment == name and e.state != STALE],
            (goals or {}).get(name, Slo()),
        )
        for name in names
    ]
    hosts = tuple(_host(host, history) for host in snapshot.hosts)
    return Overview(
        snapshot.cluster,
        snapshot.taken_unix_s,
        tuple(deployments),
        tuple(pools),
        tuple(sorted(engines, key=lambda e: (e.deployment, _ROLE_ORDER.get(e.role, 9), e.id))),
        hosts,
    )


def _host(host: HostSnapshot, history: History) -> HostFigures:
    units = tuple((unit.id, unit.kind) for unit in host.units)
    lag = None
    if any(host.age_s + relay.age_s <= STALE_S for relay in host.relays):
        lag = latency(history.relay(host.host_name).observed("kv_lag_s"))
    return HostFigures(host.host_name, host.age_s, host.error, host.gpus, units, lag)


_ROLE_ORDER = {"prefill": 0, "decode": 1, "aggregated": 2}


def _roles(engines: Iterable[EngineFigures], deployment: str) -> list[str]:
    roles = {e.role for e in engines if e.deployment == deployment}
    return sorted(roles, key=lambda role: (_ROLE_ORDER.get(role, 9), role))


def _engine(host: HostSnapshot, unit: UnitStatus, history: History) -> EngineFigures:
    sample = next((s for s in host.engines if s.id == unit.id), None)
    age_s = host.age_s + (sample.age_s if sample else 0.0)
    gpus = [gpu for gpu in host.gpus if gpu.uuid in unit.gpu_uuids]
    known = EngineFigures(
        id=unit.id,
        host_name=host.host_name,
        deployment=unit.deployment,
        role=unit.role,
        state=str(unit.state),
        age_s=age_s,
        num_restarts=unit.num_restarts,
        last_error=unit.last_error,
        gpu_indices=tuple(gpu.index for gpu in gpus),
        pid=unit.pid,
        started_unix_s=unit.started_unix_s,
        seen=unit.seen,
    )
    if age_s > STALE_S:
        # A host that does not answer leaves its engines' state unknown; one late scrape does not.
        is_unknown = host.age_s > STALE_S or unit.state == EngineState.READY
        return replace(known, state=STALE) if is_unknown else known
    live = _live(sample, history) if sample else {}
    return replace(known, **_gpu_figures(gpus), **live)


def _gpu_figures(gpus: Sequence[GpuSample]) -> dict[str, Any]:
    degrees = [g.temperature_celsius for g in gpus if g.temperature_celsius is not None]
    return {
        "gpu_util_ratio": mean_of(gpu.util_ratio for gpu in gpus),
        "gpu_memory_used_bytes": sum_int(gpu.memory_used_bytes for gpu in gpus),
        "gpu_memory_bytes": sum_int(gpu.memory_bytes for gpu in gpus),
        "gpu_power_w": sum_of(gpu.power_w for gpu in gpus),
        "gpu_temperature_celsius": max(degrees, default=None),
    }


def _live(sample: EngineSample, history: History) -> dict[str, Any]:
    series = history.engine(sample.id)
    return {
        "running": sample.running,
        "waiting": sample.waiting,
        "kv_usage_ratio": sample.kv_usage_ratio,
        "hit_ratio": ratio_of(
            series.grown("prefix_hits_tokens_total"), series.grown("prefix_queries_tokens_total")
        ),
        "ttft": latency(series.observed("ttft_s")),
        "itl": latency(series.observed("itl_s")),
        "prompt_tokens_s": series.rate("prompt_tokens_total"),
        "output_tokens_s": series.rate("generation_tokens_total"),
        "preemptions_s": series.rate("preemptions_total"),
        "transfer": latency(series.observed("transfer_s")),
        "transfer_bytes_s": series.rate("transfer_bytes_total"),
        "transfers_failed_total": sample.transfers_failed_total,
    }


def _pool(
    deployment: str, role: str, engines: Sequence[EngineFigures], history: History
) -> PoolFigures:
    live = [e for e in engines if e.state != STALE]
    return PoolFigures(
        deployment=deployment,
        role=role,
        num_ready=sum(e.state == EngineState.READY for e in engines),
        num_engines=len(engines),
        running=sum_of(e.running for e in live),
        waiting=sum_of(e.waiting for e in live),
        kv_usage_ratio=mean_of(e.kv_usage_ratio for e in live),
        hit_ratio=_pooled_hits(live, history),
        ttft=latency(merge(history.engine(e.id).observed("ttft_s") for e in live)),
        itl=latency(merge(history.engine(e.id).observed("itl_s") for e in live)),
        prompt_tokens_s=sum_of(e.prompt_tokens_s for e in live),
        output_tokens_s=sum_of(e.output_tokens_s for e in live),
        transfer=latency(merge(history.engine(e.id).observed("transfer_s") for e in live)),
        transfer_bytes_s=sum_of(e.transfer_bytes_s for e in live),
    )


def _pooled_hits(engines: Iterable[EngineFigures], history: History) -> float | None:
    series = [history.engine(e.id) for e in engines]
    return ratio_of(
        sum_of(s.grown("prefix_hits_tokens_total") for s in series),
        sum_of(s.grown("prefix_queries_tokens_total") for s in series),
    )


def _deployment(
    name: str,
    routers: Sequence[RouterSample],
    pools: Sequence[PoolFigures],
    history: History,
    engines: Sequence[EngineFigures],
    slo: Slo,
) -> DeploymentFigures:
    series = [history.router(router.id) for router in routers]

    def rate(field: str) -> float | None:
        return sum_of(s.rate(field) for s in series)

    def grown(field: str) -> float | None:
        return sum_of(s.grown(field) for s in series)

    prefilling = [e for e in engines if e.role != "decode"]
    ttft, itl = (merge(s.observed(field) for s in series) for field in ("ttft_s", "itl_s"))
    return DeploymentFigures(
        name=name,
        requests_s=rate("requests_total"),
        error_ratio=ratio_of(grown("errors_total"), grown("requests_total")),
        inflight=sum_of(r.inflight for r in routers),
        queued=sum_of(r.queued for r in routers),
        prompt_tokens_s=rate("prompt_tokens_total"),
        output_tokens_s=first_of(
            rate("output_tokens_total"),
            sum_of(p.output_tokens_s for p in pools if p.role != "prefill"),
        ),
        ttft=latency(ttft),
        itl=latency(itl),
        predicted_hit_ratio=ratio_of(
            grown("predicted_hit_tokens_total"), grown("prompt_tokens_total")
        ),
        reported_hit_ratio=_pooled_hits(prefilling, history),
        possible_hit_ratio=ratio_of(
            grown("possible_hit_tokens_total"), grown("prompt_tokens_total")
        ),
        lost_routing_ratio=ratio_of(grown("routing_tokens_total"), grown("prompt_tokens_total")),
        lost_eviction_ratio=ratio_of(grown("eviction_tokens_total"), grown("prompt_tokens_total")),
        lost_cold_ratio=ratio_of(grown("cold_tokens_total"), grown("prompt_tokens_total")),
        moved=_moved(routers, rate),
        caches=_caches(routers),
        routers=tuple(sorted(router.id for router in routers)),
        findings=tuple(sorted({found for router in routers for found in router.findings})),
        slo=slo,
        ttft_within_ratio=_within(ttft, slo.ttft_ms),
        itl_within_ratio=_within(itl, slo.itl_ms),
    )


def _moved(
    routers: Sequence[RouterSample], rate: Callable[[str], float | None]
) -> tuple[MovedFigures, ...]:
    per_token = max((router.kv_bytes_per_token or 0.0 for router in routers), default=0.0)
    rates = ((link, rate(f"moved_{link}_tokens_total")) for link in LINK_CLASSES)
    return tuple(
        MovedFigures(link, tokens_s, tokens_s * per_token if per_token else None)
        for link, tokens_s in rates
        if tokens_s
    )


def _caches(routers: Sequence[RouterSample]) -> CacheFigures | None:
    told = [router for router in routers if router.caches_known is not None]
    if not told:
        return None
    least = min(told, key=lambda router: router.caches_known or 0.0)
    return CacheFigures(
        int(least.caches_known or 0),
        int(least.caches_doubtful or 0),
        int(least.caches_reading or 0),
        int(least.caches_untold or 0),
        int(least.index_blocks or 0),
    )


def _within(observed: Histogram | None, goal_ms: float | None) -> float | None:
    return None if goal_ms is None else share_within(observed, goal_ms / 1e3)
