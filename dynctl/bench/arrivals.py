"""When requests are sent: `poisson:8`, `constant:8`, `concurrency:64`; and durations such as `15s`. Pure.

Not here: what is sent (`workload`), waiting (`run`).
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dynctl.errors import UsageError

_DURATION = re.compile(r"^([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)?$")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
MAX_CONCURRENCY = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a deployment is driven."""

    kind: str
    """`poisson` (exponential gaps), `constant` (equal gaps): open loop, never held up by slow answers.
    `concurrency`: closed loop, so many requests are always under way.
    `recorded`: open loop, at the times of a trace."""
    rate_rps: float = 0.0
    concurrency: int = 0
    speed: float = 1.0
    times_s: tuple[float, ...] = ()
    """Of a trace, in order, with the speed taken out already."""

    @property
    def is_open(self) -> bool:
        """Whether arrivals keep to a schedule whatever the server does."""
        return self.kind != "concurrency"

    def offsets_s(self, rng: random.Random, duration_s: float) -> Iterator[float]:
        """Yield when requests are due within the duration, in seconds from the start (open loop only)."""
        if self.kind == "recorded":
            yield from itertools.takewhile(lambda at_s: at_s < duration_s, self.times_s)
            return
        at_s = 0.0
        for number in itertools.count(1):
            if self.kind == "poisson":
                at_s += rng.expovariate(self.rate_rps)
            else:
                # Not a running sum, whose rounding would let one more in at the end.
                at_s = (number - 1) / self.rate_rps
            if at_s >= duration_s:
                return
            yield at_s

    def __str__(self) -> str:
        if self.kind == "recorded":
            return "recorded times" + (f" at {self.speed:g}×" if self.speed != 1 else "")
        return (
            f"{self.kind}:{self.rate_rps:g}" if self.is_open else f"{self.kind}:{self.concurrency}"
        )


def parse_load(text: str) -> Load:
    """Read `poisson:R`, `constant:R` (requests per second) or `concurrency:N`.

    Raises:
        UsageError: when it is none of these.
    """
    kind, _, amount = text.partition(":")
    try:
        number = float(amount)
    except ValueError:
        number = 0.0
    if kind in {"poisson", "constant"} and 0 < number < 1e6:
        return Load(kind, rate_rps=number)
    if kind == "concurrency" and number.is_integer() and 1 <= number <= MAX_CONCURRENCY:
        return Load(kind, concurrency=int(number))
    raise UsageError(
        f"--load {text!r} is no load",
        "write poisson:8 or constant:8 (requests per second), or concurrency:64",
    )


def parse_duration(text: str, flag: str) -> float:
    """Read `15s`, `500ms`, `2m`, `1h` or plain seconds.

    Raises:
        UsageError: naming the flag.
    """
    match = _DURATION.match(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text!r} is no duration", "write it as 15s, 500ms, 2m or 1h")
    return float(match[1]) * _SECONDS[match[2]]
