"""TTFT, ITL and throughput of a layout under a workload, each with a band that says how it was got.

An aggregated engine shares its steps between prompts and running sequences; prefill and decode pools do not, but pay
for moving the KV cache. Prompts queue as in M/G/c, decoding is a fixed point of Little's law.
Not here: seconds of a single step (`roofline`), choosing a layout (`search`).
Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

from dynctl.core.plan import Estimate, Figure
from dynctl.core.workload import Slo, Workload

MAX_UTILIZATION = 0.8
"""Above this a queue grows faster than any estimate of it is good."""
ETA_TRANSFER = 0.8
TRANSFER_LATENCY_S = 0.005
MAX_BATCHED_TOKENS = 8192
"""Engines split longer prompts over steps: a token waits for at most this much of somebody's prompt."""
QUANTILES = (0.5, 0.95, 0.99)
LENGTH_QUANTILES = ((0.25, 0.5), (0.625, 0.25), (0.85, 0.2), (0.97, 0.04), (0.99, 0.01))
"""Probabilities at which a length distribution is sampled, with the weight of each sample."""
TAIL = 0.01


class Pace(Protocol):
    """How fast one engine is: by the roofline, or as a simulated engine declares it."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token that moves from prefill to decode."""

    @property
    def is_moe(self) -> bool:
        """Whether experts make the figures less certain."""

    @property
    def host_s(self) -> float:
        """HTTP, tokenizing and scheduling of one request before its first token."""

    @property
    def stages(self) -> int:
        """Prompts a pipeline works on at once."""

    @property
    def source(self) -> str:
        """Where its constants come from; empty: nowhere worth a word."""

    def band(self, figure: str) -> tuple[float, float]:
        """Factors from an expected `ttft`, `tpot` or `tokens` to the ends of its 90 % band."""

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        """Seconds to compute a prompt."""

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one step."""


@dataclass(frozen=True, slots=True)
class DeclaredPace:
    """A simulated engine: its flags say how fast it pretends to be."""

    prefill_base_s: float
    prefill_s_per_token: float
    step_s: float
    step_s_per_sequence: float = 0.0
    kv_bytes_per_token: int = 0
    is_moe: bool = False
    host_s: float = 0.003
    stages: int = 1
    source: str = ""

    def band(self, figure: str) -> tuple[float, float]:
        """What a simulated engine declares it keeps; TTFT also has the machine it runs on in it."""
        return (0.8, 1.5) if figure == "ttft" else (0.9, 1.15)

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:  # noqa: ARG002 - cached tokens cost nothing
        """Seconds to compute a prompt."""
        return self.prefill_base_s + new_tokens * self.prefill_s_per_token

    def decode_s(self, sequences: float, context_tokens: float) -> float:  # noqa: ARG002 - context costs nothing
        """Seconds of one step."""
        return self.step_s + self.step_s_per_sequence * sequences


@dataclass(frozen=True, slots=True)
class Side:
    """Replicas of one role."""

    engine: Pace
    replicas: int
    max_sequences: float
    """Sequences one replica can hold: the smaller of its KV cache and its limit."""
    kv_capacity_tokens: float = math.inf
    """What one replica caches; bounds how many shared prefixes stay."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is priced: one aggregated side, or a prefill and a decode side."""

    prefill: Side
    decode: Side | None = None
    """None: the prefill side is aggregated and decodes too."""
    transfer_bytes_s: float = 0.0
    """Between a prefill and a decode engine, all their links together."""
    routes_by_prefix: bool = True
    """Requests go to the replica that holds their prefix, so that each replica caches its share of all prefixes."""


@dataclass(frozen=True, slots=True)
class Served:
    """How a layout serves a rate."""

    ttft_s: float
    ttft_p99_s: float
    itl_s: float
    itl_p99_s: float
    is_stable: bool
    limit: str
    """What binds first: `prefill`, `decode`, `kv cache` or `transfer`; empty when nothing does."""
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p95_s: float = 0.0
    sequences: float = 0.0
    """In flight on one replica that decodes."""
    hit_ratio: float = 0.0
    """Share of prompt tokens found in cache."""
    transfer_s: float = 0.0
    """Moving one prompt's KV and waiting for the link; 0 where nothing moves."""


def serve(layout: Layout, work: Workload, rate_rps: float) -> Served:
    """Price a layout at a rate of requests per second."""
    if layout.decode is None:
        return _aggregated(layout, work, rate_rps)
    return _disaggregated(layout, work, rate_rps)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Service times of prompts: samples of the length distribution with their weights, and moments."""

    samples: tuple[tuple[float, float], ...]
    mean_s: float
    cv2: float


def _prompts(pace: Pace, work: Workload, hit: float) -> _Prompts:
    """What computing a prompt takes, over the lengths prompts have and after what is cached."""
    samples = []
    for factor, weight in _lengths(work.isl_cv):
        tokens = work.isl_tokens * factor
        samples.append((pace.prefill_s(tokens * (1 - hit), tokens * hit), weight))
    mean = sum(s * w for s, w in samples)
    variance = sum(w * (s - mean) ** 2 for s, w in samples)
    return _Prompts(tuple(samples), mean, variance / mean**2 if mean else 0.0)


@lru_cache(maxsize=64)
def _lengths(cv: float) -> tuple[tuple[float, float], ...]:
    """Factors on the mean length with weights, of a log-normal distribution with this coefficient of variation."""
    if cv <= 0:
        return ((1.0, 1.0),)
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = NormalDist()
    raw = [(math.exp(sigma * normal.inv_cdf(q)), w) for q, w in LENGTH_QUANTILES]
    mean = sum(x * w for x, w in raw)
    return tuple((x / mean, w) for x, w in raw)


def hit_ratio(layout: Layout, work: Workload, sequences: float) -> float:
    """The share of prompt tokens found in cache: what others have sent before, as far as the cache keeps it.

    What running sequences hold for themselves is not there for prefixes; prefixes are taken to be equally popular.
    """
    side = layout.prefill
    if not work.shared_prefix_ratio or math.isinf(side.kv_capacity_tokens):
        return work.shared_prefix_ratio
    own = work.isl_tokens * (1 - work.shared_prefix_ratio) + work.osl_tokens / 2
    room = max(0.0, side.kv_capacity_tokens - sequences * own)
    spread = side.replicas if layout.routes_by_prefix else 1
    wanted = max(1, work.num_prefixes) / spread * work.isl_tokens * work.shared_prefix_ratio
    return work.shared_prefix_ratio * min(1.0, room / wanted if wanted else 1.0)


def _aggregated(layout: Layout, work: Workload, rate_rps: float) -> Served:
    side = layout.prefill
    rate = rate_rps / side.replicas
    engine = side.engine
    context = work.isl_tokens + work.osl_tokens / 2
    hit = hit_ratio(layout, work, 0.0)
    sequences = 0.0
    for _ in range(2 if hit and hit < work.shared_prefix_ratio + 1e-9 else 1):
        prompts = _prompts(engine, work, hit)
        busy = rate * prompts.mean_s / engine.stages
        if busy >= MAX_UTILIZATION:
            return _unstable(prompts.mean_s + engine.host_s, engine.decode_s(1, context), "prefill")
        sequences = _little(
            lambda b, busy=busy: engine.decode_s(b, context) / (1 - busy) * work.osl_tokens,  # type: ignore[misc]
            rate,
            side.max_sequences,
        )
        hit = min(hit, hit_ratio(layout, work, min(sequences, side.max_sequences)))
    step = engine.decode_s(min(sequences, side.max_sequences), context)
    if rate * (prompts.mean_s / engine.stages + step) >= 1:
        return _unstable(prompts.mean_s + engine.host_s, step, "prefill")
    queue = _queue(rate, prompts.mean_s / engine.stages + step, prompts.cv2, 1)
    fixed = 1.5 * step + engine.host_s
    chunk = engine.prefill_s(
        min(MAX_BATCHED_TOKENS, work.isl_tokens * (1 - hit)), work.isl_tokens * hit
    )
    # A token is late when its step carries a prompt: that is a share of the steps.
    itls = [step + chunk if rate * step > 1 - q else step for q in QUANTILES]
    ttfts = [fixed + _quantile(prompts, queue, q) for q in QUANTILES]
    return Served(
        ttft_s=prompts.mean_s + fixed + queue.mean_s,
        ttft_p99_s=ttfts[2],
        itl_s=step / (1 - busy),
        itl_p99_s=max(itls[2], step / (1 - busy)),
        is_stable=sequences <= side.max_sequences,
        limit="" if sequences <= side.max_sequences else "kv cache",
        ttft_p50_s=ttfts[0],
        ttft_p95_s=ttfts[1],
        itl_p50_s=itls[0],
        itl_p95_s=itls[1],
        sequences=sequences,
        hit_ratio=hit,
    )


def _disaggregated(layout: Layout, work: Workload, rate_rps: float) -> Served:
    decode, prefill = layout.decode, layout.prefill
    assert decode is not None
    context = work.isl_tokens + work.osl_tokens / 2
    hit = hit_ratio(layout, work, 0.0)
    prompts = _prompts(prefill.engine, work, hit)
    num_bytes = work.isl_tokens * prefill.engine.kv_bytes_per_token
    moving = TRANSFER_LATENCY_S + num_bytes / (layout.transfer_bytes_s * ETA_TRANSFER)
    alone = decode.engine.decode_s(1, context)
    fixed = moving + prefill.engine.host_s
    servers = prefill.replicas * prefill.engine.stages
    if rate_rps * prompts.mean_s / servers >= MAX_UTILIZATION:
        return _unstable(prompts.mean_s + fixed, alone, "prefill")
    load = rate_rps * moving / min(prefill.replicas, decode.replicas)
    if load >= MAX_UTILIZATION:
        return _unstable(prompts.mean_s + fixed, alone, "transfer")
    # Transfers of one size queue for their link: M/D/1.
    moving += load * moving / (2 * (1 - load))
    rate = rate_rps / decode.replicas

    def life_s(sequences: float) -> float:
        # A transfer holds its blocks on the decode side while it runs.
        return decode.engine.decode_s(sequences, context) * work.osl_tokens + moving

    sequences = _little(life_s, rate, decode.max_sequences)
    step = decode.engine.decode_s(min(sequences, decode.max_sequences), context)
    queue = _queue(rate_rps, prompts.mean_s, prompts.cv2, servers)
    fixed = moving + step + prefill.engine.host_s
    ttfts = [fixed + _quantile(prompts, queue, q) for q in QUANTILES]
    is_stable = sequences <= decode.max_sequences
    return Served(
        ttft_s=prompts.mean_s + fixed + queue.mean_s,
        ttft_p99_s=ttfts[2],
        itl_s=step,
        itl_p99_s=step,
        is_stable=is_stable,
        limit="" if is_stable else "kv cache",
        ttft_p50_s=ttfts[0],
        ttft_p95_s=ttfts[1],
        itl_p50_s=step,
        itl_p95_s=step,
        sequences=sequences,
        hit_ratio=hit,
        transfer_s=moving,
    )


def _unstable(ttft_s: float, itl_s: float, limit: str) -> Served:
    return Served(ttft_s, math.inf, itl_s, itl_s, False, limit)


def _little(life_s: Callable[[float], float], rate_rps: float, max_sequences: float) -> float:
    """Sequences in flight: the smallest B with B = rate × life(B); larger than `max_sequences` when there is none."""
    sequences = rate_rps * life_s(1.0)
    for _ in range(60):
        following = rate_rps * life_s(sequences)
        if following > max_sequences * 4 or abs(following - sequences) < 0.01:
            return following
        sequences = following
    return sequences


@dataclass(frozen=True, slots=True)
class _Queue:
    """Waiting before service: P(W > t) = waits × exp(-t / tau)."""

    waits: float
    tau_s: float

    @property
    def mean_s(self) -> float:
        return self.waits * self.tau_s


def _queue(rate_rps: float, service_s: float, cv2: float, servers: int) -> _Queue:
    """Waiting in M/G/c, by Erlang's C and the spread of service times; beyond saturation it has no end."""
    load = rate_rps * service_s
    rho = load / servers
    if rho >= 1:
        return _Queue(1.0, math.inf)
    if rho <= 0:
        return _Queue(0.0, 0.0)
    return _Queue(_erlang_c(servers, load), (1 + cv2) / 2 * service_s / (servers * (1 - rho)))


def _quantile(prompts: _Prompts, queue: _Queue, q: float) -> float:
    """The quantile of waiting plus computing, which are independent."""
    tail = 1 - q
    if math.isinf(queue.tau_s):
        return math.inf
    if len(prompts.samples) == 1:
        wait = queue.tau_s * math.log(queue.waits / tail) if queue.waits > tail else 0.0
        return prompts.samples[0][0] + max(0.0, wait)

    def beyond(t: float) -> float:
        return sum(
            w
            * (
                1.0
                if t < s
                else queue.waits * math.exp(-(t - s) / queue.tau_s)
                if queue.tau_s
                else 0.0
            )
            for s, w in prompts.samples
        )

    low, high = 0.0, max(s for s, _ in prompts.samples) + 20 * queue.tau_s + 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        if beyond(middle) > tail + 1e-12:
            low = middle
        else:
            high = middle
    return high


def _erlang_c(servers: int, load: float) -> float:
    """The chance that a request must wait."""
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = load * blocking / (k + load * blocking)
    rho = load / servers
    return blocking / (1 - rho + rho * blocking)


def meets(served: Served, slo: Slo) -> bool:
    """Whether the goals hold at p99."""
    if not served.is_stable:
        return False
    if slo.ttft_ms is not None and served.ttft_p99_s * 1e3 > slo.ttft_ms:
        return False
    return slo.itl_ms is None or served.itl_p99_s * 1e3 <= slo.itl_ms


def max_rate_rps(layout: Layout, work: Workload, slo: Slo) -> float:
    """The highest rate at which the goals hold; 0 when they hold at none."""
    low, high = 0.0, 1e-3
    if not meets(serve(layout, work, high), slo):
        return 0.0
    while high < 1e6 and meets(serve(layout, work, high), slo):
        low, high = high, high * 2
    for _ in range(24):
        middle = (low + high) / 2
        if meets(serve(layout, work, middle), slo):
            low = middle
        else:
            high = middle
    return low


def estimate(layout: Layout, work: Workload, source: str) -> Estimate:
    """The figures of a plan: latency at the workload's rate, throughput at the highest rate the layout bears."""
    served = serve(layout, work, work.rate_rps)
    prefill = layout.prefill.engine
    decode = layout.decode.engine if layout.decode else prefill
    capacity = max_rate_rps(layout, work, Slo()) * work.osl_tokens
    why = prefill.source or source
    return Estimate(
        ttft_ms=figure(served.ttft_s * 1e3, prefill.band("ttft"), why),
        itl_ms=figure(served.itl_s * 1e3, decode.band("tpot"), decode.source or source),
        out_tokens_s=figure(capacity, decode.band("tokens"), decode.source or source),
    )


def figure(expected: float, band: tuple[float, float], source: str) -> Figure:
    """A figure with its band; `band` holds the factors to its ends."""
    return Figure(_round(expected * band[0]), _round(expected), _round(expected * band[1]), source)


def _round(value: float) -> float:
    """Three significant digits: more would claim more than is known."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 2 - math.floor(math.log10(abs(value))))
