"""One row per engine, scrolled, sorted and filtered, with a line below that says so. Pure."""

from collections.abc import Callable

from dynctl.core.units import GIB
from dynctl.core.workload import Slo
from dynctl.telemetry.figures import STALE, EngineFigures
from dynctl.telemetry.history import Latency
from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    count,
    fit,
    joined,
    judged,
    line,
    milliseconds,
    percent,
    restyled,
    spark,
    whole,
)
from dynctl.tui.view import SORTS, View, tokens_s

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
    room = max(0, height - 2)
    cursor = min(view.choices.cursor, max(0, len(engines) - 1))
    first = max(0, min(cursor - room + 1 if cursor >= room else 0, len(engines) - room))
    drawn = [header(columns)]
    for index, engine in enumerate(engines[first : first + room], first):
        drawn.append(_row(columns, engine, width, is_chosen=index == cursor))
    drawn += [()] * (room - len(drawn) + 1)
    drawn.append(_footer(view, len(engines), room, width))
    return drawn[:height]


def _row(columns: list[Column[Engine]], engine: Engine, width: int, *, is_chosen: bool) -> Line:
    drawn = row(columns, engine)
    if engine.state == STALE:
        drawn = tuple(Span(span.text, span.style or "dim") for span in drawn)
    return restyled(fit((Span("▸"), *drawn[1:]), width), "cursor") if is_chosen else drawn


def _footer(view: View, num_engines: int, room: int, width: int) -> Line:
    chosen = view.choices
    hidden = num_engines - room
    name, key = SORTS[chosen.sort]
    arrow = "▲" if chosen.is_reversed == (key is not None) else "▼"
    wanted = f"{chosen.filter}▏" if chosen.is_typing else chosen.filter or MISSING
    parts = [line(f"sort: {name} {arrow}"), line(f"filter: {wanted}")]
    left = line(f" … {hidden} more (j/k)" if hidden > 0 else f" {num_engines} engines")
    right = joined(parts, "   ")
    return restyled(
        (*fit(left, max(0, width - sum(len(s.text) for s in right) - 1)), *right), "dim"
    )


def _columns(view: View, engines: list[Engine]) -> list[Column[Engine]]:
    slo = view.overview.slo if view.overview else Slo()
    ttft_s = None if slo.ttft_ms is None else slo.ttft_ms / 1e3
    itl_s = None if slo.itl_ms is None else slo.itl_ms / 1e3
    name_width = max([6, *(len(e.id) for e in engines)])
    host_width = max([4, *(len(e.host_name) for e in engines)])

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
        Column("STATE", 6, lambda e, _: _state(e), is_right=False),
        Column("RUN", 4, text(lambda e: whole(e.running))),
        Column("WAIT", 4, text(lambda e: whole(e.waiting))),
        Column("PREEMPT", 7, text(lambda e: MISSING if e.preemptions_s is None else f"{e.preemptions_s:.1f}"), drop=9),
        Column("KV%", 4, text(lambda e: percent(e.kv_usage_ratio, ""))),
        Column("HIT%", 4, text(lambda e: percent(e.hit_ratio, "")), drop=2),
        Column("TTFT50", 7, text(lambda e: milliseconds(_p50(_ttft(e)))), drop=8),
        Column("TTFT99", 7, lambda e, _: judged(milliseconds(_p99(_ttft(e))), _p99(_ttft(e)), ttft_s)),
        Column("ITL50", 5, text(lambda e: milliseconds(_p50(e.itl))), drop=7),
        Column("ITL99", 6, lambda e, _: judged(milliseconds(_p99(e.itl)), _p99(e.itl), itl_s)),
        Column("TOK/S", 6, text(lambda e: count(tokens_s(e)))),
        Column("UTIL", 4, text(lambda e: percent(e.gpu_util_ratio)), drop=3),
        Column("MEM GiB", 11, text(_memory), drop=10),
        Column("W", 5, text(lambda e: whole(e.gpu_power_w)), drop=12),
        Column("°C", 3, text(lambda e: whole(e.gpu_temperature_celsius)), drop=11),
        Column("AGE", 4, text(lambda e: _age(e.age_s)), drop=6),
        Column("TREND", 8, trend, drop=4, is_right=False, is_flexible=True, max_width=40),
    ]  # fmt: skip


def _state(engine: Engine) -> Span:
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
    is_run = len(indices) > 1 and list(indices) == list(range(indices[0], indices[-1] + 1))
    return f"{indices[0]}-{indices[-1]}" if is_run else ",".join(map(str, indices))


def _memory(engine: Engine) -> str:
    used, size = engine.gpu_memory_used_bytes, engine.gpu_memory_bytes
    return MISSING if used is None or size is None else f"{used / GIB:.1f}/{size / GIB:.0f}"
