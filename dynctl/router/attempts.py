"""What one request has tried so far, and whether it may try again. IO: none of its own; times are passed in."""

from dynctl.http1.call import Call
from dynctl.router import verdicts
from dynctl.router.admission import RetryBudget
from dynctl.router.handoff import Fault, Handoff, Leg
from dynctl.router.workers import Worker


class Attempts:
    """The attempts of one request; `end` them."""

    __slots__ = ("_budget", "_has_retried", "_num_sent", "excluded", "may_repeat")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._has_retried = False
        self._num_sent = 0
        self.excluded: set[tuple[str, str]] = set()
        """Engines, with incarnation, that have failed it."""
        self.may_repeat = False
        """Whether one of them may be tried again when there is no other."""

    def next_id(self, request_id: str) -> str:
        """What an engine is to know the next attempt by: it refuses an id in use, and an abandoned attempt may still be."""
        number = self._num_sent
        self._num_sent = number + 1
        return f"{request_id}-{number}" if number else request_id

    def failed(
        self,
        leg: Leg,
        fault: Fault,
        worker: Worker,
        call: Call | None,
        handoff: Handoff,
        now_s: float,
        num_in_flight: int,
    ) -> bool:
        """Note a failed attempt, against its engine where that is to blame; whether there may be another."""
        self.excluded.add(worker.key)
        if fault.reason == "busy":
            worker.saturated(now_s, fault.failure.retry_after_s or 1)
        may_retry = self._has_retried or self._budget.allows(num_in_flight)
        # An engine that failed on another's blocks may be well itself.
        may_be_peer = handoff.has_used_transfer and fault.reason in verdicts.ANSWERED_BADLY
        self.may_repeat = leg is Leg.MAIN and (may_be_peer or fault.reason in verdicts.REPEATABLE)
        if may_be_peer:
            return may_retry
        if verdicts.blames_engine(fault, call):
            worker.failed(now_s)
        return may_retry and (fault.reason != "error_500" or not handoff.num_retries)

    def go_on(self) -> None:
        """Count the request among those past their first attempt."""
        if not self._has_retried:
            self._has_retried = True
            self._budget.num_retrying += 1

    def end(self) -> None:
        """Count it there no more."""
        if self._has_retried:
            self._has_retried = False
            self._budget.num_retrying -= 1
