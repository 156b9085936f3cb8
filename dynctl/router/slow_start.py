"""Engines that join others which serve already get few requests at first: with nothing booked each would look best to all.

Not here: what an engine is sent before clients come (`warming`), clocks (times are passed in, monotonic seconds). Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dynctl.router.workers import Worker

_LASTS_S: Final = 30.0

_SHARE: Final = 2.0
"""Fair shares an engine that joins others may take at most at first."""


@dataclass(frozen=True, slots=True)
class Joined:
    """When an engine joined others that were serving already, and what had been sent by then."""

    until_s: float
    num_sent: int
    """By the router, to all engines."""

    def allows(self, worker: "Worker", now_s: float, num_sent: int, num_workers: int) -> bool:
        """Whether the engine had less than its bound of fair shares since then."""
        fair = (num_sent - self.num_sent) / num_workers
        return now_s >= self.until_s or worker.num_sent < 1 + _SHARE * fair


class SlowStarts:
    """The engines of one table that start slowly."""

    __slots__ = ("_workers",)

    def __init__(self) -> None:
        self._workers: set[Worker] = set()

    def __len__(self) -> int:
        return len(self._workers)

    def begin(self, worker: "Worker", now_s: float, num_sent: int) -> None:
        """Let an engine start slowly, of which others have been sent so many requests."""
        worker.joined = Joined(now_s + _LASTS_S, num_sent)
        self._workers.add(worker)

    def end(self, worker: "Worker") -> None:
        """Let it have its full share; or it is gone."""
        worker.joined = None
        self._workers.discard(worker)

    def look(self, now_s: float) -> None:
        """End those whose time is over, also where nobody asks for them any more."""
        for worker in tuple(self._workers):
            if worker.joined is None or now_s >= worker.joined.until_s:
                self.end(worker)

    def settled(
        self, workers: Sequence["Worker"], now_s: float, num_sent: int, num_workers: int
    ) -> Sequence["Worker"]:
        """Those of the engines that may have one more; slow starters only when the others have no room either."""
        self.look(now_s)
        found = [
            worker
            for worker in workers
            if worker.joined is None or worker.joined.allows(worker, now_s, num_sent, num_workers)
        ]
        return found or workers
