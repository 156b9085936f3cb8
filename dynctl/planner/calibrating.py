"""Fit four factors of the roofline to benchmark results of one engine on one kind of GPU.

End-to-end figures cannot tell many constants apart, so constants move together: memory, arithmetic, floors, host.
Each result pulls with its TTFT and its time per token; without results that say otherwise a factor stays at 1.
Not here: reading results (`cli.calibrate`), the shipped fit (`benchmarks`).
Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.errors import PlanError
from dynctl.planner.calibration import NAMES, TOGETHER, Calibration, Constants, bounded
from dynctl.planner.closed_loop import Loop, run_loop
from dynctl.planner.fitting import Unknown, fit
from dynctl.planner.peaks import GpuSpec
from dynctl.planner.roofline import group_link, load_of

PULL = 0.15
"""Of a factor towards 1, against residuals of a result: one clear result may move it by half."""
GROUPS = ("memory", "arithmetic", "floors", "host")
"""What a few end-to-end results can tell apart, each a group of constants that move together."""
TTFT_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark result of one engine."""

    origin: str
    isl_tokens: float
    osl_tokens: float
    users: float
    """Requests in flight, on the mean."""
    ttft_s: float
    tpot_s: float
    cached_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Factors on the constants in use, and how far results were off before and after, as medians of |error|."""

    factors: Mapping[str, float]
    by_group: Mapping[str, float]
    tpot_before: float
    tpot_after: float
    ttft_before: float
    ttft_after: float


def calibrate(
    runs: Sequence[Run],
    model: Model,
    spec: GpuSpec,
    parallelism: Parallelism,
    engine: str,
    known: Calibration,
) -> Found:
    """Fit the factors; the constants in use are the prior.

    Raises:
        PlanError: when there is no result to fit.
    """
    if not runs:
        raise PlanError("no result to calibrate from", "run dynctl bench with 1 and with 64 users")
    start = known.constants(engine, spec, model)
    load = load_of(model, spec, parallelism, group_link(spec, spec.num_nvlinks, None))

    def errors(x: Sequence[float], rows: Sequence[int]) -> list[tuple[float, ...]]:
        c = moved(start, dict(zip(GROUPS, map(math.exp, x), strict=True)))
        found: list[tuple[float, ...]] = []
        for i in rows:
            run = runs[i]
            loop = Loop(
                run.isl_tokens, run.osl_tokens, run.users, run.isl_tokens * run.cached_ratio
            )
            got = run_loop(load, c, loop)
            found.append(
                (TTFT_WEIGHT * math.log(got.ttft_s / run.ttft_s), math.log(got.tpot_s / run.tpot_s))
            )
        return found

    every = range(len(runs))
    unknowns = [Unknown(0.0, PULL, every, -1.6, 1.6) for _ in GROUPS]
    x = fit(errors, unknowns, len(runs), rounds=30)
    before, after = errors([0.0] * len(GROUPS), every), errors(x, every)
    by_group = dict(zip(GROUPS, map(math.exp, x), strict=True))
    end = moved(start, by_group)
    return Found(
        {n: getattr(end, n) / getattr(start, n) for group in GROUPS for n in TOGETHER[group]},
        by_group,
        _median(row[1] for row in before),
        _median(row[1] for row in after),
        _median(row[0] / TTFT_WEIGHT for row in before),
        _median(row[0] / TTFT_WEIGHT for row in after),
    )


def moved(start: Constants, by_group: Mapping[str, float]) -> Constants:
    """The constants with each group multiplied by its factor."""
    values = {name: getattr(start, name) for name in NAMES}
    for group, factor in by_group.items():
        for name in TOGETHER[group]:
            values[name] *= factor
    return bounded(values)


def _median(logs: Iterable[float]) -> float:
    values = sorted(abs(math.exp(v) - 1) for v in logs)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def joined(known: Calibration, key: str, found: Found, origin: str) -> Calibration:
    """The calibration with these factors put over what is known for `engine/gpu`."""
    before = known.factors.get(key, {})
    factors = {name: factor * before.get(name, 1.0) for name, factor in found.factors.items()}
    return replace(
        known,
        factors={**known.factors, key: factors},
        origins={**known.origins, key: origin},
    )
