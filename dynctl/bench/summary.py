"""A Report as people read it: rows of tables, verdicts, footnotes. Pure."""

from collections.abc import Sequence

from dynctl.bench.record import DEFINITIONS
from dynctl.bench.report import Check, Report
from dynctl.bench.statistics import ENOUGH_FOR_P99, Stat
from dynctl.core.units import format_count

MISSING = "–"
METRIC_TITLES = {
    "ttft_ms": "TTFT ms (from scheduled)",
    "ttft_service_ms": "TTFT ms (from sent)",
    "itl_ms": "ITL ms (per token)",
    "chunk_gap_ms": "chunk gap ms",
    "tpot_ms": "TPOT ms (per request)",
    "e2e_ms": "end to end ms",
    "send_lag_ms": "send lag ms (this client)",
}
WARM_MARGIN = 0.02
"""A hit rate so far above the ideal one cannot come from the run itself."""
METRIC_COLUMNS = ("metric", "mean", "p50", "p90", "p95", "p99", "p99 95% interval", "samples")
KIND_COLUMNS = (
    "tokens asked for",
    "answers/s",
    "TTFT ms mean",
    "tok/s out",
    "tok/s per answer",
    "TTFT ms p99",
    "answered",
    "failed",
)


def metric_rows(report: Report) -> list[tuple[str, ...]]:
    """Make the rows of the latency table, under METRIC_COLUMNS."""
    return [
        _metric_row(title, report.metrics[name])
        for name, title in METRIC_TITLES.items()
        if name in report.metrics
    ]


def _metric_row(title: str, stat: Stat) -> tuple[str, ...]:
    mark = "*" if stat.is_p99_weak else ""
    interval = stat.p99_interval
    return (
        title,
        milliseconds(stat.mean),
        milliseconds(stat.p50),
        milliseconds(stat.p90),
        milliseconds(stat.p95),
        milliseconds(stat.p99) + mark,
        f"{milliseconds(interval[0])} to {milliseconds(interval[1])}" if interval else MISSING,
        str(stat.num),
    )


def milliseconds(value: float | None) -> str:
    """Three significant digits where they are there."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def percent(ratio: float | None) -> str:
    """One decimal."""
    return MISSING if ratio is None else f"{ratio:.1%}"


def fact_rows(report: Report) -> list[tuple[str, str]]:
    """Make the rows of everything that is no latency: name and value."""
    requests, through, kv = report.requests, report.throughput, report.kv
    failed = ", ".join(f"{count} {kind}" for kind, count in requests.failed_by_kind.items())
    rows = [
        (
            "requests",
            f"{requests.sent} sent, {requests.ok} answered, {requests.failed} failed"
            + (f" ({failed})" if failed else ""),
        ),
        (
            "request rate",
            f"{requests.offered_rps:.2f}/s offered, {requests.completed_rps:.2f}/s completed",
        ),
        (
            "tokens",
            f"{format_count(through.output_tok_s)}/s out, {format_count(through.prompt_tok_s)}/s in"
            + ("" if through.tok_s_user is None else f", {through.tok_s_user:.0f}/s per user"),
        ),
    ]
    spread = report.spread
    if spread is not None and spread.ttft_cv is not None:
        known = [value for value in spread.ttft_ms if value is not None]
        ends = f"{milliseconds(min(known))} to {milliseconds(max(known))} ms"
        windows = f"TTFT means of windows of {spread.window_s:.3g} s"
        rows.append(("spread", f"{windows}: {ends} (CV {spread.ttft_cv:.0%})"))
    if report.goodput is not None:
        good = report.goodput
        rows.append(("goodput", f"{good.rps:.2f}/s, {good.ratio:.1%} of requests within goals"))
    hits = f"{percent(kv.cached_ratio)} of prompt tokens, ideal {percent(kv.ideal_ratio)} (blocks of {kv.block_size_tokens})"
    if kv.trace_ideal_ratio is not None and report.setting.recorded is not None:
        blocks = report.setting.recorded.block_tokens
        hits += f", of the trace itself {percent(kv.trace_ideal_ratio)} (blocks of {blocks})"
    expected = f"router expected {percent(kv.predicted_ratio)}"
    rows.append(("KV hit rate", f"{hits}, {expected}"))
    rows += _router_rows(report)
    rows += _length_rows(report)
    client = f"{report.client.cpu_ratio:.0%} of a core, loop lag p99 {report.client.loop_lag_p99_ms:.1f} ms"
    rows.append(("load generator", client))
    return rows


def _router_rows(report: Report) -> list[tuple[str, str]]:
    if report.router is None:
        return []
    times = (("until it decides", report.router.waiting), ("decision", report.router.decision))
    parts = [
        f"{title} {milliseconds(time.mean_ms)} ms on average, p50 {milliseconds(time.p50_ms)}, "
        f"p99 {milliseconds(time.p99_ms)}"
        for title, time in times
        if time is not None
    ]
    return [("router added", "; ".join(parts))]


def kind_rows(report: Report) -> list[tuple[str, ...]]:
    """Make the rows of the table of kinds of request, under KIND_COLUMNS."""
    return [
        (
            kind.name,
            f"{kind.requests_s:.2f}",
            milliseconds(kind.ttft_ms),
            format_count(kind.output_tok_s),
            MISSING if kind.tok_s_user is None else format_count(kind.tok_s_user),
            milliseconds(kind.ttft_p99_ms),
            str(kind.num_ok),
            str(kind.num_failed),
        )
        for kind in report.kinds
    ]


def _length_rows(report: Report) -> list[tuple[str, str]]:
    lengths = report.lengths

    def pair(asked: float | None, got: float | None, off: float | None) -> str:
        text = f"asked {MISSING if asked is None else f'{asked:.1f}'}, got {MISSING if got is None else f'{got:.1f}'}"
        return text + (f"; {off:.0%} of requests are more than 1% off" if off else "")

    has_turns = lengths.isl_mean is not None and lengths.isl_mean != lengths.isl_got_mean
    turns = f" (first turns); mean of all {lengths.isl_mean:.1f}" if has_turns else ""
    estimated = " (estimated from chunks: the server sent no usage)" if lengths.is_estimated else ""
    return [
        (
            "prompt tokens",
            pair(lengths.isl_asked_mean, lengths.isl_got_mean, lengths.isl_mismatch_ratio) + turns,
        ),
        (
            "output tokens",
            pair(lengths.osl_asked_mean, lengths.osl_got_mean, lengths.osl_mismatch_ratio)
            + estimated,
        ),
    ]


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Say for each goal whether it held."""
    return [f"{'met   ' if c.is_met else 'MISSED'} {_check_text(c)}" for c in checks]


def _check_text(check: Check) -> str:
    if check.name == "failed ratio":
        return f"failed requests {percent(check.value)}, at most {check.limit:.0%}"
    return f"{check.name} {milliseconds(check.value)} ms, goal {check.limit:g} ms"


def footnotes(report: Report) -> list[str]:
    """Say what must be known to read the figures rightly."""
    notes = []
    if report.is_partial:
        notes.append(f"PARTIAL: interrupted after {report.measured_s:.1f} s of the measured time")
    if report.client_limited:
        notes.append(f"INVALID: the load generator was the limit: {report.client_limited}")
    kv = report.kv
    if kv.cached_ratio is not None and kv.cached_ratio > (kv.ideal_ratio or 0.0) + WARM_MARGIN:
        notes.append(
            f"the server had parts of these prompts cached before the run (hit rate {kv.cached_ratio:.0%}, at most "
            f"{kv.ideal_ratio or 0.0:.0%} from this run alone): use another --seed"
        )
    if any(s.is_p99_weak for n, s in report.metrics.items() if n in METRIC_TITLES):
        notes.append(f"* fewer than {ENOUGH_FOR_P99} samples: p99 rests on a handful of them")
    if "itl_ms" not in report.metrics and "chunk_gap_ms" in report.metrics:
        notes.append(
            f"no itl_ms: the server counts no tokens per chunk; {DEFINITIONS['chunk_gap_ms']}"
        )
    return notes
