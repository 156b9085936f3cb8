"""One row per engine, scrolled, sorted and filtered, with a line below that says so. Pure."""

import itertools
from collections.abc import Callable

from dynctl.core.units import GIB
from dynctl.telemetry.figures import STALE, EngineFigures
from dynctl.telemetry.history import Latency
from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    count,
    judged,
    milliseconds,
    percent,
    seconds,
    spark,
    whole,
)
from dynctl.tui.listing import filter_note, listing
from dynctl.tui.view import SORTS, View

Engine = EngineFigures

STATES = {
    "ready": Span("UP", "good"),
    "starting": Span("START", "warn"),
    "draining": Span("DRAIN", "warn"),
    "backoff": Span("WAIT", "bad"),
    "failed": Span("FAIL", "bad"),
    "stopped": Span("STOP", "dim"),
}


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the titles, the engines around the cursor, and the line about the rest."""
    engines = view.engines()
    columns = choose(_columns(view, engines), width)
    place = view.choices.place
    name, key = SORTS[place.sort % len(SORTS)]
    arrow = "▲" if place.is_reversed == (key is not None) else "▼"
    notes = (f"sort: {name} {arrow}", filter_note(view))

    def draw(engine: Engine) -> Line:
        return _row(columns, engine)

    drawn = listing(view, engines, draw, (width, height - 1), "engines", *notes)
    return [header(columns), *drawn][:height]


def _row(columns: list[Column[Engine]], engine: Engine) -> Line:
    drawn = row(columns, engine)
    if engine.state == STALE:
        drawn = tuple(Span(span.text, span.style or "dim") for span in drawn)
    return drawn


def _columns(view: View, engines: list[Engine]) -> list[Column[Engine]]:
    name_width = max([6, *(len(e.id) for e in engines)])
    host_width = max([4, *(len(e.host_name) for e in engines)])

    def ttft99(engine: Engine, _: int) -> Span:
        value = _p99(_ttft(engine))
        return judged(milliseconds(value), value, seconds(view.slo_of(engine.deployment).ttft_ms))

    def itl99(engine: Engine, _: int) -> Span:
        value = _p99(engine.itl)
        return judged(milliseconds(value), value, seconds(view.slo_of(engine.deployment).itl_ms))

    def trend(engine: Engine, width: int) -> Span:
        what = "itl_p99" if engine.role == "decode" else "ttft_p99"
        return Span(spark(view.trends.of(f"engine:{engine.id}:{what}"), width))

    def text(show: Callable[[Engine], str]) -> Callable[[Engine, int], Span]:
        return lambda engine, _: Span(show(engine))

    return [
        Column("ENGINE", min(name_width, 16), text(lambda e: e.id), is_right=False, is_flexible=True,
               max_width=min(name_width, 40)),
        Column("HOST", min(host_width, 8), text(lambda e: e.host_name), is_right=False, is_flexible=True,
               max_width=min(host_width, 24)),
        Column("GPU", 4, text(_gpu_names), drop=5),
        Column("STATE", 6, lambda e, _: state_of(e), is_right=False),
        Column("RUN", 4, text(lambda e: whole(e.running))),
        Column("WAIT", 4, text(lambda e: whole(e.waiting))),
        Column("PREEMPT", 7, text(lambda e: MISSING if e.preemptions_s is None else f"{e.preemptions_s:.1f}"), drop=9),
        Column("KV%", 4, text(lambda e: percent(e.kv_usage_ratio, ""))),
        Column("HIT%", 4, text(lambda e: percent(e.hit_ratio, "")), drop=2),
        Column("TTFT50", 7, text(lambda e: milliseconds(_p50(_ttft(e)))), drop=8),
        Column("TTFT99", 7, ttft99),
        Column("ITL50", 5, text(lambda e: milliseconds(_p50(e.itl))), drop=7),
        Column("ITL99", 6, itl99),
        Column("TOK/S", 6, text(lambda e: count(e.tokens_s))),
        Column("UTIL", 4, text(lambda e: percent(e.gpu_util_ratio)), drop=3),
        Column("MEM GiB", 11, text(_memory), drop=10),
        Column("W", 5, text(lambda e: whole(e.gpu_power_w)), drop=12),
        Column("°C", 3, text(lambda e: whole(e.gpu_temperature_celsius)), drop=11),
        Column("AGE", 4, text(lambda e: _age(e.age_s)), drop=6),
        Column("TREND", 8, trend, drop=4, is_right=False, is_flexible=True, max_width=40),
    ]  # fmt: skip


def state_of(engine: Engine) -> Span:
    """How it stands, in one word, or how old that is."""
    if engine.state == STALE:
        return Span(f"{_age(engine.age_s)} old", "bad")
    return STATES.get(engine.state, Span(engine.state))


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 99.5 else f"{seconds / 60:.0f}m"


def _ttft(engine: Engine) -> Latency | None:
    # A decode engine's own TTFT begins after prefill: no figure of a request.
    return None if engine.role == "decode" else engine.ttft


def _p50(latency: Latency | None) -> float | None:
    return latency.p50_s if latency else None


def _p99(latency: Latency | None) -> float | None:
    return latency.p99_s if latency else None


def _gpu_names(engine: Engine) -> str:
    indices = engine.gpu_indices
    if not indices:
        return MISSING
    is_run = len(indices) > 1 and all(b - a == 1 for a, b in itertools.pairwise(indices))
    return f"{indices[0]}-{indices[-1]}" if is_run else ",".join(map(str, indices))


def _memory(engine: Engine) -> str:
    used, size = engine.gpu_memory_used_bytes, engine.gpu_memory_bytes
    return MISSING if used is None or size is None else f"{used / GIB:.1f}/{size / GIB:.0f}"
