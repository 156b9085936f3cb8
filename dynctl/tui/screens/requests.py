"""Requests: those under way, then the last ones, and what the first token of the chosen one waited for; never a prompt. Pure."""

from collections.abc import Callable
from datetime import datetime

from dynctl.core.units import format_bytes
from dynctl.telemetry.answers import Asks
from dynctl.telemetry.traces import LOST, RUNS, Trace, engine_of
from dynctl.tui.asking import decisions_to_ask
from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import MISSING, Line, Span, count, line, percent, rule, whole
from dynctl.tui.listing import filter_note, listing
from dynctl.tui.screen import Screen
from dynctl.tui.view import View

PARTS = (("queue", "▒"), ("prefill", "█"), ("hand-over", "░"))
"""Of the time to first token, each with what its bar is drawn of, since colour is never alone."""
_STYLES = ("warn", "good", "dim")
DETAIL_HEIGHT = 6

Key = Callable[[Trace], float | None]

ORDERS: tuple[tuple[str, Key | None], ...] = (
    ("newest", None),
    ("TTFT", lambda t: t.ttft_ms),
    ("QUEUE", lambda t: t.queue_ms),
    ("PREFILL", lambda t: t.prefill_ms),
    ("HANDOVER", lambda t: t.handover_ms),
    ("IN", lambda t: t.prompt_tokens),
)


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw what is under way in a line, the list, and the chosen request."""
    listed = _listed(view)
    columns = choose(_columns(listed), width)
    deployment = view.deployment
    head = line(
        f" in flight {whole(deployment.inflight if deployment else None)}"
        f"   queued {whole(deployment.queued if deployment else None)}",
        Span(f"   {len(listed) or 'none'} seen; {_legend()}", "dim"),
    )
    name = ORDERS[view.choices.place.sort % len(ORDERS)][0]
    notes = [f"sort: {name}", filter_note(view)]
    if failed := _failed(view):
        notes.insert(0, failed)
    chosen = _chosen(view, listed)
    detail = [rule(width), *_detail(chosen, width)] if chosen else []
    size = (width, height - 3 - len(detail))

    def draw(trace: Trace) -> Line:
        return row(columns, trace)

    return [rule(width), head, header(columns), *listing(view, listed, draw, size, "requests", *notes), *detail][:height]  # fmt: skip


def _legend() -> str:
    return "  ".join(f"{mark} {name}" for name, mark in PARTS)


def _failed(view: View) -> str:
    routers = view.deployment.routers if view.deployment else ()
    failed = [name for name in routers if view.answers and name in view.answers.failures]
    return f"{failed[0]} does not answer" if failed else ""


def _listed(view: View) -> list[Trace]:
    """Those under way first, then by the chosen order."""
    place = view.choices.place
    key = ORDERS[place.sort % len(ORDERS)][1]
    listed = view.requests()
    if key is not None:
        known = [(value, t) for t in listed if (value := key(t)) is not None]
        known.sort(key=lambda one: one[0], reverse=not place.is_reversed)
        return [t for _, t in known] + [t for t in listed if key(t) is None]
    listed = listed[::-1] if place.is_reversed else listed
    return [t for t in listed if t.outcome == RUNS] + [t for t in listed if t.outcome != RUNS]


def _chosen(view: View, listed: list[Trace]) -> Trace | None:
    return listed[min(view.choices.place.cursor, len(listed) - 1)] if listed else None


def _columns(listed: list[Trace]) -> list[Column[Trace]]:
    longest = max((t.ttft_ms or 0.0 for t in listed), default=0.0)

    def ms(show: Callable[[Trace], float | None]) -> Callable[[Trace, int], Span]:
        return lambda trace, _: Span(_ms(show(trace)))

    return [
        Column("TIME", 8, lambda t, _: Span(_clock(t.unix_s)), drop=2, is_right=False),
        Column("ID", 8, lambda t, width: Span(t.id[-width:]), is_right=False, drop=1),
        Column("IN", 5, lambda t, _: Span(count(t.prompt_tokens))),
        Column("OUT", 5, lambda t, _: Span(count(t.output_tokens))),
        Column("HIT%", 4, lambda t, _: Span(percent(t.hit_ratio, ""))),
        Column("ROUTE", 17, lambda t, _: Span(_route(t)), is_right=False, is_flexible=True, max_width=40),
        Column("QUEUE", 5, ms(lambda t: t.queue_ms)),
        Column("PREFILL", 7, ms(lambda t: t.prefill_ms)),
        Column("HANDOVER", 8, ms(lambda t: t.handover_ms)),
        Column("TTFT", 5, ms(lambda t: t.ttft_ms)),
        Column("STATE", 8, lambda t, _: _state(t), drop=3, is_right=False),
        Column("WATERFALL", 12, lambda t, width: Span(bar(t, longest, width)), drop=4, is_right=False,
               is_flexible=True, max_width=60),
    ]  # fmt: skip


def _ms(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S")  # noqa: DTZ006 - local time


def _route(trace: Trace) -> str:
    """Engines without the deployment's name before them, which all have."""
    ends = [trace.prefill, trace.engine] if trace.is_handed_over else [trace.engine]
    return "→".join(_short(name) for name in ends)


def _short(name: str) -> str:
    return "-".join(name.split("-")[-2:])


def _state(trace: Trace) -> Span:
    if trace.outcome == RUNS:
        return Span("runs", "good")
    if trace.outcome == LOST:
        return Span(MISSING, "dim")
    return Span(trace.outcome, "dim" if trace.outcome == "done" else "bad")


def bar(trace: Trace, longest_ms: float, width: int) -> str:
    """Draw the parts of a time to first token one after another; empty where they are not all known."""
    if trace.ttft_ms is None or longest_ms <= 0:
        return ""
    drawn, spent_ms = "", 0.0
    for (_, mark), part in zip(PARTS, _parts(trace), strict=True):
        spent_ms += part or 0.0
        drawn += mark * (round(spent_ms / longest_ms * width) - len(drawn))
    return drawn


def _parts(trace: Trace) -> tuple[float | None, float | None, float | None]:
    return trace.queue_ms, trace.prefill_ms, trace.handover_ms


def _detail(trace: Trace, width: int) -> list[Line]:
    """The chosen request: where it went and its waterfall, a line per part."""
    failed = f"   {trace.num_failed} attempts failed before" if trace.num_failed else ""
    ends = [trace.prefill, trace.engine] if trace.is_handed_over else [trace.engine]
    cached = f"{whole(trace.cached_tokens)} cached of {whole(trace.prompt_tokens)}"
    expected = f"{whole(trace.expected_cached_tokens)} expected"
    drawn = [
        line(
            Span(f" {trace.id}", "title"), f"   {' → '.join(ends)}   {cached} ({expected}){failed}"
        ),
        line(f" {trace.path or 'one engine'}{_moved(trace)}   key {trace.route_key or MISSING}"),
    ]
    total, room, begun_ms = trace.ttft_ms, max(4, width - 30), 0.0
    for (name, mark), style, part in zip(PARTS, _STYLES, _parts(trace), strict=True):
        if name == "hand-over" and not trace.is_handed_over:
            continue
        at = round(begun_ms / total * room) if total else 0
        begun_ms += part or 0.0
        length = max(0, (round(begun_ms / total * room) if total else 0) - at)
        drawn.append(line(f" {name:<10}{_ms(part):>7} ms  ", " " * at, Span(mark * length, style)))
    drawn += [()] * (DETAIL_HEIGHT - 1 - len(drawn))
    return drawn[: DETAIL_HEIGHT - 1]


def _moved(trace: Trace) -> str:
    if not trace.link:
        return ""
    size = f", {format_bytes(trace.move_bytes)}" if trace.move_bytes is not None else ""
    return f": {trace.move_tokens} tokens{size} over {trace.link}"


def _engine(view: View) -> str:
    chosen = _chosen(view, _listed(view))
    known = [engine.id for engine in view.overview.engines] if view.overview else []
    return engine_of(chosen.engine, known) if chosen else ""


SCREEN = Screen(
    "requests",
    rows,
    num_rows=lambda view: len(view.requests()),
    num_orders=lambda _: len(ORDERS),
    asks=lambda view: Asks(num_decisions=decisions_to_ask(view)),
    engine=_engine,
)
