"""Who may wait, for how long, and how many retries the router allows itself.

Not here: engines' room (`workers`), clocks (times are passed in). Pure.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dynctl.router.api.answers import Failure

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """Requests waiting for an engine, in order; bounded in number and in time."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._until_s: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[T]:
        """Everybody who waits, in order; those who leave meanwhile are still named."""
        return iter(tuple(self._until_s))

    def join(self, item: T, arrived_s: float) -> Failure | None:
        """Add at the end; the failure for the client when the line is full.

        The time is counted from the request's arrival, so that a retry does not start it anew.
        """
        if len(self._until_s) >= self._limit:
            return Failure(
                503, "too many requests are waiting", "queue_full", None, 2, "queue_full"
            )
        self._until_s[item] = arrived_s + self._timeout_s
        return None

    def leave(self, item: T) -> None:
        """Take out; no error when it is not in."""
        self._until_s.pop(item, None)

    def expired(self, now_s: float) -> list[T]:
        """Take out everybody whose time is over."""
        late = [item for item, until_s in self._until_s.items() if until_s <= now_s]
        for item in late:
            del self._until_s[item]
        return late


def queue_timeout() -> Failure:
    """No engine had room in time."""
    return Failure(
        503,
        "no engine had room for this request in time",
        "queue_timeout",
        None,
        2,
        "queue_timeout",
    )


class RetryBudget:
    """Retries are a share of what is in flight, so that a sick fleet is not struck harder. Source: Envoy's retry budget."""

    def __init__(self, ratio: float, floor: int) -> None:
        self._ratio = ratio
        self._floor = floor
        self.num_retrying = 0
        """Requests in flight that are past their first attempt."""

    def allows(self, num_in_flight: int) -> bool:
        """Whether one more request may be retried."""
        return self.num_retrying < max(self._floor, self._ratio * num_in_flight)


def backoff_s(num_retries: int, draw: Callable[[], float]) -> float:
    """Full jitter: 25 ms doubling, at most 250 ms, times a draw from [0, 1)."""
    return draw() * min(0.25, 0.025 * 2.0 ** max(num_retries - 1, 0))
