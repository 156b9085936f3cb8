"""What the engines of one router know of each other: who is full, and what work costs on any of them. Pure."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from dynctl.router.config import Settings
from dynctl.router.loading import assumed_loads
from dynctl.router.rates import Line, Pressure

if TYPE_CHECKING:
    from dynctl.router.workers import Worker

_MIN_MS_PER_TOKEN: Final = 0.001
"""A million tokens a second: prefill that was measured as free still counts."""


class Tally:
    """What is known of all engines of one table.

    An engine nobody has seen at work is taken for one like the others: with the rates assumed at the start it would
    look dearer than every engine that turned out to be faster, and so never be tried.
    """

    __slots__ = (
        "least_ms_per_token",
        "least_prefill_ms",
        "limited_until_s",
        "loads",
        "num_full",
        "prefill",
        "pressure",
        "small_tokens",
        "unseen",
        "version",
    )

    def __init__(self, settings: Settings) -> None:
        rate = 1000.0 / settings.prefill_tokens_s
        self.prefill = Line(settings.prefill_base_ms, rate, 2048.0, weight=0.5)
        """Milliseconds a prefill takes by tokens to prefill."""
        self.loads = assumed_loads(settings)
        """Milliseconds it takes to load tokens from a slower medium, by medium."""
        self.pressure = Pressure(settings.itl_ms, settings.itl_slope_ms)
        self.least_prefill_ms, self.least_ms_per_token = self.prefill.base, per_token(self.prefill)
        """No engine's prefill is cheaper; made tight by `tighten`, kept true by whoever learns."""
        self.unseen: set[Worker] = set()
        """Engines without a prefill of their own so far."""
        self.version = 0
        """Changes when a block size or the outcome of a tokenizer check does."""
        self.num_full = 0
        """Engines that may be without room: for one more sequence, or in their KV memory."""
        self.small_tokens = math.inf
        """A request of no more than that fits wherever no engine is among those; kept and made tight as those above."""
        self.limited_until_s = 0.0
        """Until when some engine is kept out by its breaker or by its own wish."""

    def bound(self, line: Line) -> None:
        """Keep the bounds of prefill true for an engine with these rates."""
        self.least_prefill_ms = min(self.least_prefill_ms, line.base)
        self.least_ms_per_token = min(self.least_ms_per_token, per_token(line))

    def tighten(self, workers: Iterable["Worker"]) -> None:
        """Find the bounds anew; `workers` are all engines."""
        lines, small_tokens = [self.prefill], math.inf
        for worker in workers:
            lines.append(worker.prefill)
            small_tokens = min(small_tokens, worker.tight_tokens)
        self.least_prefill_ms = min([line.base for line in lines])
        self.least_ms_per_token = min([per_token(line) for line in lines])
        self.small_tokens = small_tokens


def per_token(prefill: Line) -> float:
    """What an uncached token is taken to cost, in milliseconds."""
    return max(prefill.slope, _MIN_MS_PER_TOKEN)
