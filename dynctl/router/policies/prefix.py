"""The engine with the longest cached prefix, unless it is clearly busier than the rest. Pure.

A plain rule to compare with: it knows tokens and requests, no milliseconds.
"""

import random
from collections.abc import Sequence

from dynctl.router.choosing import Choice, Need
from dynctl.router.workers import Worker

_NAMES = ("overlap_tokens", "active_requests")

_BUSY_RATIO = 1.5
"""Affinity yields to load above this multiple of the mean."""

_BUSY_MARGIN = 2
"""… and only when it is this many requests more: with few requests the ratio is noise."""


class _Prefix:
    uses_index = True

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose the longest prefix among the engines that are not too busy, the least loaded among equals."""
        del need
        mean = sum(worker.active_requests for worker in workers) / len(workers)
        limit = max(mean * _BUSY_RATIO, mean + _BUSY_MARGIN)
        ranks = [
            (worker.active_requests > limit, -overlap, worker.active_requests)
            for worker, overlap in zip(workers, overlaps, strict=True)
        ]
        best = min(ranks)
        equal = [position for position, rank in enumerate(ranks) if rank == best]
        terms = tuple(
            (float(overlap), float(worker.active_requests))
            for worker, overlap in zip(workers, overlaps, strict=True)
        )
        return Choice(equal[int(rng.random() * len(equal))], _NAMES, terms)


POLICY = _Prefix()
