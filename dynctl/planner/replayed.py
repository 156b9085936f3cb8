"""What came of a replay: quantiles, hit rate, goodput, and what each engine did.

Not here: replaying (`simulate`).
Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles in milliseconds; all 0 when there is nothing."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine did."""

    id: str
    role: str
    num_requests: int
    busy_ratio: float
    peak_kv_ratio: float
    num_preemptions: int
    num_prefill_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class SimReport:
    """What came of a replay."""

    name: str
    policy: str
    seed: int
    num_calls: int
    num_failed: int
    duration_s: float
    ttft_ms: Spread
    itl_ms: Spread
    """Gaps between tokens, pooled over all requests."""
    tpot_ms: Spread
    """Per request."""
    hit_ratio: float
    """Prompt tokens found in a cache, of all."""
    out_tokens_s: float
    goodput_ratio: float
    """Requests within the goals, of all."""
    load_spread: float
    """Most loaded engine's computed tokens over the mean, within the roles that take whole requests or prompts."""
    engines: tuple[EngineLoad, ...]


def spread_of(values: Sequence[float]) -> Spread:
    """Quantiles of values in milliseconds."""
    ranked = sorted(values)
    if not ranked:
        return Spread(0.0, 0.0, 0.0, 0.0)

    def at(q: float) -> float:
        # Linear between neighbours, as the bench has it.
        place = q * (len(ranked) - 1)
        low = int(place)
        high = min(low + 1, len(ranked) - 1)
        return ranked[low] + (ranked[high] - ranked[low]) * (place - low)

    return Spread(at(0.5), at(0.95), at(0.99), sum(ranked) / len(ranked))
