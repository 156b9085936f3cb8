"""What binds when no layout holds a model, or serves a deployment within its goals; and the nearest change that would.

Pure.
"""

import math
from collections.abc import Sequence

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.core.units import GIB, format_bytes, format_number
from dynctl.errors import PlanError
from dynctl.planner.calibration import Calibration
from dynctl.planner.estimate import LEAST_RPS
from dynctl.planner.layouts import Cell, Pricer, cells, pairs
from dynctl.planner.limits import declared
from dynctl.planner.memory import legal_tp
from dynctl.planner.options import (
    NEVER_BYTES,
    TP_SIZES,
    Misfit,
    Option,
    fitting_batch,
    lacks_nvlink,
)
from dynctl.planner.placement import GpuKind, natural

_MOST_IN_A_HOST = 8
_LARGEST_GIB = 288
"""No GPU of today has more memory."""


def refusal(
    pricer: Pricer,
    model: Model,
    rates: Sequence[tuple[Option, float]],
    options: Sequence[Option],
) -> PlanError:
    """Name what binds: the rate, or the goal that no size reaches at any rate.

    `rates` are of aggregated engines at their best step; prefill and decode engines are made of `options`.
    """
    wish = pricer.wish
    best: dict[object, float] = {}
    for option, rate in rates:
        best[option.kind] = max(best.get(option.kind, 0.0), rate * len(option.groups))
    together = sum(best.values())
    apart, num_apart, name = _most_apart(pricer, model, options)
    error = (
        _too_much(wish, rates, together, apart, num_apart, name)
        if max(together, apart) > 0
        else _out_of_reach(pricer, model, options)
    )
    return PlanError(error.message, f"{error.hint}{_about_wiring(options)}")


def _about_wiring(options: Sequence[Option]) -> str:
    """Hosts whose GPUs are slower together than they should be; empty where there are none."""
    hosts = {g.host.name for option in options for g in option.groups if lacks_nvlink(g)}
    where = ", ".join(sorted(hosts, key=natural))
    return (
        f"; {where}: no NVLink is seen between cards that have it: dynctl doctor" if hosts else ""
    )


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
        most, what = apart, name
        would_do = math.ceil(wanted / apart * num_apart)
    else:
        able = [(o, rate) for o, rate in rates if rate > 0]
        option, rate = max(able, key=lambda each: each[1] * len(each[0].groups))
        most = together
        would_do = math.ceil(wanted / rate - 1e-9) * option.size
        what = f"{len(option.groups)} × {option.name}"
        if together > rate * len(option.groups) * 1.001:
            what += " and the other kinds beside it"
    return PlanError(
        f"deployment {wish.name}: {wanted:g} req/s is more than the free GPUs serve within the goals: "
        f"at most {format_number(most)} req/s with {what}",
        f"about {would_do} such GPUs would do, or workload.rate_rps {_floor(most)}, or looser slo",
    )


def _floor(rate_rps: float) -> str:
    """A rate a little below the most, short to write."""
    digits = 1 - math.floor(math.log10(rate_rps)) if rate_rps > 0 else 0
    scale = 10.0**digits
    return f"{math.floor(rate_rps * scale) / scale:g}"


def _most_apart(pricer: Pricer, model: Model, options: Sequence[Option]) -> tuple[float, int, str]:
    """The highest rate that prefill and decode engines serve apart within the goals, their GPUs and their name."""
    found = (0.0, 0, "")
    for p, d in pairs(options, model):
        for cell in cells(pricer, p, d):
            for num_d in _shares(len(cell.decode)):
                num_p = _room_beside(cell, p, d, num_d)
                layout = pricer.apart(p, max(1, num_p), d, num_d, cell.speed.bytes_s)
                if num_p and pricer.meets(layout, max(LEAST_RPS, found[0] * 1.001)):
                    rate = pricer.max_rate_rps(layout)
                    name = f"prefill {num_p} × {p.name} + decode {num_d} × {d.name}"
                    found = rate, num_p * p.size + num_d * d.size, name
    return found


def _shares(count: int) -> list[int]:
    """Eighths of a number of engines, without those that are nothing."""
    return sorted({max(1, count * share // 8) for share in range(1, 8)}) if count else []


def _room_beside(cell: Cell, p: Option, d: Option, num_d: int) -> int:
    """The most prefill engines that have room beside so many decode engines."""
    low, high = 0, len(cell.prefill)
    while low < high:
        middle = (low + high + 1) // 2
        if cell.has(p, middle, d, num_d):
            low = middle
        else:
            high = middle - 1
    return low


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
            f"{format_number(ttft)} ms for {wish.workload.isl_tokens} prompt tokens",
            f"slo.ttft_ms {math.ceil(ttft * 1.01)} would do, or shorter prompts, or faster GPUs",
        )
    if slo.itl_ms is not None and itl > slo.itl_ms:
        return PlanError(
            f"deployment {wish.name}: slo.itl_ms {slo.itl_ms:g} is infeasible: the best reachable ITL is {format_number(itl)} ms",
            f"slo.itl_ms {math.ceil(itl * 1.01)} would do, or GPUs with more memory bandwidth",
        )
    return PlanError(
        f"deployment {wish.name}: no layout reaches slo.ttft_ms {slo.ttft_ms or 0:g} and slo.itl_ms "
        f"{slo.itl_ms or 0:g} at once; each alone can be had ({format_number(ttft)} ms and {format_number(itl)} ms at best)",
        "loosen one of them, or shorten prompts",
    )


def refuse_fit(
    wish: DeploymentWish,
    model: Model,
    misfits: Sequence[Misfit],
    calibration: Calibration,
    spanning: str = "",
) -> PlanError:
    """The error for a model that fits nowhere: the smallest shortfall and the nearest change.

    `spanning` names a layout over several hosts that would hold it.
    """
    nearest = min(misfits, key=lambda m: m.missing_bytes)
    if nearest.missing_bytes >= NEVER_BYTES:
        return PlanError(
            f"deployment {wish.name}: {model.name} runs on none of these GPUs: {nearest.text}",
            "use a checkpoint in 16 bit or int4, or newer GPUs",
        )
    change = _would_hold(wish, model, calibration)
    if spanning:
        change += f"; {spanning}"
    if any(each.missing_bytes <= each.saved_bytes for each in misfits):
        change += ", so would fp8 weights"
    held = max(each.held_tokens for each in misfits)
    if held:
        is_declared = declared(wish, "max_model_len_tokens") is not None
        key = "limits.max_model_len_tokens" if is_declared else "requests"
        change += f"; or {key} of at most {held} tokens"
    return PlanError(
        f"deployment {wish.name}: {model.name} ({format_bytes(model.weight_bytes)} of weights) fits no layout; "
        f"nearest: {nearest.text}",
        change,
    )


def _would_hold(wish: DeploymentWish, model: Model, calibration: Calibration) -> str:
    """GPUs of one host that would hold a model: few of the usual 80 GiB, else as large ones as it takes."""
    sizes = [tp for tp in TP_SIZES if tp <= _MOST_IN_A_HOST and legal_tp(model, tp)]
    usual = GpuKind("", 80 * GIB)
    for tp in sizes:
        if fitting_batch(wish, model, usual, Parallelism(tp), calibration) is not None:
            return f"{_gpus(tp)} of 80 GiB in one host would do"
    for gib in range(88, _LARGEST_GIB + 1, 8) if sizes else ():
        larger = GpuKind("", gib * GIB)
        if fitting_batch(wish, model, larger, Parallelism(sizes[-1]), calibration) is not None:
            return f"{_gpus(sizes[-1])} of {gib} GiB in one host would do"
    return "it needs several hosts per engine"


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"
