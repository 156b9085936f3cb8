"""The engine with the longest cached prefix, unless it is clearly busier than the rest. Pure.

A plain rule to compare with: it knows tokens and requests, no milliseconds.
"""

from collections.abc import Sequence

from dynctl.router.choosing import Load, Need, drawn

_BUSY_RATIO = 1.5
"""Affinity yields to load above this multiple of the mean."""

_BUSY_MARGIN = 2
"""… and only when it is this many requests more: with few requests the ratio is noise."""


class _Prefix:
    uses_index = True
    term_names = ("overlap_tokens", "active_requests")

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the longest prefix among the engines that are not too busy, the least loaded among equals."""
        del need
        mean = sum([load.active_requests for load in loads]) / len(loads)
        limit = max(mean * _BUSY_RATIO, mean + _BUSY_MARGIN)
        ranks = [
            (load.active_requests > limit, -overlap, load.active_requests)
            for load, overlap in zip(loads, overlaps, strict=True)
        ]
        best = min(ranks)
        return drawn([position for position, rank in enumerate(ranks) if rank == best], draw)

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say overlap and load of each."""
        del need
        return [
            (overlap, load.active_requests) for load, overlap in zip(loads, overlaps, strict=True)
        ]


POLICY = _Prefix()
