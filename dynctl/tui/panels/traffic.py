"""What clients meet: request and token rates, errors, queue, TTFT, ITL of one deployment; then its KV: hits and losses. Pure."""

from dynctl.core.units import format_bytes
from dynctl.telemetry.figures import DeploymentFigures, MovedFigures
from dynctl.telemetry.history import Latency
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    count,
    joined,
    judged,
    line,
    milliseconds,
    percent,
    seconds,
    spark,
    whole,
    width_of,
)
from dynctl.tui.view import View

WIDE = 120
QUANTILE = 0.99
"""What goals are about."""


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw three lines."""
    deployment = view.deployment
    name = deployment.name if deployment else ""
    points = 6 if width < WIDE else 16

    def trend(what: str, top: float | None = None) -> str:
        return spark(view.trends.of(f"deployment:{name}:{what}"), points, top)

    def figure(what: str) -> float | None:
        return getattr(deployment, what) if deployment else None

    errors = figure("error_ratio")
    failing = Span(f"err {_errors(errors)}", "bad" if errors else "")
    parts = [
        line(" req/s ", Span(count(figure("requests_s")), "title"), " ", trend("requests_s")),
        line(
            "out ",
            Span(count(figure("output_tokens_s")), "title"),
            " tok/s ",
            trend("output_tokens_s"),
        ),
        line(failing),
        line(f"queue {whole(figure('queued'))}"),
        line(f"in flight {whole(figure('inflight'))}"),
    ]
    if width >= WIDE:
        parts.insert(
            1, line("in ", count(figure("prompt_tokens_s")), " tok/s ", trend("prompt_tokens_s"))
        )
    second = _latencies(view, trend("ttft_p99"), trend("itl_p99"))
    if width_of(joined(second)) > width:
        second = _latencies(view, "", "")
    third = _cache_parts(deployment, trend("hit", 1.0) if width >= WIDE else "")
    return [
        joined(parts, "  " if width < WIDE else "    "),
        joined(second),
        _as_fits(third, width),
    ][:height]


def _cache_parts(deployment: DeploymentFigures | None, trend: str) -> list[Line]:
    """What is said of KV, what matters most first."""
    if deployment is None:
        return [line(f" KV hit {MISSING}")]
    predicted, reported = deployment.predicted_hit_ratio, deployment.reported_hit_ratio
    # A figure that is missing is trouble where the other one is there.
    is_odd = reported is None and predicted is not None
    parts = [
        line(
            " KV hit ",
            Span(percent(predicted, ""), "title"),
            "/",
            Span(percent(reported), "bad" if is_odd else ""),
            f" of {percent(deployment.possible_hit_ratio)}",
            f" {trend}" if trend else "",
        )
    ]
    caches = deployment.caches
    if caches is not None and caches.num_known < caches.num_engines:
        text = f"caches {caches.num_known}/{caches.num_engines}, {count(caches.num_blocks)} blocks"
        parts.append(line(Span(text, "warn")))
    if deployment.lost_cold_ratio is not None:
        parts.append(
            line(
                f"lost cold {percent(deployment.lost_cold_ratio)} evict {percent(deployment.lost_eviction_ratio)} "
                f"route {percent(deployment.lost_routing_ratio)}"
            )
        )
    parts += [line(_moved(found)) for found in deployment.moved]
    return parts


def _moved(found: MovedFigures) -> str:
    if found.bytes_s is None:
        return f"{found.link} {count(found.tokens_s)} tok/s"
    return f"{found.link} {format_bytes(found.bytes_s)}/s"


def _as_fits(parts: list[Line], width: int) -> Line:
    """Join as many parts as there is room for."""
    while len(parts) > 1 and width_of(joined(parts)) > width:
        parts = parts[:-1]
    return joined(parts)


def _errors(ratio: float | None) -> str:
    return percent(ratio) if ratio is None or ratio >= 0.1 or ratio == 0 else f"{ratio * 100:.1f}%"


def _latencies(view: View, ttft_trend: str, itl_trend: str) -> list[Line]:
    found, slo = view.deployment, view.slo
    if found is None:
        return [_latency(" TTFT", None, None, None, ""), _latency("ITL", None, None, None, "")]
    return [
        _latency(" TTFT", found.ttft, slo.ttft_ms, found.ttft_within_ratio, ttft_trend),
        _latency("ITL", found.itl, slo.itl_ms, found.itl_within_ratio, itl_trend),
    ]


def _latency(
    title: str, found: Latency | None, goal_ms: float | None, within: float | None, trend: str
) -> Line:
    """Percentiles, the goal beside what is judged by it, and the share within it."""
    p50, p99 = (found.p50_s, found.p99_s) if found else (None, None)
    is_missed = within is not None and within < QUANTILE
    return line(
        f"{title} p50 ",
        Span(milliseconds(p50), "title"),
        " p99 ",
        judged(milliseconds(p99), p99, seconds(goal_ms)),
        "" if goal_ms is None else Span(f"/{goal_ms:g}", "dim"),
        "  " if p99 is None else "ms",
        "" if within is None else Span(f" {_share(within)} in", "bad" if is_missed else ""),
        f" {trend}" if trend else "",
    )


def _share(ratio: float) -> str:
    """Write a share so that what is not all of it is never called all of it."""
    if ratio < 0.9:
        return percent(ratio)
    return "100%" if ratio >= 1.0 else f"{int(ratio * 1000) / 10:g}%"
