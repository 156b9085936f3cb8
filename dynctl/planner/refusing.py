"""What binds when no layout serves a deployment within its goals, and the nearest change that would.

Not here: models that fit nowhere (`options`).
Pure.
"""

import math
from collections.abc import Sequence

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.errors import PlanError
from dynctl.planner.estimate import LEAST_RPS
from dynctl.planner.layouts import Pricer, cells, pairs
from dynctl.planner.options import Option


def refusal(pricer: Pricer, model: Model, rates: Sequence[tuple[Option, float]]) -> PlanError:
    """Name what binds: the rate, or the goal that no size reaches at any rate."""
    wish = pricer.wish
    best: dict[object, float] = {}
    for option, rate in rates:
        best[option.kind] = max(best.get(option.kind, 0.0), rate * len(option.groups))
    together = sum(best.values())
    apart, num_apart, name = _most_apart(pricer, [o for o, _ in rates])
    if max(together, apart) > 0:
        return _too_much(wish, rates, together, apart, num_apart, name)
    return _out_of_reach(pricer, model, [o for o, _ in rates])


def _too_much(
    wish: DeploymentWish,
    rates: Sequence[tuple[Option, float]],
    together: float,
    apart: float,
    num_apart: int,
    name: str,
) -> PlanError:
    wanted = wish.workload.rate_rps
    if apart > together:
        most, gpus, what = apart, num_apart, f"{name}, prefill and decode apart"
    else:
        able = [(o, rate) for o, rate in rates if rate > 0]
        option, rate = max(able, key=lambda each: each[1] * len(each[0].groups))
        most, gpus = together, len(option.groups) * option.size
        what = f"{len(option.groups)} × {option.name}"
        if together > rate * len(option.groups) * 1.001:
            what += " and the other kinds beside it"
    return PlanError(
        f"deployment {wish.name}: {wanted:g} req/s is more than the free GPUs serve within the goals: "
        f"at most {most:.3g} req/s with {what}",
        f"about {math.ceil(wanted / most * gpus)} such GPUs would do, or workload.rate_rps {_floor(most)}, or looser slo",
    )


def _floor(rate_rps: float) -> str:
    """A rate a little below the most, short to write."""
    digits = 1 - math.floor(math.log10(rate_rps)) if rate_rps > 0 else 0
    scale = 10.0**digits
    return f"{math.floor(rate_rps * scale) / scale:g}"


def _most_apart(pricer: Pricer, options: Sequence[Option]) -> tuple[float, int, str]:
    """The highest rate a division of all groups of one option serves within the goals, its GPUs and its name."""
    found = (0.0, 0, "")
    for option in options:
        for cell in cells(pricer, option, option):
            count = min(len(cell.prefill), 64)
            shares = sorted({max(1, count * share // 8) for share in range(1, 8)})
            for num_p in shares:
                if num_p >= count or not cell.has(option, num_p, option, count - num_p):
                    continue
                layout = pricer.apart(option, num_p, option, count - num_p, cell.speed.bytes_s)
                rate = pricer.max_rate_rps(layout)
                if rate > found[0]:
                    found = rate, count * option.size, f"{count} × {option.name}"
    return found


def _out_of_reach(pricer: Pricer, model: Model, options: Sequence[Option]) -> PlanError:
    wish, slo = pricer.wish, pricer.wish.slo
    idle = [pricer.serve(pricer.alone(o, 1), LEAST_RPS) for o in options]
    idle += [
        pricer.serve(pricer.apart(p, 1, d, 1, cell.speed.bytes_s), LEAST_RPS)
        for p, d in pairs(options, model)
        for cell in cells(pricer, p, d)
        if cell.has(p, 1, d, 1)
    ]
    ttft = min(s.ttft_p99_s for s in idle) * 1e3
    itl = min(s.itl_p99_s for s in idle) * 1e3
    if slo.ttft_ms is not None and ttft > slo.ttft_ms:
        return PlanError(
            f"deployment {wish.name}: slo.ttft_ms {slo.ttft_ms:g} is infeasible: the best reachable TTFT is "
            f"{ttft:.3g} ms for {wish.workload.isl_tokens} prompt tokens",
            f"slo.ttft_ms {math.ceil(ttft * 1.01)} would do, or shorter prompts, or faster GPUs",
        )
    if slo.itl_ms is not None and itl > slo.itl_ms:
        return PlanError(
            f"deployment {wish.name}: slo.itl_ms {slo.itl_ms:g} is infeasible: the best reachable ITL is {itl:.3g} ms",
            f"slo.itl_ms {math.ceil(itl * 1.01)} would do, or GPUs with more memory bandwidth",
        )
    return PlanError(
        f"deployment {wish.name}: no layout reaches slo.ttft_ms {slo.ttft_ms or 0:g} and slo.itl_ms "
        f"{slo.itl_ms or 0:g} at once; each alone can be had ({ttft:.3g} ms and {itl:.3g} ms at best)",
        "loosen one of them, or shorten prompts",
    )
