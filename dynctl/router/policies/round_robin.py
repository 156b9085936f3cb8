"""Each engine in turn. Pure."""

import random
from collections.abc import Sequence

from dynctl.router.choosing import Choice, Need
from dynctl.router.workers import Worker


class _RoundRobin:
    uses_index = False

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose the next in turn; the turn is the request's number, so asking twice changes nothing."""
        del overlaps, rng
        return Choice(need.ordinal % len(workers))


POLICY = _RoundRobin()
