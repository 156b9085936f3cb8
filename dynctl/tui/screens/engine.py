"""One engine: the course of its latency against the goal, load, tokens, KV transfer, GPUs, and what its log says. Pure."""

from collections.abc import Callable, Sequence

from dynctl.core.snapshot import GpuSample
from dynctl.core.text import clean
from dynctl.core.units import GIB, format_bytes, format_seconds
from dynctl.telemetry.answers import Asks
from dynctl.telemetry.figures import STALE, EngineFigures
from dynctl.tui.chart import Curve, Scale, chart, scale_for
from dynctl.tui.course import Course, course_rows
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    cell,
    count,
    fit,
    joined,
    line,
    milliseconds,
    percent,
    rule,
    spark,
    whole,
    width_of,
    wrapped,
)
from dynctl.tui.panels.engines import state_of
from dynctl.tui.screen import Screen
from dynctl.tui.screens.logs import MAX_LINE_CHARS, drawn_log_line, log_lines, missing, style_of
from dynctl.tui.view import View

PLOT_HEIGHT = 8
LOG_HEIGHT = 3
"""Both at least."""
MAX_COMMAND_CHARS = 2000
TALL = 37
"""With so many lines there is room for all of a command."""
TREND_WIDTH = 12
KV_BAR_WIDTH = 10
_COURSES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "tokens/s": ("tokens_s", count),
    "KV in use": ("kv", percent),
    "running": ("running", whole),
    "waiting": ("waiting", whole),
}
METRICS = ("latency", "ITL", *_COURSES)
"""What the plot shows, in the order of `m`; latency is what the engine's role is judged by."""


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the engine that was opened; one that is gone is said to be."""
    engine = view.engine(view.choices.opened)
    if engine is None:
        name = clean(view.choices.opened, 60)
        return [rule(width), line(Span(f" {name} is not there any more", "bad"))][:height]
    figures = _figures(view, engine)
    head = [_head(view, engine, width), rule(width)]
    if engine.last_error or engine.seen:
        told = f"last error: {engine.last_error}" if engine.last_error else engine.seen
        figures.insert(
            0, line(Span(f" {clean(told, width - 2)}", "bad" if engine.last_error else "warn"))
        )
    room = height - len(head) - len(figures) - 2
    log_height = max(LOG_HEIGHT, min(room // 2, room - PLOT_HEIGHT))
    plot_height = max(3, room - log_height)
    plot = _plot(view, engine, width, plot_height)
    return [*head, *plot, rule(width), *figures, rule(width), *_log(view, engine, log_height)][
        :height
    ]


def _head(view: View, engine: EngineFigures, width: int) -> Line:
    """Who it is and since when, as much as there is room for."""
    gpus = ",".join(map(str, engine.gpu_indices))
    now_unix_s = view.overview.taken_unix_s if view.overview else 0.0
    up = (
        MISSING
        if engine.started_unix_s is None
        else format_seconds(max(0.0, now_unix_s - engine.started_unix_s))
    )
    parts = [
        line(Span(f" {clean(engine.id, 40)}", "title"), " ", state_of(engine)),
        line(clean(f"{engine.deployment} {engine.role}", 40)),
        line(f"{clean(engine.host_name, 30)}{':' + gpus if gpus else ''}"),
        line(f"pid {whole(engine.pid)}"),
        line(f"up {up}"),
        line(f"restarts {engine.num_restarts}"),
    ]
    while len(parts) > 2 and width_of(joined(parts, " · ")) > width:
        parts = parts[:-1]
    return joined(parts, " · ")


def _plot(view: View, engine: EngineFigures, width: int, height: int) -> list[Line]:
    key = f"engine:{engine.id}"
    what = METRICS[view.choices.metric % len(METRICS)]
    slo = view.slo_of(engine.deployment)
    if what == "ITL" or (what == "latency" and engine.role == "decode"):
        # A decode engine's own TTFT begins after prefill: no figure of a request.
        return course_rows(
            view, Course(" ITL", f"{key}:itl", engine.itl, slo.itl_ms), width, height
        )
    if what == "latency":
        return course_rows(
            view, Course(" TTFT", f"{key}:ttft", engine.ttft, slo.ttft_ms), width, height
        )
    name, show = _COURSES[what]
    curve = Curve(view.trends.course(f"{key}:{name}", view.window), "title")
    scale = Scale(1.0, show) if what == "KV in use" else scale_for([curve], show)
    window = line(Span(f"window {view.window.name}", "dim"))
    head = (*fit(line(Span(f" {what}", "title")), width - width_of(window)), *window)
    return [head, *chart([curve], scale, view.window, width, max(2, height - 1))][:height]


def _figures(view: View, engine: EngineFigures) -> list[Line]:
    key = f"engine:{engine.id}"
    usage = engine.kv_usage_ratio
    preempted = MISSING if engine.preemptions_s is None else f"{engine.preemptions_s:.1f}"
    return [
        line(
            f" running {whole(engine.running)}   waiting {whole(engine.waiting)}   preempt/s {preempted}"
            f"   KV {percent(usage)} {_bar(usage)}   hits {percent(engine.hit_ratio)}"
        ),
        line(
            f" tokens/s {count(engine.tokens_s)} {spark(view.trends.of(f'{key}:tokens_s'), TREND_WIDTH)}"
            f"   prompts {count(engine.prompt_tokens_s)}   answers {count(engine.output_tokens_s)}"
        ),
        _transfer(engine),
        *_gpus(view, engine),
        *_command(view, engine),
    ]


def _bar(ratio: float | None) -> str:
    if ratio is None:
        return ""
    filled = max(0.0, min(1.0, ratio)) * KV_BAR_WIDTH
    whole_cells = int(filled)
    part = EIGHTHS_ACROSS[round((filled - whole_cells) * 8)] if whole_cells < KV_BAR_WIDTH else ""
    return ("█" * whole_cells + part).ljust(KV_BAR_WIDTH, "░")


EIGHTHS_ACROSS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█")


def _transfer(engine: EngineFigures) -> Line:
    """What it pulled from prefill engines; engines without a KV connector say nothing of it."""
    found = engine.transfer
    rate = (
        MISSING if engine.transfer_bytes_s is None else f"{format_bytes(engine.transfer_bytes_s)}/s"
    )
    p50, p99 = (found.p50_s, found.p99_s) if found else (None, None)
    failed = engine.transfers_failed_total
    return line(
        f" KV in {rate}   transfer p50 {milliseconds(p50)} p99 {milliseconds(p99)} ms   failed ",
        Span(whole(failed), "bad" if failed else ""),
    )


def _gpus(view: View, engine: EngineFigures) -> list[Line]:
    hosts = view.overview.hosts if view.overview else ()
    host = next((h for h in hosts if h.name == engine.host_name), None)
    mine = [gpu for gpu in (host.gpus if host else ()) if gpu.index in engine.gpu_indices]
    if engine.state == STALE or not mine:
        return [line(f" GPU {MISSING}")]
    return [_gpu(mine)] if len(mine) > 2 else [_gpu([gpu]) for gpu in mine]


def _gpu(gpus: Sequence[GpuSample]) -> Line:
    """One line per GPU, or one of all: the mean use, the sum of memory and power, the highest temperature."""
    names = ",".join(str(gpu.index) for gpu in gpus)
    utils = [gpu.util_ratio for gpu in gpus if gpu.util_ratio is not None]
    used = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
    sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    watts = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    degrees = [gpu.temperature_celsius for gpu in gpus if gpu.temperature_celsius is not None]
    memory = f"{sum(used) / GIB:.1f}/{sum(sizes) / GIB:.1f} GiB" if used and sizes else MISSING
    util = percent(sum(utils) / len(utils) if utils else None)
    return line(
        f" GPU {names}  {util} util   {whole(max(degrees, default=None))} °C"
        f"   {whole(sum(watts) if watts else None)} W   {memory}   {clean(gpus[0].name, 40)}"
    )


def _command(view: View, engine: EngineFigures) -> list[Line]:
    """What it was started with, whole where there is room."""
    told = view.answers.commands.get((engine.host_name, engine.id)) if view.answers else None
    text = clean(told or MISSING, MAX_COMMAND_CHARS)
    most = 1 if view.room < TALL else 4
    parts = wrapped(text, view.width - 6)
    if len(parts) > most:
        parts = [*parts[: most - 1], cell("".join(parts[most - 1 :]), view.width - 6)]
    return [
        line(Span(" cmd  " if at == 0 else " " * 6, "dim"), part) for at, part in enumerate(parts)
    ]


def _log(view: View, engine: EngineFigures, height: int) -> list[Line]:
    """The newest lines, and above them the newest errors and warnings that are older."""
    name = (engine.host_name, engine.id)
    known = log_lines(view, name)
    if known is None:
        return [missing(view, name)]
    room = max(1, height - 1)
    trouble = [at for at, text in enumerate(known) if style_of(text)]
    old = [at for at in trouble if at < len(known) - room][-max(1, room // 2) :]
    newest = range(max(0, len(known) - (room - len(old))), len(known))
    shown = [drawn_log_line(known[at], MAX_LINE_CHARS)[0] for at in (*old, *newest)]
    head = line(
        Span(" log", "title"),
        Span(
            f"  {len(trouble)} errors and warnings in the last {len(known)} lines   l: all of them",
            "dim",
        ),
    )
    return [head, *shown][:height]


def _asks(view: View) -> Asks:
    engine = view.engine(view.choices.opened)
    if engine is None:
        return Asks()
    name = (engine.host_name, engine.id)
    return Asks(logs=(name,), commands=(name,))


SCREEN = Screen("engine", rows, num_metrics=len(METRICS), asks=_asks)
