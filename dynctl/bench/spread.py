"""How steady a run was: its measured time in windows, one by one. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.bench.record import Record

NUM_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Spread:
    """The windows of a run, in order."""

    window_s: float
    ttft_ms: tuple[float | None, ...]
    """Mean of the requests that were due in each; None: none of them was answered."""
    ttft_cv: float | None
    """Standard deviation of these over their mean."""
    output_tok_s: tuple[float, ...]
    output_tok_s_cv: float | None


def spread_of(records: Sequence[Record], since_s: float, measured_s: float) -> Spread:
    """Cut the measured time into windows."""
    window_s = measured_s / NUM_WINDOWS
    due: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
    for record in records:
        if record.is_ok and not record.is_warmup and record.ttft_ms is not None:
            at = math.floor((record.scheduled_s - since_s) / window_s)
            due[min(NUM_WINDOWS - 1, max(0, at))].append(record.ttft_ms)
    ttft_ms = tuple(statistics.fmean(each) if each else None for each in due)
    rates = tuple(num / window_s for num in tokens_by_window(records, since_s, window_s))
    return Spread(window_s, ttft_ms, _cv(ttft_ms), rates, _cv(rates))


def tokens_by_window(records: Iterable[Record], since_s: float, window_s: float) -> list[float]:
    """Output tokens that arrived in each window, late ones of warm-up requests included."""
    tokens = [0.0] * NUM_WINDOWS
    for record in records:
        for at_s, num in record.token_arrivals():
            at = math.floor((at_s - since_s) / window_s)
            if 0 <= at < NUM_WINDOWS:
                tokens[at] += num
    return tokens


def _cv(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    mean = statistics.fmean(present) if present else 0.0
    return statistics.pstdev(present) / mean if mean > 0 and len(present) > 1 else None
