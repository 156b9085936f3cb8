"""Sums, means and ratios of figures some of which are not known; None: nothing is known. Pure."""

from collections.abc import Callable, Iterable


def sum_of(values: Iterable[float | None]) -> float | None:
    """Add up what is known."""
    return _of(values, sum)


def sum_int(values: Iterable[int | None]) -> int | None:
    """Add up what is known of whole numbers."""
    total = sum_of(values)
    return None if total is None else int(total)


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of what is known."""
    return _of(values, lambda present: sum(present) / len(present))


def ratio_of(part: float | None, whole: float | None) -> float | None:
    """Divide; None also where there is nothing to divide by."""
    return part / whole if part is not None and whole else None


def first_of(*values: float | None) -> float | None:
    """The first that is known."""
    return next((value for value in values if value is not None), None)


def _of(values: Iterable[float | None], how: Callable[[list[float]], float]) -> float | None:
    present = [value for value in values if value is not None]
    return how(present) if present else None
