"""The cheapest engine in milliseconds: uncached prefill + queued prefill + decode pressure. Pure.

Rates are the engine's own, learned. Where the index knows nothing the first term is the same for all, and the least
loaded engine wins; among near-equals one is taken at random.
"""

import random
from collections.abc import Sequence

from dynctl.router.choosing import Choice, Need, nearest
from dynctl.router.workers import Worker

_NAMES = ("prefill_ms", "queue_ms", "decode_ms", "memory_ms")

_WATERMARK = 0.7
"""Share of KV memory in use from which an engine gets dearer. Source: operating practice, requirement 55."""

_FULL_MS = 2000.0
"""What an engine with full KV memory costs more: about a preemption and its recompute. A guess."""

_MIN_MS_PER_TOKEN = 0.001
"""A million tokens a second: prefill that was measured as free still counts."""


class _Kv:
    uses_index = True

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose the engine with the lowest sum of terms."""
        terms = tuple(
            _terms(need, worker, overlap) for worker, overlap in zip(workers, overlaps, strict=True)
        )
        return Choice(nearest([sum(term) for term in terms], overlaps, need, rng), _NAMES, terms)


def _terms(need: Need, worker: Worker, overlap_tokens: int) -> tuple[float, float, float, float]:
    ms_per_token = max(worker.prefill.slope, _MIN_MS_PER_TOKEN)
    uncached = max(need.prompt_tokens - overlap_tokens, 1)
    prefill_ms = uncached * ms_per_token
    queue_ms = worker.pending_prefill_tokens * ms_per_token
    if need.transfer_ms_per_token is not None:
        prefill_ms, queue_ms = uncached * need.transfer_ms_per_token, 0.0
    # Each running sequence makes every token to come a little later.
    decode_ms = need.output_tokens * worker.itl.slope * worker.active_requests
    memory_ms = 0.0
    if worker.capacity_tokens:
        used = (worker.active_tokens + need.prompt_tokens) / worker.capacity_tokens
        if used > _WATERMARK:
            memory_ms = _FULL_MS * min((used - _WATERMARK) / (1.0 - _WATERMARK), 2.0) ** 2
    return prefill_ms, queue_ms, decode_ms, memory_ms


POLICY = _Kv()
