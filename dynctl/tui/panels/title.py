"""The top line: cluster, deployment, how fresh everything is, goals, time of day. Pure."""

from datetime import datetime

from dynctl.core.text import clean
from dynctl.telemetry.figures import STALE_S
from dynctl.telemetry.recording import Playing
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
    if view.recording:
        parts.append(line(Span(view.recording, "warn")))
    goals = _goals(view)
    # Local time without a zone is what the operator's other clocks show.
    wall = datetime.fromtimestamp(overview.taken_unix_s)  # noqa: DTZ006
    now = wall.strftime("%H:%M:%S" if view.playing is None else "%b %d %H:%M:%S")
    left, right = joined([*parts, *goals]), line(now, "    ", "? help")
    if width_of(left) + width_of(right) + 1 > width:
        right = line(now)
    if width_of(left) + width_of(right) + 1 > width:
        left = joined(parts)
    room = width - width_of(right)
    return [(*fit(left, room), *right)][:height]


def _freshness(view: View) -> Line:
    overview = view.overview
    assert overview is not None
    lost = sum(host.age_s > STALE_S or bool(host.error) for host in overview.hosts)
    if view.playing is not None:
        told = f"  ◐ {lost} lost" if lost else ""
        return (*_place(view.playing), Span(told, "bad"))
    if view.choices.is_paused:
        return line(Span("‖ paused", "warn"))
    if overview.age_s is None:
        oldest_s = min((host.age_s for host in overview.hosts), default=0.0)
        return line(Span(f"○ no host answers, data {oldest_s:.0f}s old", "bad"))
    if lost:
        return line(Span(f"◐ {lost} of {len(overview.hosts)} hosts lost", "bad"))
    return line(Span("●", "good"), f" live {overview.age_s:.0f}s")


def _place(playing: Playing) -> Line:
    """Where in a recording this is, and how fast it goes."""
    if playing.is_seeking:
        how = "… going to"
    elif playing.is_playing:
        how = f"▶ ×{playing.speed:g}"
    else:
        how = "■ end" if playing.at_s >= playing.until_s else "‖ held"
    return line(Span(how, "warn"), f" {clock(playing.at_s)}/{clock(playing.until_s)}")


def clock(seconds: float) -> str:
    """Write how far into a recording: `0:12:31`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _goals(view: View) -> list[Line]:
    """What stands beside the figures as well, and is left out first."""
    slo = view.slo
    if slo.ttft_ms is None and slo.itl_ms is None:
        return []
    ttft = f" ttft<{slo.ttft_ms:g}" if slo.ttft_ms is not None else ""
    itl = f" itl<{slo.itl_ms:g}" if slo.itl_ms is not None else ""
    return [line(f"SLO{ttft}{itl}")]
