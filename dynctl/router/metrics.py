"""The router's counters and histograms, and their Prometheus text. Names and meanings: docs/metrics.md.

Not here: when something is counted. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

PREFIX = "dynctl_router_"

_TTFT_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ITL_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_DECISION_BOUNDS = (
    *(10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 50e-3),
)

_REASONS = [
    *(("no_engine",), ("queue_full",), ("queue_timeout",), ("engine_failure",)),
    *(("engine_timeout",), ("stream_broken",), ("draining",), ("internal",)),
    *(("deadline",), ("at_capacity",)),
]

_WARMED = (("reason",), (("joined",), ("idle",)))
"""Label and values."""


class Counter:
    """A counter, by the values of its labels."""

    __slots__ = ("_help", "_labels", "_name", "_values")

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        known: Iterable[tuple[str, ...]] = (),
    ) -> None:
        """`known` label values are shown as 0 from the start: a rate needs its first zero."""
        self._name = PREFIX + name
        self._help = text
        self._labels = labels
        self._values = dict.fromkeys(known if labels else [()], 0.0)

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count."""
        self._values[labels] = self._values.get(labels, 0.0) + by

    def value(self, *labels: str) -> float:
        """The count under these labels."""
        return self._values.get(labels, 0.0)

    def lines(self) -> Iterable[str]:
        """The exposition lines."""
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} counter"
        for labels, value in self._values.items():
            yield f"{self._name}{_label_text(self._labels, labels)} {_number(value)}"


class Histogram:
    """A histogram without labels."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = PREFIX + name
        self._help = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, number: int = 1) -> None:
        """Take a value in, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += number
        self._sum += value * number

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of all buckets but the last, which has none."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Values taken in so far, by bucket."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Values taken in so far."""
        return sum(self._counts)

    def lines(self) -> Iterable[str]:
        """The exposition lines."""
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} histogram"
        yield from _buckets(self._name, "", self._bounds, self._counts, self._sum)


class Metrics:
    """All that one router counts."""

    def __init__(self) -> None:
        self._families: list[Counter | Histogram] = []
        self.requests = self._counter(
            "requests_total",
            "Generation requests that ended.",
            ("endpoint", "code"),
            [("completions", "200"), ("chat", "200")],
        )
        self.errors = self._counter(
            "errors_total", "Requests that failed on our side.", ("reason",), _REASONS
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of completed requests."
        )
        self.predicted_hit_tokens = self._counter(
            "predicted_hit_tokens_total", "Of those, expected in the prefilling engine's cache."
        )
        self.possible_hit_tokens = self._counter(
            "possible_hit_tokens_total", "Of those, what a cache without limit would have had."
        )
        self.engine_cached_tokens = self._counter(
            "engine_cached_tokens_total", "Of those, cached as the engine says."
        )
        self.output_tokens = self._counter(
            "output_tokens_total", "Generated tokens of completed requests."
        )
        self.retries = self._counter(
            "retries_total", "Attempts after the first.", ("leg", "reason")
        )
        self.stream_broken = self._counter(
            "stream_broken_total", "Streams ended in an error event.", ("reason",)
        )
        self.handoffs = self._counter("handoffs_total", "Prefill to decode hand-offs.", ("result",))
        self.local_prefill = self._counter(
            "local_prefill_total", "Requests a decode engine prefilled itself.", ("reason",)
        )
        self.client_gone = self._counter(
            "client_gone_total", "Clients that left early.", ("phase",)
        )
        self.tokenized = self._counter("tokenized_total", "How prompts were tokenised.", ("how",))
        self.engine_failures = self._counter(
            "engine_failures_total", "Failed attempts.", ("engine", "reason")
        )
        self.fallbacks = self._counter("fallbacks_total", "Choices by load after a fault.")
        self.book_faults = self._counter("book_faults_total", "Requests whose books have gaps.")
        self.warmed_tokens = self._counter(
            "warmed_tokens_total", "Tokens of hot prefixes computed beforehand.", *_WARMED
        )
        self.kv_frames = self._counter("kv_frames_total", "KV index updates applied.", ("kind",))
        self.ttft = self._histogram(
            "ttft_seconds", "Time to the first token of streams.", _TTFT_BOUNDS
        )
        self.ttft_error = self._histogram(
            "ttft_error_seconds", "How far that was off what was expected.", _TTFT_BOUNDS
        )
        self.itl = self._histogram(
            "itl_seconds", "Gap between token events of streams.", _ITL_BOUNDS
        )
        self.queue = self._histogram("queue_seconds", "Wait for an engine with room.", _TTFT_BOUNDS)
        self.decision = self._histogram("decision_seconds", "One placement.", _DECISION_BOUNDS)

    def count(self, name: str, labels: tuple[str, ...]) -> None:
        """Count in the counter of that attribute name."""
        counter: Counter = getattr(self, name)
        counter.add(*labels)

    def exposition(self, gauges: Iterable[str]) -> bytes:
        """Write everything as text; `gauges` are the lines of values read at this moment."""
        parts: list[str] = []
        for family in self._families:
            parts += family.lines()
        parts += gauges
        return ("\n".join(parts) + "\n").encode()

    def _counter(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        known: Iterable[tuple[str, ...]] = (),
    ) -> Counter:
        counter = Counter(name, text, labels, known)
        self._families.append(counter)
        return counter

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, bounds)
        self._families.append(histogram)
        return histogram


Values = Mapping[tuple[str, ...], float]
Spreads = Mapping[tuple[str, ...], tuple[Sequence[int], float]]
"""Numbers by bound, and the sum."""


def gauge(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Iterable[str]:
    """The exposition lines of a gauge, by the values of its labels."""
    return _shown("gauge", name, text, values, labels)


def counter(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Iterable[str]:
    """The same of what is counted elsewhere."""
    return _shown("counter", name, text, values, labels)


def histogram(
    name: str,
    text: str,
    values: Spreads,
    labels: tuple[str, ...],
    bounds: Sequence[float],
) -> Iterable[str]:
    """The exposition lines of a histogram, by the values of its labels."""
    name = PREFIX + name
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for key, (counts, total) in values.items():
        yield from _buckets(name, _pairs(labels, key), bounds, counts, total)


def _buckets(
    name: str, pairs: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Iterable[str]:
    before = pairs + "," if pairs else ""
    labels = "{" + pairs + "}" if pairs else ""
    number = 0
    for bound, count in zip((*bounds, None), counts, strict=True):
        number += count
        edge = "+Inf" if bound is None else f"{bound:g}"
        yield f'{name}_bucket{{{before}le="{edge}"}} {number}'
    yield f"{name}_sum{labels} {_number(total)}"
    yield f"{name}_count{labels} {number}"


def _shown(
    kind: str, name: str, text: str, values: Values, labels: tuple[str, ...]
) -> Iterable[str]:
    name = PREFIX + name
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key, value in values.items():
        yield f"{name}{_label_text(labels, key)} {_number(value)}"


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return "{" + _pairs(names, values) + "}" if names else ""


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(
        [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
