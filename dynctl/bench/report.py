"""Records of a run → Report: percentiles, goodput, hit rates, honesty of the client, verdicts. Pure.

Not here: sending, files, tables (`summary`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dynctl.bench.kinds import Kind, kinds_of
from dynctl.bench.record import DEFINITIONS, Record
from dynctl.bench.router_times import RouterTimes, router_times
from dynctl.bench.spread import Spread, spread_of
from dynctl.bench.statistics import Stat, percentile, summarize
from dynctl.bench.workload import Recorded, parse_workload
from dynctl.core.snapshot import Histogram
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode

SCHEMA = "dynctl.bench/1"
MAX_FAILED_RATIO = 0.01
"""A goal at p99 cannot hold when more than one request in a hundred failed."""
MAX_LAG_MS = 5.0
MAX_LAG_OF_TTFT = 0.05
MAX_LOOP_LAG_MS = 20.0
"""Late wake-ups blur the times at which answers are seen; on a machine that also serves, some are normal."""
MAX_CPU_RATIO = 0.8
LENGTH_TOLERANCE = 0.01

METRICS = ("ttft_ms", "ttft_service_ms", "ttfo_ms", "tpot_ms", "e2e_ms", "send_lag_ms")
POOLED = {"chunk_gap_ms": "chunk_gaps_ms", "itl_ms": "itls_ms"}


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """How the load generator itself fared."""

    cpu_ratio: float
    """CPU time over wall time of the run: 1 is a whole core."""
    loop_lag_p99_ms: float
    """How late the event loop woke up."""


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """Growth of the router's counters over the run."""

    prompt_tokens: float
    predicted_hit_tokens: float
    decision: Histogram | None = None
    queue: Histogram | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What was asked for: enough to repeat the run."""

    url: str
    model: str
    api: str
    """`chat` or `completions`."""
    workload: str
    load: str
    duration_s: float
    warmup_s: float
    seed: int
    slo: Slo = field(default_factory=Slo)
    block_size_tokens: int = 16
    per_chunk_usage: bool = True
    fixed_lengths: bool = True
    """Whether `ignore_eos` and `min_tokens` were accepted."""
    overhead_tokens: float = 0.0
    """Tokens the chat template adds to a prompt, as measured before the run."""
    lead_tokens: float = 0.0
    """Of those and the prompts' fixed first word, what comes before anything that differs."""
    tokens_per_word: float = 1.0
    recorded: Recorded | None = None
    """Of a replayed trace."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run brought."""

    records: tuple[Record, ...]
    since_s: float
    """End of the warm-up."""
    until_s: float
    """End of the measured time: the duration, or earlier when the run was interrupted."""
    client: ClientFacts
    router: RouterCounts | None = None
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Requests:
    """How many requests there were, and what became of them."""

    sent: int
    ok: int
    failed: int
    failed_by_kind: dict[str, int]
    offered_rps: float
    completed_rps: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second over the measured time."""

    output_tok_s: float
    prompt_tok_s: float
    tok_s_user: float | None
    """Median over requests."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests within their goals; None without goals."""

    rps: float
    tok_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Asked and got, in tokens."""

    isl_mean: float | None
    """Of all prompts."""
    isl_asked_mean: float | None
    """Of those whose length could be chosen: not the later turns of a chat, which contain answers."""
    isl_got_mean: float | None
    """Of the same."""
    isl_mismatch_ratio: float | None
    """Share of requests more than 1% off the prompt length aimed at."""
    osl_asked_mean: float | None
    osl_got_mean: float | None
    osl_mismatch_ratio: float | None
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class KvReuse:
    """How much of the prompts was cached; None where nobody said."""

    cached_ratio: float | None
    ideal_ratio: float | None
    predicted_ratio: float | None
    block_size_tokens: int
    trace_ideal_ratio: float | None = None
    """Of a replayed trace itself, by its own blocks."""


@dataclass(frozen=True, slots=True)
class Check:
    """One goal and whether it held."""

    name: str
    limit: float
    value: float | None
    is_met: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run, as stored in `result.json`."""

    schema: str
    setting: Setting
    is_partial: bool
    client_limited: str
    """Why the load generator was the limit, so that the figures are not the server's; empty: it was not."""
    measured_s: float
    requests: Requests
    metrics: dict[str, Stat]
    throughput: Throughput
    goodput: Goodput | None
    lengths: Lengths
    kv: KvReuse
    client: ClientFacts
    checks: tuple[Check, ...]
    definitions: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, server, plan, time of day: filled in by the runner."""
    spread: Spread | None = None
    """None in results of earlier versions."""
    workload_digest: str = ""
    """Equal for runs of one workload, whatever their seed and server; results may be compared then."""
    kinds: tuple[Kind, ...] = ()
    """Of a mixed workload, each kind of request."""
    router: RouterTimes | None = None
    """What the router itself added; None for servers that are no dynctl router."""

    @property
    def exit_code(self) -> ExitCode:
        """The code of the command: too few answers, a gate not passed, or success."""
        if self.is_partial:
            return ExitCode.INTERRUPTED
        if self.requests.ok < 2:
            return ExitCode.REFUSED
        if self.checks and (self.client_limited or not all(c.is_met for c in self.checks)):
            return ExitCode.GATE
        return ExitCode.OK


def make_report(setting: Setting, run: Measured) -> Report:
    """Work out a report; warm-up requests count only as what came before."""
    records = [r for r in run.records if not r.is_warmup]
    ok = [r for r in records if r.is_ok]
    measured_s = max(run.until_s - run.since_s, 1e-9)
    metrics = _metrics(ok, records, setting.seed)
    requests = _requests(records, ok, run, measured_s)
    return Report(
        schema=SCHEMA,
        setting=setting,
        is_partial=run.is_partial,
        client_limited=_client_limited(run.client, metrics),
        measured_s=measured_s,
        requests=requests,
        metrics=metrics,
        throughput=_throughput(run, ok, measured_s),
        goodput=_goodput(records, setting.slo, measured_s),
        lengths=_lengths(ok),
        kv=_kv(run, ok, setting),
        client=run.client,
        checks=_checks(setting.slo, metrics, requests),
        definitions=DEFINITIONS,
        spread=spread_of(run.records, run.since_s, measured_s),
        workload_digest=workload_digest(setting),
        kinds=_kinds(setting, run),
        router=router_times(run.router.decision, run.router.queue) if run.router else None,
    )


def _kinds(setting: Setting, run: Measured) -> tuple[Kind, ...]:
    if setting.recorded is not None:
        return ()
    return kinds_of(parse_workload(setting.workload), run.records, run.since_s, run.until_s)


def workload_facts(setting: Setting) -> dict[str, Any]:
    """What makes two runs the same workload, however it was spelled; the seed draws from it and is no part."""
    recorded = setting.recorded
    what = recorded.digest if recorded else replace(parse_workload(setting.workload), text="")
    return {
        "workload": msgspec.to_builtins(what),
        "load": setting.load,
        "duration_s": setting.duration_s,
        "warmup_s": setting.warmup_s,
        "api": setting.api,
        "fixed_lengths": setting.fixed_lengths,
    }


def workload_digest(setting: Setting) -> str:
    """Name the workload by its content."""
    content = msgspec.json.encode(workload_facts(setting), order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def _metrics(ok: Sequence[Record], records: Sequence[Record], seed: int) -> dict[str, Stat]:
    found: dict[str, Stat | None] = {}
    for name in METRICS:
        # The generator's own delay is known for failed requests as well.
        source = records if name == "send_lag_ms" else ok
        found[name] = summarize((getattr(r, name) for r in source), seed)
    for name, method in POOLED.items():
        found[name] = summarize((v for r in ok for v in getattr(r, method)()), seed)
    return {name: stat for name, stat in found.items() if stat is not None}


def _requests(
    records: Sequence[Record], ok: Sequence[Record], run: Measured, measured_s: float
) -> Requests:
    kinds = Counter(r.outcome for r in records if not r.is_ok)
    ended = [r for r in run.records if r.is_ok and r.end_s is not None]
    completed = sum(run.since_s <= (r.end_s or 0.0) < run.until_s for r in ended)
    return Requests(
        sent=len(records),
        ok=len(ok),
        failed=len(records) - len(ok),
        failed_by_kind=dict(sorted(kinds.items())),
        offered_rps=len(records) / measured_s,
        completed_rps=completed / measured_s,
    )


def _throughput(run: Measured, ok: Sequence[Record], measured_s: float) -> Throughput:
    # Tokens of warm-up requests that arrive later belong to the measured time; so do those of failed streams.
    output = sum(r.tokens_between(run.since_s, run.until_s) for r in run.records)
    prompt = sum(
        r.prompt_tokens or 0
        for r in run.records
        if r.first_s is not None and run.since_s <= r.first_s < run.until_s
    )
    rates = sorted(1e3 / r.tpot_ms for r in ok if r.tpot_ms)
    return Throughput(
        output / measured_s, prompt / measured_s, percentile(rates, 0.5) if rates else None
    )


def _goodput(records: Sequence[Record], slo: Slo, measured_s: float) -> Goodput | None:
    if slo.ttft_ms is None and slo.itl_ms is None:
        return None
    good = [r for r in records if is_good(r, slo)]
    tokens = sum(r.output_tokens or 0 for r in good)
    ratio = len(good) / len(records) if records else 0.0
    return Goodput(len(good) / measured_s, tokens / measured_s, ratio)


def is_good(record: Record, slo: Slo) -> bool:
    """Whether a request succeeded within its goals."""
    if not record.is_ok or record.ttft_ms is None:
        return False
    if slo.ttft_ms is not None and record.ttft_ms > slo.ttft_ms:
        return False
    # An answer of one token has no time per token, and cannot miss that goal.
    return slo.itl_ms is None or record.tpot_ms is None or record.tpot_ms <= slo.itl_ms


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None


def _mismatch(pairs: Iterable[tuple[int | None, int | None]]) -> float | None:
    return _mean(
        float(abs(got - asked) > LENGTH_TOLERANCE * asked)
        for asked, got in pairs
        if asked is not None and got is not None
    )


def _lengths(ok: Sequence[Record]) -> Lengths:
    return Lengths(
        isl_mean=_mean(r.prompt_tokens for r in ok),
        isl_asked_mean=_mean(r.isl_asked_tokens for r in ok),
        isl_got_mean=_mean(r.prompt_tokens for r in ok if r.isl_asked_tokens is not None),
        isl_mismatch_ratio=_mismatch((r.isl_asked_tokens, r.prompt_tokens) for r in ok),
        osl_asked_mean=_mean(r.osl_asked_tokens for r in ok),
        osl_got_mean=_mean(r.output_tokens for r in ok),
        osl_mismatch_ratio=_mismatch((r.osl_asked_tokens, r.output_tokens) for r in ok),
        is_estimated=any(r.is_estimated for r in ok),
    )


def ideal_hits(records: Iterable[Record], block_size: int, lead_tokens: float) -> dict[int, int]:
    """Say per request number how many prompt tokens one unlimited cache, fed in order of arrival, would have had.

    Whole blocks only, and never the last prompt token, which must be computed: at most (prompt tokens − 1) // block
    size blocks. `lead_tokens` are the template's tokens around a shared prefix, which are shared as well.
    """
    seen_groups: set[int | None] = set()
    turns: dict[int, Record] = {}
    hits: dict[int, int] = {}
    for record in sorted(records, key=lambda r: (r.sent_s, r.number)):
        if not record.is_ok or record.prompt_tokens is None:
            continue
        shared = 0.0
        if record.group in seen_groups:
            shared = record.shared_tokens + lead_tokens
        seen_groups.add(record.group)
        if record.chat is not None:
            before = turns.get(record.chat)
            if before is not None:
                # The last token of an answer is never fed back, so it has no KV.
                shared = (before.prompt_tokens or 0) + (before.output_tokens or 0) - 1
            turns[record.chat] = record
        whole = min(int(shared), record.prompt_tokens - 1) // block_size * block_size
        hits[record.number] = max(0, whole)
    return hits


def _kv(run: Measured, ok: Sequence[Record], setting: Setting) -> KvReuse:
    told = [r for r in ok if r.prompt_tokens and r.cached_tokens is not None]
    prompts = [r for r in ok if r.prompt_tokens]
    ideal = ideal_hits(run.records, setting.block_size_tokens, setting.lead_tokens)
    router = run.router
    return KvReuse(
        cached_ratio=_share((r.cached_tokens or 0 for r in told), told),
        ideal_ratio=_share((ideal.get(r.number, 0) for r in prompts), prompts),
        predicted_ratio=router.predicted_hit_tokens / router.prompt_tokens
        if router and router.prompt_tokens
        else None,
        block_size_tokens=setting.block_size_tokens,
        trace_ideal_ratio=setting.recorded.ideal_ratio if setting.recorded else None,
    )


def _share(hits: Iterable[int], records: Sequence[Record]) -> float | None:
    prompt_tokens = sum(r.prompt_tokens or 0 for r in records)
    return sum(hits) / prompt_tokens if prompt_tokens else None


def _client_limited(client: ClientFacts, metrics: dict[str, Stat]) -> str:
    ttft, lag = metrics.get("ttft_ms"), metrics.get("send_lag_ms")
    limit_ms = max(MAX_LAG_MS, MAX_LAG_OF_TTFT * (ttft.p50 if ttft and ttft.p50 else 0.0))
    # One late request among a hundred is a hiccup; the interval says when it is more than that.
    if lag is not None and lag.p99 is not None and (lag.p99_interval or (0.0,))[0] > limit_ms:
        return f"requests left {lag.p99:.1f} ms late at p99, over {limit_ms:.1f} ms"
    if client.cpu_ratio > MAX_CPU_RATIO:
        return f"the load generator used {client.cpu_ratio:.0%} of a core"
    limit_ms = max(limit_ms, MAX_LOOP_LAG_MS)
    if client.loop_lag_p99_ms > limit_ms:
        return f"its event loop woke up {client.loop_lag_p99_ms:.1f} ms late at p99, over {limit_ms:.1f} ms"
    return ""


def _checks(slo: Slo, metrics: dict[str, Stat], requests: Requests) -> tuple[Check, ...]:
    checks = []
    # Without per-chunk usage the gap between chunks is the nearest thing to the time per token.
    itl = "itl_ms" if "itl_ms" in metrics else "chunk_gap_ms"
    for name, limit in (("ttft_ms", slo.ttft_ms), (itl, slo.itl_ms)):
        if limit is not None:
            stat = metrics.get(name)
            value = (stat.p99 if stat.p99 is not None else stat.max) if stat else None
            checks.append(Check(f"{name} p99", limit, value, value is not None and value <= limit))
    if checks:
        failed = requests.failed / requests.sent if requests.sent else 1.0
        checks.append(Check("failed ratio", MAX_FAILED_RATIO, failed, failed <= MAX_FAILED_RATIO))
    return tuple(checks)
