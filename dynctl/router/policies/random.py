"""Any engine, with equal chances. Pure."""

import random
from collections.abc import Sequence

from dynctl.router.choosing import Choice, Need
from dynctl.router.workers import Worker


class _Random:
    uses_index = False

    def choose(
        self, need: Need, workers: Sequence[Worker], overlaps: Sequence[int], rng: random.Random
    ) -> Choice:
        """Choose by the generator alone."""
        del need, overlaps
        return Choice(int(rng.random() * len(workers)))


POLICY = _Random()
