"""What the engine counts, under vLLM's names, labels, types and histogram bounds.

Names and bounds from captured output of vLLM 0.32.0 (tests/sim/captures). NIXL families exist only with a connector.
Not here: HTTP, the scheduler. Pure.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from dynctl.sim.scheduler import Counts, Output
from dynctl.sim.sequence import SimSequence

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_LATENCY = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
_TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)

HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _ITL,
    "request_time_per_output_token_seconds": _ITL,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_inference_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
_NIXL_HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "nixl_xfer_time_seconds": _TRANSFER,
    "nixl_post_time_seconds": (0.001, *_TRANSFER),
    "nixl_bytes_transferred": tuple(2.0 ** (11 + 2 * i) for i in range(12)),
    "nixl_num_descriptors": (
        10,
        20,
        30,
        50,
        75,
        100,
        200,
        400,
        1000,
        2000,
        4000,
        10000,
        20000,
        50000,
    ),
}
_NIXL_COUNTERS = (
    "nixl_num_failed_transfers",
    "nixl_num_failed_notifications",
    "nixl_num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry",
)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")


class Histogram:
    """Observations in buckets; `bounds` without infinity."""

    __slots__ = ("_bounds", "_buckets", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._buckets[bisect_left(self._bounds, value)] += 1
        self._total += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Write buckets (cumulative), count and sum."""
        engine, model = labels.split(",", 1)
        num_seen = 0
        for bound, num_here in zip((*self._bounds, math.inf), self._buckets, strict=True):
            num_seen += num_here
            le = "+Inf" if bound == math.inf else _number(bound)
            yield f'{name}_bucket{{{engine},le="{le}",{model}}} {float(num_seen)}'
        yield f"{name}_count{{{labels}}} {float(num_seen)}"
        yield f"{name}_sum{{{labels}}} {_number(self._total)}"


class EngineMetrics:
    """Counters and histograms of one rank since its start."""

    def __init__(
        self, model_name: str, started_unix_s: float, rank: int = 0, *, has_connector: bool
    ) -> None:
        quoted = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._rank = rank
        self._labels = f'engine="{rank}",model_name="{quoted}"'
        self._started_unix_s = started_unix_s
        bounds = HISTOGRAMS | (_NIXL_HISTOGRAMS if has_connector else {})
        self._histograms = {name: Histogram(edges) for name, edges in bounds.items()}
        self._has_connector = has_connector
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.prompt_tokens_by_source = dict.fromkeys(_SOURCES, 0)
        self.finished = dict.fromkeys(_FINISH_REASONS, 0)
        self.nixl = dict.fromkeys(_NIXL_COUNTERS, 0)

    def observe(self, name: str, value: float) -> None:
        """Count an observation of one histogram."""
        self._histograms[name].observe(value)

    def token(self, output: Output, previous_s: float | None, now_s: float) -> None:
        """Count one token; `previous_s` is when the sequence said its last one."""
        self.num_generation_tokens += 1
        if previous_s is not None:
            self._histograms["inter_token_latency_seconds"].observe(now_s - previous_s)
            return
        sequence = output.sequence
        self._histograms["time_to_first_token_seconds"].observe(now_s - sequence.times.arrival_s)
        num_local = sequence.num_cached_tokens - sequence.num_loaded_tokens
        num_external = sequence.num_external_tokens + sequence.num_loaded_tokens
        self.num_prompt_tokens += sequence.num_prompt
        self.prompt_tokens_by_source["local_cache_hit"] += num_local
        self.prompt_tokens_by_source["external_kv_transfer"] += num_external
        self.prompt_tokens_by_source["local_compute"] += (
            sequence.num_prompt - num_local - num_external
        )

    def finish(self, sequence: SimSequence, reason: str, now_s: float) -> None:
        """Count a request that ended; aborted ones leave no latency, as vLLM keeps it."""
        if reason == "abort":
            return  # vLLM 0.32 does not count a client that left
        self.finished[reason] += 1
        times, seen = sequence.times, self._histograms
        if times.scheduled_s is None or times.first_token_s is None or times.last_token_s is None:
            return
        seen["e2e_request_latency_seconds"].observe(now_s - times.arrival_s)
        seen["request_queue_time_seconds"].observe(times.scheduled_s - times.arrival_s)
        seen["request_inference_time_seconds"].observe(times.last_token_s - times.scheduled_s)
        seen["request_prefill_time_seconds"].observe(times.first_token_s - times.scheduled_s)
        decode_s = times.last_token_s - times.first_token_s
        seen["request_decode_time_seconds"].observe(decode_s)
        num_steps = max(1, sequence.num_output - 1)
        seen["request_time_per_output_token_seconds"].observe(decode_s / num_steps)
        seen["request_prompt_tokens"].observe(sequence.num_prompt)
        seen["request_generation_tokens"].observe(sequence.num_output)
        seen["request_max_num_generation_tokens"].observe(sequence.num_output)
        seen["request_params_max_tokens"].observe(sequence.wish.max_tokens)
        seen["request_params_n"].observe(1)
        seen["request_num_preemptions"].observe(sequence.num_preemptions)
        num_known = sequence.num_cached_tokens
        seen["request_prefill_kv_computed_tokens"].observe(sequence.num_prompt - num_known)

    def render(
        self, counts: Counts, gauges: dict[str, float], cache_config: dict[str, str]
    ) -> bytes:
        """Write everything in the text format. `gauges`: running, waiting, deferred, in_progress, usage, asleep."""
        lines = [line for family in self._families(counts, gauges) for line in family]
        info = {**cache_config, "engine": str(self._rank)}
        pairs = ",".join(f'{name}="{info[name]}"' for name in sorted(info))
        lines += _head("vllm:cache_config_info", "gauge", "Cache configuration.")
        lines.append(f"vllm:cache_config_info{{{pairs}}} 1.0")
        return ("\n".join(lines) + "\n").encode()

    def _families(self, counts: Counts, gauges: dict[str, float]) -> Iterator[list[str]]:
        waiting, deferred = gauges["waiting"], gauges["deferred"]
        yield self._gauge("num_requests_running", {"": gauges["running"]})
        yield self._gauge("num_requests_waiting", {"": waiting})
        by_reason = {"capacity": waiting - deferred, "deferred": deferred}
        yield self._gauge("num_requests_waiting_by_reason", by_reason, "reason")
        if self._has_connector:
            in_progress = gauges["in_progress"]
            stages = {
                "waiting_to_start": 0,
                "in_progress": in_progress,
                "completed_waiting": deferred - in_progress,
            }
            yield self._gauge("num_requests_kv_fetch_by_stage", stages, "stage")
        asleep = gauges["asleep"]
        sleep = {"awake": 1 - asleep, "weights_offloaded": asleep, "discard_all": 0}
        yield self._gauge("engine_sleep_state", sleep, "sleep_state")
        yield self._gauge("kv_cache_usage_perc", {"": gauges["usage"]})
        num_cached = counts.num_prefix_hits + counts.num_external_hits
        plain = {
            "prefix_cache_queries": counts.num_prefix_queries,
            "prefix_cache_hits": counts.num_prefix_hits,
            "external_prefix_cache_queries": counts.num_external_queries,
            "external_prefix_cache_hits": counts.num_external_hits,
            "mm_cache_queries": 0,
            "mm_cache_hits": 0,
            "num_preemptions": counts.num_preemptions,
            "prompt_tokens": self.num_prompt_tokens,
            "prompt_tokens_cached": num_cached,
            "generation_tokens": self.num_generation_tokens,
            **(self.nixl if self._has_connector else {}),
        }
        for name, value in plain.items():
            yield self._counter(name, {"": value})
        yield self._counter("prompt_tokens_by_source", self.prompt_tokens_by_source, "source")
        tiers = dict.fromkeys(_TIERS, 0) | {
            "device": counts.num_prefix_hits,
            "host": counts.num_host_hits,
            "p2p": counts.num_external_hits - counts.num_host_hits,
        }
        yield self._counter("prompt_tokens_cached_by_source", tiers, "source")
        yield self._counter("request_success", self.finished, "finished_reason")
        for name, histogram in self._histograms.items():
            full = f"vllm:{name}"
            yield [
                *_head(full, "histogram", name),
                *histogram.lines(full, self._labels),
                *self._created(full),
            ]

    def _gauge(self, name: str, values: Mapping[str, float], label: str = "") -> list[str]:
        full = f"vllm:{name}"
        return [*_head(full, "gauge", name), *self._samples(full, values, label)]

    def _counter(self, name: str, values: Mapping[str, int], label: str = "") -> list[str]:
        full = f"vllm:{name}_total"
        lines = [*_head(full, "counter", name), *self._samples(full, values, label)]
        return lines if label else [*lines, *self._created(f"vllm:{name}")]

    def _samples(self, full: str, values: Mapping[str, float], label: str) -> Iterator[str]:
        for key, value in values.items():
            yield f"{full}{{{self._with(label, key)}}} {_number(value)}"

    def _with(self, label: str, value: str) -> str:
        """Write the labels, sorted by name as the client library does."""
        if not label:
            return self._labels
        parts = [*self._labels.split(",", 1), f'{label}="{value}"']
        return ",".join(sorted(parts, key=lambda part: part.split("=", 1)[0]))

    def _created(self, full: str) -> list[str]:
        name = f"{full}_created"
        return [
            *_head(name, "gauge", "When this was created."),
            f"{name}{{{self._labels}}} {self._started_unix_s}",
        ]


def merge(texts: Sequence[bytes]) -> bytes:
    """Put what several ranks wrote together: each family once, with the samples of all."""
    if len(texts) == 1:
        return texts[0]
    families: dict[str, list[str]] = {}
    for text in texts:
        family, is_new = families.setdefault("", []), False
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if is_new or not line.startswith("#"):
                family.append(line)
    lines = [line for family in families.values() for line in family]
    return ("\n".join(lines) + "\n").encode()


def _head(full: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {full} {text.replace('_', ' ')}", f"# TYPE {full} {kind}"]


def _number(value: float) -> str:
    """Write a number as the client library does: 1.0, 0.005, 2.097152e+06."""
    number = float(value)
    if number >= 1e6 and number == int(number):
        digits = f"{number:.17g}" if number < 1e17 else repr(number)
        mantissa = digits.rstrip("0")
        exponent = len(digits) - 1
        return f"{mantissa[0]}.{mantissa[1:] or '0'}e+{exponent:02d}"
    return repr(number)
