"""When a deployment's latency goals are missed, and when they are met again: events. Pure.

Judged by what clients meet, p99 over the latency window, and only after it lasted: one slow request is none of these.
"""

from collections.abc import Iterator
from dataclasses import replace

from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.telemetry.events import BAD, NOTE, Event
from dynctl.telemetry.figures import STALE, DeploymentFigures, EngineFigures, Overview
from dynctl.telemetry.history import Latency
from dynctl.telemetry.lasting import Lasting

MISSED_S = 10.0
"""Above the goal for so long, it is missed, …"""
MET_S = 30.0
"""… and met again after so long at or below it."""
FEWEST_LATE = 2.0
"""Fewer requests (or tokens) beyond the goal are no sign of anything."""


class GoalWatch:
    """Fed with every overview; tells what changed."""

    __slots__ = ("_courses",)

    def __init__(self) -> None:
        self._courses: dict[tuple[str, str], Lasting] = {}

    def copy(self) -> "GoalWatch":
        """Return one that goes on by itself."""
        found = GoalWatch()
        found._courses = {name: replace(course) for name, course in self._courses.items()}
        return found

    def add(self, overview: Overview, now_s: float) -> Iterator[Event]:
        """Look at all goals of all deployments; without figures a goal stays what it was."""
        for deployment in overview.deployments:
            for name, found, goal_ms, within in (
                ("TTFT", deployment.ttft, deployment.slo.ttft_ms, deployment.ttft_within_ratio),
                ("ITL", deployment.itl, deployment.slo.itl_ms, deployment.itl_within_ratio),
            ):
                if found is None or goal_ms is None or within is None:
                    continue
                key = (deployment.name, name)
                course = self._courses.setdefault(key, Lasting(MISSED_S, MET_S))
                late = (1.0 - within) * found.num_observations
                is_over = found.p99_s > goal_ms / 1e3 and late >= FEWEST_LATE
                if course.turns(is_over, now_s):
                    text = (
                        _missed(name, found, goal_ms, within, _slowest(overview, deployment, name))
                        if course.is_on
                        else _met(name, found, goal_ms, course.lasted_s)
                    )
                    mark = BAD if course.is_on else NOTE
                    yield Event(overview.taken_unix_s, mark, clean(deployment.name, 40), text)


def _missed(name: str, found: Latency, goal_ms: float, within: float, slowest: str) -> str:
    p99, least = _ms(found.p99_s * 1e3), f"{within * 100:.0f}% within"
    return f"{name} p99 {p99} ms misses its SLO of {goal_ms:g} ms, {least}{slowest}"


def _met(name: str, found: Latency, goal_ms: float, lasted_s: float) -> str:
    p99, lasted = _ms(found.p99_s * 1e3), format_seconds(lasted_s)
    return f"{name} p99 {p99} ms meets its SLO of {goal_ms:g} ms again, after {lasted}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _slowest(overview: Overview, deployment: DeploymentFigures, name: str) -> str:
    """Name the engine whose own p99 is the highest: where to look first."""
    known = [
        (p99_s, engine.id)
        for engine in overview.engines
        if engine.deployment == deployment.name and engine.state != STALE
        for p99_s in [_p99(engine, name)]
        if p99_s is not None
    ]
    if len(known) < 2:
        return ""
    p99_s, engine_id = max(known)
    return f"; slowest {clean(engine_id, 40)} {_ms(p99_s * 1e3)} ms"


def _p99(engine: EngineFigures, name: str) -> float | None:
    # A decode engine's own TTFT begins after prefill, and a prefill engine makes one token: no figures of a request.
    if name == "TTFT":
        return engine.ttft.p99_s if engine.ttft and engine.role != "decode" else None
    return engine.itl.p99_s if engine.itl and engine.role != "prefill" else None
