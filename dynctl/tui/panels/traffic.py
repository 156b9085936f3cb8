"""What clients meet: request and token rates, errors, queue, TTFT, ITL and KV hit rate of one deployment. Pure."""

from dynctl.telemetry.history import Latency
from dynctl.tui.draw import (
    Line,
    Span,
    count,
    joined,
    judged,
    line,
    milliseconds,
    percent,
    spark,
    whole,
)
from dynctl.tui.view import View

WIDE = 120


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw two lines."""
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
    slo = view.overview.slo if view.overview else None
    second = [
        _latency(
            " TTFT",
            deployment.ttft if deployment else None,
            slo.ttft_ms if slo else None,
            trend("ttft_p99"),
        ),
        _latency(
            "ITL",
            deployment.itl if deployment else None,
            slo.itl_ms if slo else None,
            trend("itl_p99"),
        ),
        line(
            "KV hit ",
            Span(percent(figure("predicted_hit_ratio"), ""), "title"),
            f"/{percent(figure('reported_hit_ratio'))} ",
            trend("hit", 1.0) if width >= WIDE else "",
        ),
    ]
    return [joined(parts, "  " if width < WIDE else "    "), joined(second)][:height]


def _errors(ratio: float | None) -> str:
    return percent(ratio) if ratio is None or ratio >= 0.1 or ratio == 0 else f"{ratio * 100:.1f}%"


def _latency(title: str, found: Latency | None, limit_ms: float | None, trend: str) -> Line:
    p50, p99 = (found.p50_s, found.p99_s) if found else (None, None)
    limit_s = None if limit_ms is None else limit_ms / 1e3
    return line(
        f"{title} p50 ",
        Span(milliseconds(p50), "title"),
        " p99 ",
        judged(milliseconds(p99), p99, limit_s),
        "   " if p99 is None else "ms ",
        trend,
    )
