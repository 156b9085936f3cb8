"""The engine with the fewest requests in flight, then the fewest tokens to prefill. Pure."""

import random
from collections.abc import Sequence

from dynctl.router.choosing import Choice, Need
from dynctl.router.workers import Worker

_NAMES = ("active_requests", "pending_prefill_tokens")


class _LeastLoaded:
    uses_index = False

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose the least loaded, at random among equals."""
        del need, overlaps
        terms = tuple(
            (float(worker.active_requests), float(worker.pending_prefill_tokens))
            for worker in workers
        )
        best = min(terms)
        equal = [position for position, term in enumerate(terms) if term == best]
        return Choice(equal[int(rng.random() * len(equal))], _NAMES, terms)


POLICY = _LeastLoaded()
