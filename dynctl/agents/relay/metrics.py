"""What one relay counts, and its Prometheus text. Names and meanings: docs/metrics.md.

Not here: when something is counted. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

PREFIX = "dynctl_relay_"
_LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)


class RelayMetrics:
    """Counters by the value of their label, and the lag of KV deltas."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {"200": 0}
        """By status of the answer."""
        self.request_bytes = 0
        self.kv_batches = 0
        self.kv_frames: dict[str, int] = {"snapshot": 0, "delta": 0, "heartbeat": 0}
        self.kv_blocks: dict[str, int] = {"stored": 0, "removed": 0}
        self.kv_bytes = 0
        """Sent, to all routers together."""
        self.kv_cut = 0
        self._lags = [0] * (len(_LAG_BOUNDS) + 1)
        self._lag_s = 0.0

    def request(self, status: int, num_bytes: int) -> None:
        """Count a request and its answer's status."""
        key = str(status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.request_bytes += num_bytes

    def lag(self, lag_s: float) -> None:
        """Take in how old an event was when it went out; clocks that jump count as no lag."""
        lag_s = max(lag_s, 0.0)
        self._lags[bisect_left(_LAG_BOUNDS, lag_s)] += 1
        self._lag_s += lag_s

    def exposition(self, gauges: Mapping[str, tuple[str, str, Mapping[str, float]]]) -> bytes:
        """All of it as Prometheus text; `gauges` by name: help, label (empty: none), values."""
        lines = [
            *_family("requests_total", "counter", "Requests passed on, by status.", "code", self.requests),
            *_family("request_bytes_total", "counter", "Bytes of their bodies.", "", {"": self.request_bytes}),
            *_family("kv_batches_total", "counter", "Event batches read.", "", {"": self.kv_batches}),
            *_family("kv_frames_total", "counter", "Frames made.", "kind", self.kv_frames),
            *_family("kv_blocks_total", "counter", "Blocks in deltas.", "change", self.kv_blocks),
            *_family("kv_sent_bytes_total", "counter", "Bytes sent to routers.", "", {"": self.kv_bytes}),
            *_family("kv_cut_total", "counter", "Routers cut for being behind.", "", {"": self.kv_cut}),
        ]  # fmt: skip
        lines += self._lag_lines()
        for name, (text, label, values) in gauges.items():
            lines += _family(name, "gauge", text, label, values)
        return ("\n".join(lines) + "\n").encode()

    def _lag_lines(self) -> Iterable[str]:
        name = f"{PREFIX}kv_lag_seconds"
        yield f"# HELP {name} Age of the oldest event of a delta, by the engine's stamp, when it went out."
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*_LAG_BOUNDS, None), self._lags, strict=True):
            total += count
            edge = "+Inf" if bound is None else f"{bound:g}"
            yield f'{name}_bucket{{le="{edge}"}} {total}'
        yield f"{name}_sum {self._lag_s:.9g}"
        yield f"{name}_count {total}"


def _family(
    name: str, kind: str, text: str, label: str, values: Mapping[str, float]
) -> Iterable[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for key, value in values.items():
        labels = f'{{{label}="{key}"}}' if label else ""
        yield f"{PREFIX}{name}{labels} {value:.17g}"
