"""The course of shown figures over the last hour, for sparklines and plots. Pure.

Rates are means over 10 s and percentiles are over a minute, so that a point every 10 s leaves nothing out of a long course.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynctl.telemetry.figures import DeploymentFigures, EngineFigures, Overview
from dynctl.telemetry.history import Latency

PERIOD_S = 1.0
COARSE_POINTS = 10
"""Of so many moments one is kept for long."""
_SAME_MOMENT_S = 0.5
_NEXT_MOMENT_S = 1.8
"""A snapshot that comes a little late is no gap."""


@dataclass(frozen=True, slots=True)
class Window:
    """How far back a plot goes."""

    name: str
    span_s: int
    step_s: int

    @property
    def num_points(self) -> int:
        """How many moments that is."""
        return self.span_s // self.step_s


WINDOWS = (
    Window("1m", 60, 1),
    Window("5m", 300, 1),
    Window("15m", 900, COARSE_POINTS),
    Window("1h", 3600, COARSE_POINTS),
)

Ring = deque[float | None]


class Trends:
    """Rings of shown figures, one point a second and one in ten; None marks a moment without a figure."""

    __slots__ = ("_coarse", "_fine", "_num_moments", "_pushed_s")

    def __init__(self) -> None:
        self._fine: dict[str, Ring] = {}
        self._coarse: dict[str, Ring] = {}
        self._num_moments = 0
        self._pushed_s: float | None = None

    def push(self, values: Mapping[str, float | None], now_s: float) -> None:
        """Add the moment `now_s`: a figure per key. Keys that no longer occur are forgotten, moments left out are gaps."""
        steps = self._steps(now_s)
        before, self._num_moments = self._num_moments, self._num_moments + steps
        kept = self._num_moments // COARSE_POINTS - before // COARSE_POINTS
        self._fine = _pushed(self._fine, values, steps, _longest(1))
        self._coarse = _pushed(self._coarse, values, kept, _longest(COARSE_POINTS))
        if steps:
            self._pushed_s = now_s

    def _steps(self, now_s: float) -> int:
        if self._pushed_s is None:
            return 1
        passed_s = (now_s - self._pushed_s) / PERIOD_S
        if passed_s < _SAME_MOMENT_S:
            return 0
        return 1 if passed_s < _NEXT_MOMENT_S else round(passed_s)

    def copy(self) -> "Trends":
        """Return trends that stay as they are now, or go on by themselves."""
        held = Trends()
        held._num_moments, held._pushed_s = self._num_moments, self._pushed_s
        held._fine = {key: ring.copy() for key, ring in self._fine.items()}
        held._coarse = {key: ring.copy() for key, ring in self._coarse.items()}
        return held

    def of(self, key: str) -> tuple[float | None, ...]:
        """Return the last minutes of a key, a point a second, oldest first; empty when there is none."""
        return tuple(self._fine.get(key, ()))

    def course(self, key: str, window: Window) -> tuple[float | None, ...]:
        """Return exactly as many points as the window has, None where nothing is known yet."""
        rings = self._fine if window.step_s == 1 else self._coarse
        known = tuple(rings.get(key, ()))[-window.num_points :]
        return (None,) * (window.num_points - len(known)) + known


def _longest(step_s: int) -> int:
    return max(window.num_points for window in WINDOWS if window.step_s == step_s)


def _pushed(
    rings: Mapping[str, Ring], values: Mapping[str, float | None], steps: int, length: int
) -> dict[str, Ring]:
    pushed = {key: rings.get(key) or deque(maxlen=length) for key in values}
    for key, value in values.items():
        if steps:
            pushed[key].extend([*[None] * min(steps - 1, length), value])
    return pushed


def trend_values(overview: Overview) -> dict[str, float | None]:
    """Name the figures whose course is drawn: `engine:ID:itl_p99` and the like."""
    values: dict[str, float | None] = {}
    for engine in overview.engines:
        values |= _of_engine(engine)
    for pool in overview.pools:
        values |= _latencies(f"pool:{pool.deployment}:{pool.role}", pool.ttft, pool.itl)
    for deployment in overview.deployments:
        values |= _of_deployment(deployment)
    return values


def _of_engine(engine: EngineFigures) -> dict[str, float | None]:
    key = f"engine:{engine.id}"
    return _latencies(key, engine.ttft, engine.itl) | {
        f"{key}:tokens_s": engine.tokens_s,
        f"{key}:kv": engine.kv_usage_ratio,
        f"{key}:running": engine.running,
        f"{key}:waiting": engine.waiting,
    }


def _of_deployment(deployment: DeploymentFigures) -> dict[str, float | None]:
    key = f"deployment:{deployment.name}"
    predicted = deployment.predicted_hit_ratio
    return _latencies(key, deployment.ttft, deployment.itl) | {
        f"{key}:requests_s": deployment.requests_s,
        f"{key}:output_tokens_s": deployment.output_tokens_s,
        f"{key}:prompt_tokens_s": deployment.prompt_tokens_s,
        f"{key}:hit": deployment.reported_hit_ratio if predicted is None else predicted,
        f"{key}:predicted": predicted,
        f"{key}:reported": deployment.reported_hit_ratio,
    }


def _latencies(key: str, ttft: Latency | None, itl: Latency | None) -> dict[str, float | None]:
    return {
        f"{key}:ttft_p50": ttft.p50_s if ttft else None,
        f"{key}:ttft_p99": ttft.p99_s if ttft else None,
        f"{key}:itl_p50": itl.p50_s if itl else None,
        f"{key}:itl_p99": itl.p99_s if itl else None,
    }
