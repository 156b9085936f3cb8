"""The cheapest engine in milliseconds: uncached prefill, queued prefill, decode pressure, memory, and a fair share. Pure.

Rates are the engine's own, learned. The fair share is what makes a cached prefix yield: an engine that had more than
its share of the recent requests must offer so much more of the prompt. Among near-equals the longest overlap wins, then
chance. What an idle engine is sent this way it has cached from then on, so hot prefixes spread as far as load asks.
"""

from collections.abc import Sequence

from dynctl.router.choosing import WATERMARK, Load, Need, drawn

_FULL_MS = 2000.0
"""What an engine with full KV memory costs more: about a preemption and its recompute. A guess."""

_SHARE = 1.0
"""What one fair share above the fair share costs, in prefills of this prompt; …"""

_SHARE_SQUARE = 2.0
"""… and what its square does: a little unfairness is cheap, much is dear. Tuned with benchmarks/balance.py."""

_CONTINUED = 0.3
"""Both weigh this much for a conversation under way: moving it costs its history and balances little, a start does the
opposite."""

_SHARE_PRIOR = 1.0
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
        return _all_terms(need, loads, overlaps)


def _fairness(need: Need, loads: Sequence[Load]) -> tuple[float, float, float]:
    """The fair number of recent requests, how many excess shares each one above is, and what a share costs."""
    fair = sum([load.recent for load in loads]) / len(loads)
    weight = _CONTINUED if need.is_continuation else 1.0
    share_ms = weight * need.prompt_tokens * need.ms_per_token
    return fair, 1.0 / (fair + _SHARE_PRIOR * need.recent_unit), share_ms


def _share_ms(excess: float, share_ms: float) -> float:
    return share_ms * excess * (_SHARE + _SHARE_SQUARE * excess)


def _costs(need: Need, loads: Sequence[Load], overlaps: Sequence[int]) -> list[float]:
    """Sums of `_terms`, in one expression: this is where a decision's time goes."""
    fair, shares, share_ms = _fairness(need, loads)
    prompt, output, now_s, transfer_ms = need[0], need[1], need.now_s, need.transfer_ms_per_token
    if transfer_ms is not None:
        return [sum(term) for term in _all_terms(need, loads, overlaps)]
    return [
        base_ms
        + (prompt - overlap) * rate
        + ((free_at_s - now_s) * 1e3 if free_at_s > now_s else 0.0)
        + output * decode_ms
        + (_memory_ms(prompt - room, capacity) if prompt > room else 0.0)
        + (_share_ms((recent - fair) * shares, share_ms) if recent > fair else 0.0)
        for (
            _,
            rate,
            base_ms,
            free_at_s,
            decode_ms,
            recent,
            room,
            capacity,
            _,
            _,
            _,
        ), overlap in zip(loads, overlaps, strict=True)
    ]


def _all_terms(
    need: Need, loads: Sequence[Load], overlaps: Sequence[int]
) -> list[tuple[float, ...]]:
    fair, shares, share_ms = _fairness(need, loads)
    return [
        (
            *_prefill_terms(need, load, overlap),
            need.output_tokens * load.decode_ms_per_token,
            _memory_ms(need.prompt_tokens - load.room_tokens, load.capacity_tokens),
            _share_ms(max(load.recent - fair, 0.0) * shares, share_ms),
        )
        for load, overlap in zip(loads, overlaps, strict=True)
    ]


def _prefill_terms(need: Need, load: Load, overlap: int) -> tuple[float, float]:
    uncached = need.prompt_tokens - overlap
    if need.transfer_ms_per_token is not None:
        return uncached * need.transfer_ms_per_token, 0.0
    queue_ms = max(load.free_at_s - need.now_s, 0.0) * 1e3
    return load.prefill_base_ms + uncached * load.prefill_ms_per_token, queue_ms


def _memory_ms(excess_tokens: float, capacity: int) -> float:
    """Grow smoothly from the watermark to beyond full."""
    if excess_tokens <= 0.0:
        return 0.0
    used = excess_tokens / capacity / (1.0 - WATERMARK)
    return float(_FULL_MS * min(used, 2.0) ** 2)


POLICY = _Kv()
