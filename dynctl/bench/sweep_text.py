"""A sweep as people read it: a row per load, from the lowest, and the knee. Pure."""

from dynctl.bench.statistics import ENOUGH_FOR_P99
from dynctl.bench.summary import MISSING, milliseconds, percent
from dynctl.bench.sweep import Stage, Sweep, bounds
from dynctl.core.units import format_count, format_number

COLUMNS = (
    "load",
    "req/s done",
    "tok/s out",
    "per user",
    "TTFT p50",
    "TTFT p99",
    "ITL p99",
    "e2e p50",
    "KV hits",
    "failed",
    "goals",
)


def rows(found: Sweep) -> list[tuple[str, ...]]:
    """Make the rows of the table, under COLUMNS."""
    return [_row(stage, found) for stage in sorted(found.stages, key=lambda s: s.amount)]


def _row(stage: Stage, found: Sweep) -> tuple[str, ...]:
    mark = "*" if stage.num_requests < ENOUGH_FOR_P99 else ""
    return (
        stage.load,
        format_number(stage.completed_rps),
        format_count(stage.output_tok_s),
        MISSING if stage.tok_s_user is None else format_count(stage.tok_s_user),
        milliseconds(stage.ttft_p50_ms),
        milliseconds(stage.ttft_p99_ms) + (mark if stage.ttft_p99_ms is not None else ""),
        milliseconds(stage.itl_p99_ms),
        milliseconds(stage.e2e_p50_ms),
        percent(stage.hit_ratio),
        percent(stage.failed_ratio),
        _goals(stage, found),
    )


def _goals(stage: Stage, found: Sweep) -> str:
    if stage.is_met is None:
        return "unknown"
    if not stage.is_met:
        return f"missed: {', '.join(_short(name) for name in stage.missed)}"
    return "met: the knee" if found.knee is not None and stage.load == found.knee.load else "met"


def _short(name: str) -> str:
    return {"ttft_ms p99": "TTFT", "itl_ms p99": "ITL", "chunk_gap_ms p99": "chunk gap"}.get(
        name, name.removesuffix(" ratio")
    )


def knee_lines(found: Sweep) -> list[str]:
    """Say what the highest load is that meets the goals, and per GPU."""
    knee = found.knee
    if knee is None:
        missed = bounds(found.stages)[1]
        if missed is None:
            return ["knee: unknown, as the load generator was the limit"]
        return [f"knee: none; {missed.load} missed the goals, and no lower load met them"]
    words = "knee" if knee.is_bounded else "knee: at least"
    text = f"{words} {knee.load}: {format_number(knee.completed_rps)} req/s done, {format_count(knee.output_tok_s)} tok/s out"
    if knee.completed_rps_per_gpu is not None and knee.output_tok_s_per_gpu is not None:
        text += (
            f"; per GPU ({found.num_gpus}) {format_number(knee.completed_rps_per_gpu)} req/s, "
            f"{format_count(knee.output_tok_s_per_gpu)} tok/s"
        )
    return [text]


def footnotes(found: Sweep) -> list[str]:
    """Say what must be known to read the figures rightly."""
    notes = ["PARTIAL: interrupted; only loads that ended count"] if found.is_partial else []
    notes += [
        f"UNKNOWN {stage.load}: the load generator was the limit: {stage.client_limited}"
        for stage in found.stages
        if stage.is_met is None
    ]
    if any(stage.num_requests < ENOUGH_FOR_P99 for stage in found.stages):
        notes.append(
            f"* fewer than {ENOUGH_FOR_P99} requests: p99 rests on a handful of them, so a longer --duration makes the "
            "knee surer"
        )
    return notes
