"""The top line: cluster, deployment, how fresh everything is, goals, time of day. Pure."""

from datetime import datetime

from dynctl.core.text import clean
from dynctl.telemetry.figures import STALE_S
from dynctl.tui.draw import Line, Span, fit, joined, line, width_of
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw one line."""
    overview = view.overview
    if overview is None:
        return [line(Span("dynctl top", "title"), "  no data yet")][:height]
    deployment = view.deployment
    parts: list[Line] = [
        line(Span("dynctl top", "title")),
        line(clean(overview.cluster, 20)),
        _freshness(view),
    ]
    if deployment is not None:
        more = len(overview.deployments) - 1
        parts.insert(2, line(clean(deployment.name, 24) + (f" (+{more}, d)" if more else "")))
    goals = _goals(view)
    if goals:
        parts.append(line(goals))
    # Local time without a zone is what the operator's other clocks show.
    clock = datetime.fromtimestamp(overview.taken_unix_s).strftime("%H:%M:%S")  # noqa: DTZ006
    left, right = joined(parts), line(clock, "    ", "? help")
    if width_of(left) + width_of(right) + 1 > width:
        right = line(clock)
    room = width - width_of(right)
    return [(*fit(left, room), *right)][:height]


def _freshness(view: View) -> Line:
    overview = view.overview
    assert overview is not None
    if view.choices.is_paused:
        return line(Span("‖ paused", "warn"))
    lost = sum(host.age_s > STALE_S or bool(host.error) for host in overview.hosts)
    if overview.age_s is None:
        oldest_s = min((host.age_s for host in overview.hosts), default=0.0)
        return line(Span(f"○ no host answers, data {oldest_s:.0f}s old", "bad"))
    if lost:
        return line(Span(f"◐ {lost} of {len(overview.hosts)} hosts lost", "bad"))
    return line(Span("●", "good"), f" live {overview.age_s:.0f}s")


def _goals(view: View) -> str:
    slo = view.overview.slo if view.overview else None
    if slo is None or (slo.ttft_ms is None and slo.itl_ms is None):
        return ""
    ttft = f" ttft<{slo.ttft_ms:g}" if slo.ttft_ms is not None else ""
    itl = f" itl<{slo.itl_ms:g}" if slo.itl_ms is not None else ""
    return f"SLO{ttft}{itl}"
