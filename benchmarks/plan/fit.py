"""Fit the roofline's constants to measured points. Plain Python; prints nothing, returns a Calibration."""

import math
from collections.abc import Sequence

from points import Point

from dynctl.planner.calibration import (
    NAMES,
    TOGETHER,
    Calibration,
    Constants,
    bounded,
    fingerprint,
    levels,
)
from dynctl.planner.closed_loop import run_loop
from dynctl.planner.fitting import Unknown, fit

PLAIN = Constants()
FITTED = [n for n in NAMES if n not in {"overlap", "eta_link"}]
LOCAL = [n for n in FITTED if n != "eta_kv"]
"""What engines and generations may add: all but the reading of KV, which floors hide on most points."""
MODEL = ("memory", "arithmetic", "floors", "host", "queue", "burst", "mixing")
"""What one model may add on one engine and generation."""
FORMAT = ("weights", "floors")
"""What one format of its weights may add: other kernels, and nothing of attention and servers."""
SERVING = {"host_ms", "queue", "burst"}
SERVING_PULL = 0.3
"""What servers add has no physics to hold to: above single models, data may move it more freely."""


def groups_of(p: Point) -> tuple[str, ...]:
    query = p.query
    return ("", *levels(p.engine, query.spec.generation, query.model))


def calibrate(
    points: Sequence[Point],
    *,
    ttft_weight=0.35,
    base_pull=3.0,
    engine_pull=1.0,
    local_pull=1.0,
    model_pull=0.2,
    format_pull=0.4,
    rounds=12,
    origin="",
    date="",
    local=LOCAL,
) -> Calibration:
    # Where users wait for the cache, its size matters most, and points do not say what it was.
    points = [p for p in points if p.loop.concurrency <= p.loop.max_sequences]
    keys = [groups_of(p) for p in points]
    level = {g: depth for key in keys for depth, g in enumerate(key)}
    # Formats first, the base last: the normal equations then stay sparse while they are solved.
    groups = sorted(level, key=lambda g: (-level[g], g))
    constants_of = (FITTED, local, local, MODEL, FORMAT)
    names = [(g, n) for g in groups for n in constants_of[level[g]]]
    rows_of = {g: [i for i, key in enumerate(keys) if g in key] for g in groups}
    pulls = (base_pull, engine_pull, local_pull, model_pull, format_pull)
    unknowns = [
        Unknown(
            0.0,
            pulls[level[g]] * (SERVING_PULL if n in SERVING and level[g] < 3 else 1.0),
            rows_of[g],
            -2.5,
            2.5,
        )
        for g, n in names
    ]
    where: dict = {}
    for i, (g, n) in enumerate(names):
        where.setdefault(g, []).append((i, n))
    logs = [(math.log(p.ttft_ms / 1e3), math.log(p.tpot_ms / 1e3)) for p in points]

    def residuals(x, rows):
        sets: dict = {}
        out = []
        for i in rows:
            key = keys[i]
            c = sets.get(key)
            if c is None:
                values = {n: getattr(PLAIN, n) for n in NAMES}
                for g in key:
                    for j, n in where[g]:
                        factor = math.exp(x[j])
                        for name in TOGETHER.get(n, (n,)):
                            values[name] *= factor
                c = sets[key] = bounded(values)
            found = run_loop(points[i].load, c, points[i].loop)
            out.append(
                (
                    ttft_weight * (math.log(found.ttft_s) - logs[i][0]),
                    math.log(found.tpot_s) - logs[i][1],
                )
            )
        return out

    x = fit(residuals, unknowns, len(points), rounds)
    factors: dict = {}
    for (g, n), value in zip(names, x, strict=True):
        factors.setdefault(g, {})[n] = math.exp(value)
    base = {n: getattr(PLAIN, n) * f for n, f in factors.pop("").items()}
    return Calibration(
        origin, date, base, factors, {}, frozenset(fingerprint(p.query.model) for p in points)
    )
