"""A recorded workload: times, lengths and what prompts share; and what it says about features that pay.

Not here: reading its lines (`trace_lines`), replaying (`simulate`, `bench`).
Pure.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dynctl.core.plan import PlannedDeployment, Sourced
from dynctl.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace."""

    at_s: float
    isl_tokens: int
    osl_tokens: int
    blocks: tuple[int, ...] = ()
    """One number per block of the prompt, naming it with everything before it."""
    messages: tuple[tuple[str, str], ...] = ()
    """Role and text of each, where texts were recorded and asked for."""
    session: str = ""
    """Requests that a client says belong together."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time, the first at 0."""

    calls: tuple[Call, ...]
    block_tokens: int
    name: str = "trace"

    @property
    def duration_s(self) -> float:
        """From the first request to the last."""
        return self.calls[-1].at_s

    @property
    def rate_rps(self) -> float:
        """Requests per second."""
        return (len(self.calls) - 1) / self.duration_s if self.duration_s else 1.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length's mean and quantiles, in tokens."""

    mean: float
    p50: int
    p90: int
    p99: int
    p999: int
    longest: int


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace says."""

    num_calls: int
    duration_s: float
    rate_rps: float
    isl: Lengths
    osl: Lengths
    longest_tokens: int
    """Prompt and answer of the longest request."""
    context_p999_tokens: int
    reuse_ceiling: float
    """Share of prompt tokens an unlimited cache would hold already."""
    reuse_in_cache: float | None
    """The same for a cache of the given size; None: no size was given."""
    gap_cv: float
    """Spread of the gaps between arrivals over their mean: 1 is Poisson, more is bursty."""
    peak_ratio: float
    """Busiest hundredth of the time over the mean."""
    session_turns: float
    """Mean requests of a session: chains in which a prompt begins with all of an earlier one."""
    session_turns_p90: int


def look_at(trace: Trace, cache_tokens: int | None = None) -> TraceFacts:
    """Count everything a plan wants to know; `cache_tokens` is the KV room of all engines together."""
    calls = trace.calls
    turns = _session_lengths(trace)
    contexts = sorted(call.isl_tokens + call.osl_tokens for call in calls)
    return TraceFacts(
        num_calls=len(calls),
        duration_s=trace.duration_s,
        rate_rps=trace.rate_rps,
        isl=_lengths([call.isl_tokens for call in calls]),
        osl=_lengths([call.osl_tokens for call in calls]),
        longest_tokens=contexts[-1],
        context_p999_tokens=_quantile(contexts, 0.999),
        reuse_ceiling=reuse(trace, None),
        reuse_in_cache=None if cache_tokens is None else reuse(trace, cache_tokens),
        gap_cv=_gap_cv(trace),
        peak_ratio=_peak_ratio(trace),
        session_turns=sum(turns) / len(turns),
        session_turns_p90=_quantile(sorted(turns), 0.9),
    )


def _lengths(values: Sequence[int]) -> Lengths:
    ranked = sorted(values)
    return Lengths(
        sum(ranked) / len(ranked),
        _quantile(ranked, 0.5),
        _quantile(ranked, 0.9),
        _quantile(ranked, 0.99),
        _quantile(ranked, 0.999),
        ranked[-1],
    )


def _quantile(ranked: Sequence[int], q: float) -> int:
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]


def hits(trace: Trace, cache_tokens: int | None = None) -> Iterator[int]:
    """Prompt tokens of each request found in one cache that is shared by all; None: it holds everything.

    Counted are the leading blocks that earlier requests had, but for the last token of a prompt, which is always
    computed. Blocks that were used least recently leave first.
    """
    room = None if cache_tokens is None else max(1, cache_tokens // trace.block_tokens)
    held: OrderedDict[int, None] = OrderedDict()
    for call in trace.calls:
        depth = 0
        for block in call.blocks:
            if block not in held:
                break
            depth += 1
        yield min(depth * trace.block_tokens, call.isl_tokens - 1)
        for block in reversed(call.blocks):
            held[block] = None
            held.move_to_end(block)
        while room is not None and len(held) > room:
            held.popitem(last=False)


def reuse(trace: Trace, cache_tokens: int | None) -> float:
    """Share of prompt tokens that are `hits`."""
    return sum(hits(trace, cache_tokens)) / sum(call.isl_tokens for call in trace.calls)


def _gap_cv(trace: Trace) -> float:
    times = [call.at_s for call in trace.calls]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if mean <= 0:
        return 0.0
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def _peak_ratio(trace: Trace) -> float:
    if trace.duration_s <= 0:
        return 1.0
    num = min(100, len(trace.calls))
    counts = [0] * num
    for call in trace.calls:
        counts[min(num - 1, int(call.at_s / trace.duration_s * num))] += 1
    return max(counts) * num / len(trace.calls)


def _session_lengths(trace: Trace) -> list[int]:
    """Requests per session."""
    ends: dict[int, int] = {}
    turns: list[int] = []
    for call in trace.calls:
        session = next((ends[b] for b in reversed(call.blocks) if b in ends), None)
        if session is None:
            session = len(turns)
            turns.append(0)
        turns[session] += 1
        # The last block may be half full, and then it is another one in the next turn.
        whole = call.isl_tokens // trace.block_tokens
        if whole and len(call.blocks) >= whole:
            ends[call.blocks[whole - 1]] = session
    return turns


def workload_of(facts: TraceFacts) -> Workload:
    """The trace as the plan's formulas take it."""
    shared = facts.reuse_ceiling if facts.reuse_in_cache is None else facts.reuse_in_cache
    return Workload(
        isl_tokens=max(1, round(facts.isl.mean)),
        osl_tokens=max(1, round(facts.osl.mean)),
        rate_rps=max(1e-3, float(f"{facts.rate_rps:.4g}")),
        shared_prefix_ratio=round(min(shared, 0.99), 3),
    )


KV_ROUTING_FROM = 0.1
LONG_PROMPT_TOKENS = 2048
BURSTY_CV = 1.5
MARGIN = 1.1


def advice(facts: TraceFacts) -> list[str]:
    """Which features pay for this workload, each with its number."""
    lines = []
    ceiling = facts.reuse_ceiling
    if ceiling >= KV_ROUTING_FROM:
        lines.append(f"KV routing: pays, up to {ceiling:.0%} of prompt tokens were computed before")
    else:
        lines.append(f"KV routing: skip, only {ceiling:.1%} of prompt tokens were computed before")
    if facts.reuse_in_cache is not None and ceiling - facts.reuse_in_cache > 0.05:
        lines.append(
            f"cache: {facts.reuse_in_cache:.0%} of {ceiling:.0%} reuse fits the planned KV room; "
            "a lower tier (host memory) would hold the rest"
        )
    isl = facts.isl
    is_long = isl.mean >= LONG_PROMPT_TOKENS
    is_uneven = isl.p99 >= 8 * max(1, isl.p50) and isl.p99 >= LONG_PROMPT_TOKENS
    if is_long or is_uneven:
        why = f"mean {isl.mean:.0f}" if is_long else f"p99 {isl.p99}, median {isl.p50}"
        lines.append(f"prefill/decode: worth pricing, prompts are long ({why} tokens)")
    else:
        lines.append(f"prefill/decode: little to gain, prompts are short (mean {isl.mean:.0f})")
    if facts.gap_cv >= BURSTY_CV or facts.peak_ratio >= 3:
        lines.append(
            f"bursts: arrivals vary (CV {facts.gap_cv:.1f}, peak {facts.peak_ratio:.1f}× the mean); "
            f"plan for the peak with --what-if 'rate x{facts.peak_ratio:.1f}'"
        )
    else:
        lines.append(
            f"bursts: steady (CV {facts.gap_cv:.1f}, peak {facts.peak_ratio:.1f}× the mean)"
        )
    limit = model_len(facts)
    lines.append(
        f"limits.max_model_len_tokens: {limit} would do (99.9 % of requests and 10 % more), "
        f"{_cut_off(facts, limit)}"
    )
    return lines


def model_len(facts: TraceFacts) -> int:
    """Context length that covers 99.9 % of requests with a tenth to spare, in whole blocks of 16."""
    return math.ceil(facts.context_p999_tokens * MARGIN / 16) * 16


def with_model_len(planned: PlannedDeployment, facts: TraceFacts) -> PlannedDeployment:
    """A deployment whose context length covers the trace, where the inventory leaves it open and it is shorter."""
    limit, known = model_len(facts), planned.max_model_len_tokens
    if known is None or known.source.startswith("declared") or known.value <= limit:
        return planned
    source = f"measured: 99.9 % of the trace's requests and 10 % more, {_cut_off(facts, limit)}"
    return replace(planned, max_model_len_tokens=Sourced(limit, source))


def _cut_off(facts: TraceFacts, limit: int) -> str:
    if facts.longest_tokens <= limit:
        return "cutting nothing off"
    return f"cutting off the longest 0.1 % (up to {facts.longest_tokens} tokens)"
