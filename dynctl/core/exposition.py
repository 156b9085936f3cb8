"""Prometheus text of engines and routers → samples: a plain split that reads only the families asked for.

Not here: fetching the text, rates and percentiles over time (`telemetry.history`), writing metrics. Pure.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynctl.core.snapshot import EngineSample, Histogram, RelaySample, RouterSample
from dynctl.errors import ProbeError

# One label; the value's escapes are `\\`, `\"` and `\n`.
# Source: Prometheus text exposition format 0.0.4.
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|})')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: its labels and value."""

    labels: Mapping[str, str]
    value: float


Scrape = Mapping[str, list[Sample]]
"""Sample name (with `_total`, `_bucket`, …) to its lines, in the order of the text."""


def parse(text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """Read the lines whose sample name is in `names`; a name that does not occur is absent from the result.

    Time stamps and exemplars are ignored. Other lines are not looked at beyond their name, which is why
    a large scrape is cheap; pass a set.

    Raises:
        ProbeError: when a line that was asked for cannot be understood; names the line.
    """
    found: dict[str, list[Sample]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        name, brace, rest = line.partition("{")
        if not brace or " " in name:
            name, brace, rest = line.partition(" ")
        if name not in names:
            continue
        try:
            labels, rest = _labels(rest) if brace == "{" else ({}, rest)
            value = float(rest.split(None, 1)[0])
        except (ValueError, IndexError) as error:
            raise ProbeError(
                f"metrics line {number} of {name} is malformed: {line[:120]!r}"
            ) from error
        found.setdefault(name, []).append(Sample(labels, value))
    return found


def _labels(text: str) -> tuple[dict[str, str], str]:
    """Split `a="1",b="2"} 3` into the labels and what follows the brace."""
    labels: dict[str, str] = {}
    at = 0
    while True:
        match = _LABEL.match(text, at)
        if match is None:
            # No label at all, or a comma before the brace, which the format allows.
            tail = text[at:].lstrip()
            if not tail.startswith("}"):
                raise ValueError(text)
            return labels, tail[1:]
        value = match[2]
        if "\\" in value:
            value = _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), value)
        labels[match[1]] = value
        at = match.end()
        if match[3] == "}":
            return labels, text[at:]


def total(scrape: Scrape, *names: str) -> float | None:
    """Sum a counter or gauge over all its label sets; the first of `names` that occurs counts, None if none does."""
    values = _values(scrape, names)
    return sum(values) if values else None


def mean(scrape: Scrape, *names: str) -> float | None:
    """Average a ratio over all its label sets (one per data-parallel rank); None if no name occurs."""
    values = _values(scrape, names)
    return sum(values) / len(values) if values else None


def _values(scrape: Scrape, names: Iterable[str]) -> list[float]:
    for name in names:
        values = [sample.value for sample in scrape.get(name, ()) if not math.isnan(sample.value)]
        if values:
            return values
    return []


def histogram(scrape: Scrape, *families: str) -> Histogram | None:
    """Add up a histogram over all its label sets; the first of `families` that occurs counts, None if none does.

    Raises:
        ProbeError: when label sets have different bounds, a bound is no number, or counts go down.
    """
    for family in families:
        buckets = scrape.get(f"{family}_bucket")
        if buckets:
            return _histogram(family, buckets, total(scrape, f"{family}_sum") or 0.0)
    return None


def _histogram(family: str, buckets: list[Sample], sum_of_values: float) -> Histogram:
    counts: dict[float, float] = {}
    lines: dict[float, int] = {}
    for bucket in buckets:
        try:
            bound = float(bucket.labels["le"])
        except (KeyError, ValueError) as error:
            raise ProbeError(f"metrics: a bucket of {family} has no usable bound le=") from error
        counts[bound] = counts.get(bound, 0.0) + bucket.value
        lines[bound] = lines.get(bound, 0) + 1
    bounds = tuple(sorted(counts))
    cumulative = tuple(counts[bound] for bound in bounds)
    if bounds[-1] != math.inf or len(set(lines.values())) != 1:
        raise ProbeError(
            f"metrics: {family} has label sets with different bounds or none up to +Inf"
        )
    if any(later < earlier for earlier, later in itertools.pairwise(cumulative)):
        raise ProbeError(f"metrics: bucket counts of {family} go down")
    return Histogram(bounds[:-1], cumulative, sum_of_values)


def quantile(histogram: Histogram, q: float) -> float | None:
    """Estimate the q-quantile (0 to 1), linear inside the bucket; None without observations.

    Above the last bound nothing is known but that bound, which is then the answer.
    """
    observed = histogram.counts[-1]
    if observed <= 0 or not histogram.bounds:
        return None
    rank = q * observed
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count >= rank and count > below:
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return histogram.bounds[-1]


def histogram_names(*families: str) -> frozenset[str]:
    """Name the sample lines that `histogram` needs from `parse`."""
    return frozenset(f"{family}_{part}" for family in families for part in ("bucket", "sum"))


# Field of EngineSample to vLLM's names, newest first; older releases are met behind `external` engines.
# Source: scrapes of vLLM 0.32.0; older names from its release notes (v0.9: gpu_ dropped, v0.11: ITL renamed).
_ENGINE_TOTALS = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    "prefix_queries_tokens_total": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_hits_tokens_total": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "external_queries_tokens_total": ("vllm:external_prefix_cache_queries_total",),
    "external_hits_tokens_total": ("vllm:external_prefix_cache_hits_total",),
    "preemptions_total": ("vllm:num_preemptions_total",),
    "transfer_bytes_total": ("vllm:nixl_bytes_transferred_sum",),
    "transfers_failed_total": ("vllm:nixl_num_failed_transfers_total",),
}
_ENGINE_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_ENGINE_TTFT = ("vllm:time_to_first_token_seconds",)
_ENGINE_TRANSFER = ("vllm:nixl_xfer_time_seconds",)
_ENGINE_ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
ENGINE_NAMES = (
    frozenset(name for names in _ENGINE_TOTALS.values() for name in names)
    | frozenset(_ENGINE_KV_USAGE)
    | histogram_names(*_ENGINE_TTFT, *_ENGINE_ITL, *_ENGINE_TRANSFER)
)
"""All that `engine_sample` looks at."""

_ROUTER_TOTALS = (
    "requests_total",
    "errors_total",
    "inflight",
    "queued",
    "prompt_tokens_total",
    "predicted_hit_tokens_total",
    "possible_hit_tokens_total",
    "output_tokens_total",
    "kv_bytes_per_token",
    "index_blocks",
)
_ROUTER_PREFIX = "dynctl_router_"
_ROUTER_LABELLED = {
    "hit_tokens": ("part", "{}_tokens_total"),
    "kv_moved_tokens_total": ("link", "moved_{}_tokens_total"),
    "index_engines": ("state", "caches_{}"),
}
"""Families of which each label's value is a field of its own."""
_ROUTER_FINDINGS = f"{_ROUTER_PREFIX}findings"
_ROUTER_FIELDS = frozenset(one.name for one in fields(RouterSample))
_ROUTER_TTFT = f"{_ROUTER_PREFIX}ttft_seconds"
_ROUTER_ITL = f"{_ROUTER_PREFIX}itl_seconds"
ROUTER_NAMES = (
    frozenset(_ROUTER_PREFIX + name for name in (*_ROUTER_TOTALS, *_ROUTER_LABELLED))
    | {_ROUTER_FINDINGS}
    | histogram_names(_ROUTER_TTFT, _ROUTER_ITL)
)
"""All that `router_sample` looks at."""

_RELAY_LAG = "dynctl_relay_kv_lag_seconds"
RELAY_NAMES = histogram_names(_RELAY_LAG)
"""All that `relay_sample` looks at."""


def engine_sample(text: str, id: str, incarnation: str) -> EngineSample:  # noqa: A002 - the noun's field
    """Read one scrape of vLLM, or of an engine that uses its names; data-parallel ranks are added up.

    A family that is absent stays None: missing is not zero.

    Raises:
        ProbeError: when a wanted line cannot be understood.
    """
    scrape = parse(text, ENGINE_NAMES)
    totals: dict[str, Any] = {
        field: total(scrape, *names) for field, names in _ENGINE_TOTALS.items()
    }
    return EngineSample(
        id=id,
        incarnation=incarnation,
        kv_usage_ratio=mean(scrape, *_ENGINE_KV_USAGE),
        ttft_s=histogram(scrape, *_ENGINE_TTFT),
        itl_s=histogram(scrape, *_ENGINE_ITL),
        transfer_s=histogram(scrape, *_ENGINE_TRANSFER),
        **totals,
    )


def router_sample(text: str, id: str, deployment: str) -> RouterSample:  # noqa: A002 - the noun's field
    """Read one scrape of a router; label sets (status, model, worker) are added up.

    Raises:
        ProbeError: when a wanted line cannot be understood.
    """
    scrape = parse(text, ROUTER_NAMES)
    totals: dict[str, Any] = {
        field: total(scrape, _ROUTER_PREFIX + field) for field in _ROUTER_TOTALS
    }
    for name, (label, field) in _ROUTER_LABELLED.items():
        for sample in scrape.get(_ROUTER_PREFIX + name, ()):
            # A newer router may know more values than we do.
            if (own := field.format(sample.labels.get(label))) in _ROUTER_FIELDS:
                totals[own] = sample.value
    found = scrape.get(_ROUTER_FINDINGS, ())
    return RouterSample(
        id=id,
        findings=tuple((s.labels.get("engine", ""), s.labels.get("cause", "")) for s in found),
        deployment=deployment,
        ttft_s=histogram(scrape, _ROUTER_TTFT),
        itl_s=histogram(scrape, _ROUTER_ITL),
        **totals,
    )


def relay_sample(text: str, id: str, incarnation: str) -> RelaySample:  # noqa: A002 - the noun's field
    """Read one scrape of a relay.

    Raises:
        ProbeError: when a wanted line cannot be understood.
    """
    return RelaySample(id, incarnation, histogram(parse(text, RELAY_NAMES), _RELAY_LAG))
