"""The cheapest engine in milliseconds: uncached prefill, queued prefill, decode pressure, memory, and a fair share. Pure.

Rates are the engine's own, learned. The fair share is what makes a cached prefix yield: an engine that had more than
its share of the recent requests must offer so much more of the prompt. Among near-equals the longest overlap wins, then
chance. What an idle engine is sent this way it has cached from then on, so hot prefixes spread as far as load asks.
"""

from collections.abc import Sequence

from dynctl.router.choosing import Load, Need, drawn

WATERMARK = 0.7
"""Share of KV memory in use from which an engine gets dearer. Source: operating practice, requirement 55."""

_FULL_MS = 2000.0
"""What an engine with full KV memory costs more: about a preemption and its recompute. A guess."""

_SHARE = 1.0
"""What one fair share above the fair share costs, in prefills of this prompt. Tuned: benchmarks/balance.py."""

_SHARE_FREE = 0.05
"""Excess that costs nothing."""

_SHARE_PRIOR = 2.0
"""Requests each engine is taken to have had before the first one: a handful says nothing about shares."""


class _Kv:
    uses_index = True
    term_names = ("prefill_ms", "queue_ms", "decode_ms", "memory_ms", "share_ms")

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the engine with the lowest sum of terms."""
        costs = _costs(need, loads, overlaps)
        best = min(costs)
        limit = best + max(need.near_ms, need.near_ratio * best)
        near = [position for position, cost in enumerate(costs) if cost <= limit]
        if len(near) > 1:
            most = max([overlaps[position] for position in near])
            near = [position for position in near if overlaps[position] == most]
        return drawn(near, draw)

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say what makes up each candidate's cost."""
        fair, share_ms = _fairness(need, loads)
        return [
            _terms(need, load, overlap, fair, share_ms)
            for load, overlap in zip(loads, overlaps, strict=True)
        ]


def _fairness(need: Need, loads: Sequence[Load]) -> tuple[float, float]:
    """Recent requests up to which a share costs nothing, and milliseconds for each one above."""
    prior = _SHARE_PRIOR * need.recent_unit
    mean = sum([load.recent for load in loads]) / len(loads)
    rate = sum([load.prefill_ms_per_token for load in loads]) / len(loads)
    free = mean + _SHARE_FREE * (mean + prior)
    return free, _SHARE * need.prompt_tokens * rate / (mean + prior)


def _costs(need: Need, loads: Sequence[Load], overlaps: Sequence[int]) -> list[float]:
    """Sums of `_terms`, in one pass: this is where a decision's time goes."""
    fair, share_ms = _fairness(need, loads)
    prompt, output, now_s, transfer_ms = (
        need.prompt_tokens,
        need.output_tokens,
        need.now_s,
        need.transfer_ms_per_token,
    )
    costs = []
    for load, overlap in zip(loads, overlaps, strict=True):
        _, rate, base_ms, free_at_s, slope_ms, active, tokens, _, capacity, recent = load
        uncached = prompt - overlap if overlap < prompt else 1
        if transfer_ms is None:
            cost = base_ms + uncached * rate
            if free_at_s > now_s:
                cost += (free_at_s - now_s) * 1e3
        else:
            cost = uncached * transfer_ms
        cost += output * slope_ms * active
        if tokens + prompt > WATERMARK * capacity and capacity:
            cost += _memory_ms(tokens + prompt, capacity)
        if recent > fair:
            cost += (recent - fair) * share_ms
        costs.append(cost)
    return costs


def _terms(
    need: Need, load: Load, overlap: int, fair: float, share_ms: float
) -> tuple[float, float, float, float, float]:
    prompt = need.prompt_tokens
    uncached = prompt - overlap if overlap < prompt else 1
    if need.transfer_ms_per_token is None:
        prefill_ms = load.prefill_base_ms + uncached * load.prefill_ms_per_token
        queue_ms = max(load.free_at_s - need.now_s, 0.0) * 1e3
    else:
        prefill_ms, queue_ms = uncached * need.transfer_ms_per_token, 0.0
    decode_ms = need.output_tokens * load.itl_slope_ms * load.active_requests
    memory_ms, tokens = 0.0, load.active_tokens + prompt
    if load.capacity_tokens and tokens > WATERMARK * load.capacity_tokens:
        memory_ms = _memory_ms(tokens, load.capacity_tokens)
    return prefill_ms, queue_ms, decode_ms, memory_ms, max(load.recent - fair, 0.0) * share_ms


def _memory_ms(tokens: int, capacity: int) -> float:
    """Grow smoothly from the watermark to beyond full."""
    used = (tokens / capacity - WATERMARK) / (1.0 - WATERMARK)
    return float(_FULL_MS * min(used, 2.0) ** 2)


POLICY = _Kv()
