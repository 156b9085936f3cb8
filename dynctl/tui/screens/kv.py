"""KV: hits by who says so, what was possible and what the rest was lost to, the router's index, what was moved, and routes. Pure."""

from collections.abc import Sequence

from dynctl.core.text import clean
from dynctl.core.units import format_bytes
from dynctl.telemetry.answers import Asks
from dynctl.telemetry.figures import DeploymentFigures
from dynctl.telemetry.hit_sums import HitFigures, hit_figures
from dynctl.telemetry.traces import routes
from dynctl.tui.asking import decisions_to_ask
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    beside,
    cell,
    count,
    line,
    milliseconds,
    percent,
    rule,
    spark,
)
from dynctl.tui.screen import Screen
from dynctl.tui.view import View

WIDE = 120
_NAME = 26
_COLUMN = 12


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw hits and losses, index and moves, and the matrix of routes beside or below."""
    since = _since(view)
    left = [*_hits(view, since, width if width < WIDE else width // 2), *_losses(view, since)]
    moved = [*_index(view), *_moved(view, since)]
    if width >= WIDE:
        matrix = _matrix(view, width // 2 - 2, height - 1)
        body = beside([*left, line(), *moved], matrix, width)
    else:
        room = height - 1 - len(left) - len(moved)
        body = [*left, *moved, *_matrix(view, width, room)]
    return [rule(width), *body][:height]


def _since(view: View) -> HitFigures | None:
    """Sums since the start of the shown deployment's routers."""
    deployment, answers = view.deployment, view.answers
    if deployment is None or answers is None:
        return None
    return hit_figures(answers.hits[name] for name in deployment.routers if name in answers.hits)


def _row(name: str, recent: float | None, since: float | None, trend: str = "") -> Line:
    return line(
        f" {cell(name, _NAME)}",
        Span(f"{percent(recent):>{_COLUMN}}", "title"),
        f"{percent(since):>{_COLUMN}}  {trend}",
    )


def _hits(view: View, since: HitFigures | None, width: int) -> list[Line]:
    found = view.deployment
    key = f"deployment:{found.name if found else ''}"
    room = max(1, width - _NAME - 2 * _COLUMN - 4)

    def trend(what: str) -> str:
        return spark(view.trends.of(f"{key}:{what}"), room, 1.0)

    requests = f"of {count(since.requests)} requests" if since else "since start"
    return [
        line(
            Span(f" {cell('HIT RATE of prompt tokens', _NAME)}", "title"),
            Span(f"{'last 60 s':>{_COLUMN}}{'since start':>{_COLUMN}}  {requests if since else ''}", "dim"),
        ),
        _row("expected by the router", _of(found, "predicted_hit_ratio"), since.predicted_ratio if since else None,
             trend("predicted")),
        _row("reported by engines", _of(found, "reported_hit_ratio"), since.reported_ratio if since else None,
             trend("reported")),
        _row("own questions asked twice", None, since.probe_ratio if since else None),
        _row("possible: held by any", None, since.bound_present_ratio if since else None),
        _row("possible: seen before", _of(found, "possible_hit_ratio"), since.bound_unlimited_ratio if since else None),
    ]  # fmt: skip


def _losses(view: View, since: HitFigures | None) -> list[Line]:
    found = view.deployment
    return [
        line(Span(" LOST", "title")),
        _row("cold: never seen", _of(found, "lost_cold_ratio"), since.lost_cold_ratio if since else None),
        _row("eviction: held by none", _of(found, "lost_eviction_ratio"), since.lost_eviction_ratio if since else None),
        _row("routing: held elsewhere", _of(found, "lost_routing_ratio"), since.lost_routing_ratio if since else None),
    ]  # fmt: skip


def _of(found: DeploymentFigures | None, what: str) -> float | None:
    value: float | None = getattr(found, what) if found else None
    return value


def _index(view: View) -> list[Line]:
    found = view.deployment.caches if view.deployment else None
    if found is None:
        return [line(Span(" INDEX", "title"), f"  {MISSING}")]
    findings = view.deployment.findings if view.deployment else ()
    others = {
        "in doubt": found.num_doubtful,
        "being read": found.num_reading,
        "told by nobody": found.num_untold,
    }
    less = "".join(f", {number} {what}" for what, number in others.items() if number)
    drawn = [
        line(
            Span(" INDEX", "title"),
            f"  {count(found.num_blocks)} blocks   caches known {found.num_known}/{found.num_engines}",
            Span(less, "warn"),
        )
    ]
    if (lag := _lag(view)) is not None:
        drawn.append(lag)
    drawn += [
        line(
            Span(" ! ", "bad"),
            f"{cell(engine or 'the router', 24).strip()}: {clean(cause, 40)}  (dynctl explain hits)",
        )
        for engine, cause in findings[:3]
    ]
    return drawn


def _lag(view: View) -> Line | None:
    """How late a cache's changes are told, of the host where that is worst; None where no relay tells."""
    hosts = view.overview.hosts if view.overview else ()
    found = [(host.kv_lag, host.name) for host in hosts if host.kv_lag is not None]
    if not found:
        return None
    lag, name = max(found, key=lambda one: one[0].p99_s)
    return line(
        f"  events leave hosts p50 {milliseconds(lag.p50_s)} p99 {milliseconds(lag.p99_s)} ms old"
        f" (worst: {clean(name, 24)})"
    )


def _moved(view: View, since: HitFigures | None) -> list[Line]:
    """What went from prefill to decode engines, by class of link."""
    now = {found.link: found for found in (view.deployment.moved if view.deployment else ())}
    sums = since.moved if since else {}
    shown = [link for link, (tokens, _) in sums.items() if tokens] or list(now)
    if not shown:
        return [
            line(Span(" KV MOVED", "title"), Span("  nothing", "dim") if since else f"  {MISSING}")
        ]
    drawn = []
    for link in shown:
        rate = now.get(link)
        tokens, size = sums.get(link, (None, None))
        total = (
            MISSING
            if tokens is None
            else f"{count(tokens)} tok"
            if size is None
            else format_bytes(size)
        )
        now_s = (
            "0 tok"
            if rate is None
            else f"{count(rate.tokens_s)} tok"
            if rate.bytes_s is None
            else format_bytes(rate.bytes_s)
        )
        drawn.append(line(f" {link:<9}{now_s + '/s':>14}   {total} since start"))
    return [line(Span(" KV MOVED", "title"), Span("  by class of link", "dim")), *drawn]


def _matrix(view: View, width: int, height: int) -> list[Line]:
    """Count the last requests by the engine that prefilled and the one that generates; what is out of sight is said to be."""
    traces = view.requests()
    seen = f", last {len(traces)} requests seen" if traces else ""
    title = line(Span(" ROUTES", "title"), Span(f"  prefill ↓ × generates →{seen}", "dim"))
    counts = routes(traces)
    sources = sorted({source for source, _ in counts})
    targets = sorted({target for _, target in counts})
    if not counts:
        return [title, line(Span("  none yet", "dim"))]
    name_width = max(len(name) for name in sources)
    name_width = min(name_width, 20)
    cell_width = max(4, min(max(len(_short(name)) for name in targets), 10))
    fits = max(1, (width - name_width - 3) // (cell_width + 1))
    head = "".join(f" {cell(_short(name), cell_width, is_right=True)}" for name in targets[:fits])
    more = f" … {len(targets) - fits} more" if len(targets) > fits else ""
    drawn = [title, line(Span(f" {' ' * name_width} {head}{more}", "dim"))]
    for source in sources:
        numbers = _numbers(
            [counts.get((source, target), 0) for target in targets[:fits]], cell_width
        )
        drawn.append(line(f" {cell(source, name_width)} {numbers}"))
    if len(drawn) > height > 2:
        drawn[height - 1 :] = [line(Span(f" … {len(drawn) - height + 1} more", "dim"))]
    return drawn


def _numbers(found: Sequence[int], width: int) -> str:
    return "".join(f" {number or '·':>{width}}" for number in found)


def _short(name: str) -> str:
    """An engine's name without its deployment: `decode-1`."""
    parts = name.split("-")
    return "-".join(parts[-2:])


def _asks(view: View) -> Asks:
    return Asks(num_decisions=decisions_to_ask(view), hits=True)


SCREEN = Screen("kv", rows, asks=_asks)
