"""Each engine in turn. Pure."""

from collections.abc import Sequence

from dynctl.router.choosing import Load, Need


class _RoundRobin:
    uses_index = False
    term_names = ()

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the next in turn; the turn is the request's number, so asking twice changes nothing."""
        del overlaps, draw
        return need.ordinal % len(loads)

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say nothing: the turn is all."""
        del need, overlaps
        return [() for _ in loads]


POLICY = _RoundRobin()
