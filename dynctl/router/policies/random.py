"""Any engine, with equal chances. Pure."""

from collections.abc import Sequence

from dynctl.router.choosing import Load, Need


class _Random:
    uses_index = False
    term_names = ()

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose by the draw alone."""
        del need, overlaps
        return int(draw * len(loads))

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say nothing: chance has no reasons."""
        del need, overlaps
        return [() for _ in loads]


POLICY = _Random()
