"""Who tests with whom, and when: a round-robin tournament, so that no host is in two tests at once. Pure."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rounds(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Pair everybody with everybody once: n-1 rounds for an even number, n for an odd one.

    Within a round nobody occurs twice. The circle method: one player stays, the others walk around; with an odd
    number the place opposite an empty chair rests.
    """
    chairs: list[int | None] = list(range(len(players)))
    if len(chairs) % 2:
        chairs.append(None)
    drawn = []
    for _ in range(len(chairs) - 1):
        half = len(chairs) // 2
        facing = zip(chairs[:half], reversed(chairs[half:]), strict=True)
        pairs = [(a, b) for a, b in facing if a is not None and b is not None]
        drawn.append([(players[min(a, b)], players[max(a, b)]) for a, b in pairs])
        chairs.insert(1, chairs.pop())
    return [pairs for pairs in drawn if pairs]
