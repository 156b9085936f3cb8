"""The engine with the fewest requests in flight, then the fewest tokens to prefill. Pure."""

from collections.abc import Sequence

from dynctl.router.choosing import Load, Need, drawn


class _LeastLoaded:
    uses_index = False
    term_names = ("active_requests", "pending_prefill_tokens")

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the least loaded, at random among equals."""
        ranks = self.terms(need, loads, overlaps)
        best = min(ranks)
        return drawn([position for position, rank in enumerate(ranks) if rank == best], draw)

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say the load of each."""
        del need, overlaps
        return [(load.active_requests, load.pending_prefill_tokens) for load in loads]


POLICY = _LeastLoaded()
