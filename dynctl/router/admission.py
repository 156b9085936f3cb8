"""Who may wait, for how long, and how many retries the router allows itself.

Not here: in which order (`turns`), engines' room (`workers`), clocks (times are passed in). Pure.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from dynctl.router.api.answers import Failure
from dynctl.router.turns import Turns

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """Requests waiting for an engine, each in the line of its model; all together bounded in number, each in time."""

    def __init__(self, limit: int, timeout_s: float, ageing_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._ageing_s = ageing_s
        self._turns: dict[str | None, Turns[T]] = {}
        self._places: dict[T, tuple[str | None, float, Failure]] = {}
        """Whose line each stands in, until when, and what it is told then."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def models(self) -> list[str | None]:
        """The models somebody waits for."""
        return list(self._turns)

    def has_waiting(self, model: str | None) -> bool:
        """Whether somebody waits for that model."""
        return model in self._turns

    def in_order(self, model: str | None, now_s: float) -> list[T]:
        """Everybody who waits for a model, by turn; those who leave meanwhile are still named."""
        turns = self._turns.get(model)
        return turns.in_order(now_s) if turns is not None else []

    def position(self, item: T, now_s: float) -> int:
        """Its place among those who wait for the same model, from 1; 0: it does not wait."""
        place = self._places.get(item)
        return 0 if place is None else self._turns[place[0]].position(item, now_s)

    def last_below(self, model: str | None, level: int, now_s: float) -> T | None:
        """Who makes room for somebody of that class in a full line of the same model; None: nobody."""
        turns = self._turns.get(model)
        return turns.last_below(level, now_s) if turns is not None else None

    def join(
        self, item: T, model: str | None, level: int, arrived_s: float, deadline_s: float | None
    ) -> Failure | None:
        """Let somebody wait who does not yet; the failure for the client when too many do.

        Times are counted from the request's arrival, so that a retry does not start them anew.
        """
        if item in self._places:
            return None
        if len(self._places) >= self._limit:
            return Failure(
                503, "too many requests are waiting", "queue_full", None, 2, "queue_full"
            )
        until_s, failure = arrived_s + self._timeout_s, queue_timeout()
        if deadline_s is not None and arrived_s + deadline_s < until_s:
            until_s, failure = arrived_s + deadline_s, deadline_passed()
        self._places[item] = model, until_s, failure
        turns = self._turns.get(model)
        if turns is None:
            turns = self._turns[model] = Turns(self._ageing_s)
        turns.add(item, level, arrived_s, until_s)
        return None

    def leave(self, item: T) -> None:
        """Take out; no error when it is not in."""
        place = self._places.pop(item, None)
        if place is not None:
            turns = self._turns[place[0]]
            turns.remove(item)
            if not len(turns):
                del self._turns[place[0]]

    def lateness(self, item: T, now_s: float) -> Failure | None:
        """What somebody is told whose time is over."""
        place = self._places.get(item)
        return place[2] if place is not None and place[1] <= now_s else None

    def expired(self, now_s: float) -> list[tuple[T, Failure]]:
        """Take out everybody whose time is over; with what they are told."""
        late = [(item, place[2]) for item, place in self._places.items() if place[1] <= now_s]
        for item, _ in late:
            self.leave(item)
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


def deadline_passed() -> Failure:
    """No engine had room before the client's own deadline."""
    return Failure(
        504,
        "no engine had room before the deadline in X-Dynctl-Deadline-Ms",
        "deadline_passed",
        reason="deadline",
    )


def at_capacity(limit: int) -> Failure:
    """As many requests are under way as the router is to have."""
    return Failure(
        429,
        f"this router serves at most {limit} requests at once",
        "too_many_requests",
        None,
        1,
        "at_capacity",
    )


def draining() -> Failure:
    """This router takes no more requests."""
    return Failure(503, "the router is shutting down", "draining", None, 1, "draining")


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
