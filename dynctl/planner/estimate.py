"""TTFT, ITL and throughput of a layout under a workload, each with a band that says how it was got.

An aggregated engine shares its steps between prompts and running sequences; prefill and decode pools do not, but pay
for moving the KV cache. Prompts queue as in M/G/c, decoding is a fixed point of Little's law.
Not here: seconds of a single step (`roofline`), choosing a layout (`search`).
Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynctl.core.plan import Estimate, Figure
from dynctl.core.workload import Slo, Workload

MAX_UTILIZATION = 0.8
"""Above this a queue grows faster than any estimate of it is good."""
ETA_TRANSFER = 0.8
TRANSFER_LATENCY_S = 0.005
_P99 = math.log(100.0)

ITL_BAND_DENSE = 0.6
ITL_BAND_MOE = 0.8
TTFT_BAND = 1.0
"""Factors of the band around an uncalibrated figure: expected / (1 + b) to expected × (1 + b). They hold about 85 % of
59 public end-to-end points of aggregated engines (median error 13 % dense, 21 % MoE); TTFT is less certain."""


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


@dataclass(frozen=True, slots=True)
class Layout:
    """What is priced: one aggregated side, or a prefill and a decode side."""

    prefill: Side
    decode: Side | None = None
    """None: the prefill side is aggregated and decodes too."""
    transfer_bytes_s: float = 0.0
    """Between a prefill and a decode engine, all their links together."""


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


def serve(layout: Layout, work: Workload, rate_rps: float) -> Served:
    """Price a layout at a rate of requests per second."""
    if layout.decode is None:
        return _aggregated(layout.prefill, work, rate_rps)
    return _disaggregated(layout, work, rate_rps)


def _prompt(work: Workload) -> tuple[float, float]:
    """New and cached tokens of a mean prompt."""
    past = work.isl_tokens * work.shared_prefix_ratio
    return work.isl_tokens - past, past


def _aggregated(side: Side, work: Workload, rate_rps: float) -> Served:
    rate = rate_rps / side.replicas
    new, past = _prompt(work)
    context = work.isl_tokens + work.osl_tokens / 2
    engine = side.engine
    prefill = engine.prefill_s(new, past)
    busy = rate * prefill
    if busy >= MAX_UTILIZATION:
        return _unstable(prefill + engine.host_s, engine.decode_s(1, context), "prefill")

    def life_s(sequences: float) -> float:
        return engine.decode_s(sequences, context) / (1 - busy) * work.osl_tokens

    sequences = _little(life_s, rate, side.max_sequences)
    step = engine.decode_s(min(sequences, side.max_sequences), context)
    itl = step / (1 - busy)
    if rate * (prefill + step) >= 1:
        return _unstable(prefill + engine.host_s, step, "prefill")
    wait, wait_p99 = _queue(rate, prefill + step, 1)
    ttft = prefill + 1.5 * step + wait + engine.host_s
    mixed_share = rate * step
    return Served(
        ttft,
        ttft + wait_p99,
        itl,
        step + prefill if mixed_share > 0.01 else itl,
        sequences <= side.max_sequences,
        "" if sequences <= side.max_sequences else "kv cache",
    )


def _disaggregated(layout: Layout, work: Workload, rate_rps: float) -> Served:
    decode, prefill = layout.decode, layout.prefill
    assert decode is not None
    new, past = _prompt(work)
    context = work.isl_tokens + work.osl_tokens / 2
    compute = prefill.engine.prefill_s(new, past)
    num_bytes = work.isl_tokens * prefill.engine.kv_bytes_per_token
    moving = TRANSFER_LATENCY_S + num_bytes / (layout.transfer_bytes_s * ETA_TRANSFER)
    alone = decode.engine.decode_s(1, context)
    if rate_rps * compute / prefill.replicas >= MAX_UTILIZATION:
        return _unstable(compute + moving + prefill.engine.host_s, alone, "prefill")
    if rate_rps * moving / min(prefill.replicas, decode.replicas) >= MAX_UTILIZATION:
        return _unstable(compute + moving + prefill.engine.host_s, alone, "transfer")
    rate = rate_rps / decode.replicas

    def life_s(sequences: float) -> float:
        # A transfer holds its blocks on the decode side while it runs.
        return decode.engine.decode_s(sequences, context) * work.osl_tokens + moving

    sequences = _little(life_s, rate, decode.max_sequences)
    step = decode.engine.decode_s(min(sequences, decode.max_sequences), context)
    wait, wait_p99 = _queue(rate_rps, compute, prefill.replicas)
    ttft = compute + moving + step + wait + prefill.engine.host_s
    is_stable = sequences <= decode.max_sequences
    return Served(ttft, ttft + wait_p99, step, step, is_stable, "" if is_stable else "kv cache")


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


def _queue(rate_rps: float, service_s: float, servers: int) -> tuple[float, float]:
    """Mean wait and what the 99th percentile adds to it, in M/G/c with an exponential spread of service times."""
    load = rate_rps * service_s
    rho = load / servers
    if rho >= 1:
        return math.inf, math.inf
    if rho <= 0:
        return 0.0, 0.0
    waits = _erlang_c(servers, load)
    tau = service_s / (servers * (1 - rho))
    mean = waits * tau
    p99 = tau * (math.log(waits) + _P99) if waits > 0.01 else 0.0
    return mean, max(0.0, p99 - mean)


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
    is_moe = layout.prefill.engine.is_moe
    itl_band = ITL_BAND_MOE if is_moe else ITL_BAND_DENSE
    capacity = max_rate_rps(layout, work, Slo()) * work.osl_tokens
    return Estimate(
        ttft_ms=_figure(served.ttft_s * 1e3, TTFT_BAND, source),
        itl_ms=_figure(served.itl_s * 1e3, itl_band, source),
        out_tokens_s=_figure(capacity, itl_band, source),
    )


def _figure(expected: float, band: float, source: str) -> Figure:
    return Figure(
        _round(expected / (1 + band)), _round(expected), _round(expected * (1 + band)), source
    )


def _round(value: float) -> float:
    """Three significant digits: more would claim more than is known."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 2 - math.floor(math.log10(abs(value))))
