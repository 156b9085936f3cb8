"""What to expect of a layout that is placed: the estimate, and whether the goals hold.

Not here: choosing a layout (`choosing`), formulas (`estimate`).
Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Estimate, Figure, Pool, Role
from dynctl.core.units import format_number, format_seconds
from dynctl.core.workload import Slo, Workload
from dynctl.planner.calibration import Calibration
from dynctl.planner.engines import sim_options
from dynctl.planner.estimate import (
    ETA_TRANSFER,
    DeclaredPace,
    Layout,
    Side,
    by_rank,
    estimate,
    max_rate_rps,
    meets,
    rounded,
    serve,
)
from dynctl.planner.memory import MAX_BATCHED_TOKENS
from dynctl.planner.options import max_sequences, pace_on
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import Group, kind_of
from dynctl.planner.transfer import Fabric, rank_bytes_s


def declared_pace(args: Sequence[tuple[str, str]]) -> tuple[DeclaredPace, float]:
    """How fast a simulated engine pretends to be, by its flags, and bytes per second of a pull.

    Raises:
        PlanError: when a flag is no number.
    """
    options = sim_options(args)
    pace = DeclaredPace(
        prefill_base_s=options.prefill_base_ms / 1e3,
        prefill_s_per_token=options.prefill_us_per_token / 1e6,
        step_s=options.decode_ms / 1e3,
        step_s_per_sequence=options.decode_us_per_seq / 1e6,
        kv_bytes_per_token=options.kv_bytes_per_token,
    )
    return pace, options.kv_transfer_mbytes_s * 1e6


def price(
    wish: DeploymentWish,
    model: Model | None,
    pools: Sequence[Pool],
    groups: Mapping[Role, Sequence[Group]],
    fabric: Fabric,
    calibration: Calibration,
) -> tuple[Estimate | None, list[str]]:
    """Estimate a placed deployment; None with the reason when nothing can be said."""
    if wish.engine.kind == "sim":
        return _price_simulated(wish, pools)
    if not groups or model is None:
        return None, [_why_not(wish, model)]
    if any(pool.nodes > 1 for pool in pools):
        return None, [
            "not estimated: engines over several hosts are as fast as the network between them"
        ]
    classes = []
    for role, taken in groups.items():
        for pool, mine in _by_pool(role, pools, taken):
            pace = pace_on(model, kind_of(mine[0].gpus[0]), pool.parallelism, mine, calibration)
            if pace is None:
                return None, [f"not estimated: no figures for {mine[0].gpus[0].name}"]
            bound = max_sequences(wish, pool.memory, pool.parallelism.dp)
            tokens = float(pool.memory.kv_capacity_tokens) if pool.memory else math.inf
            step = (
                int(pool.max_num_batched_tokens.value)
                if pool.max_num_batched_tokens
                else MAX_BATCHED_TOKENS
            )
            side = Side(pace, len(mine), bound, tokens, step)
            classes.append(_Class(role, by_rank(side, pool.parallelism.dp)))
    everyone = [group for taken in groups.values() for group in taken]
    names = sorted({spec.name for g in everyone if (spec := find_spec(g.gpus[0].name))})
    source = f"modelled: roofline on {', '.join(names)}, not calibrated"
    if Role.PREFILL not in groups:
        return _judged(wish, [Layout(c.side) for c in classes], source)
    speed = fabric.worst(groups[Role.PREFILL], groups.get(Role.DECODE, ()))
    layout = Layout(
        _slowest(wish, [c.side for c in classes if c.role is Role.PREFILL]),
        _slowest(wish, [c.side for c in classes if c.role is Role.DECODE]),
        rank_bytes_s(speed, pools),
    )
    return _judged(wish, [layout], source)


@dataclass(frozen=True, slots=True)
class _Class:
    """Engines that are alike."""

    role: Role
    side: Side


def _by_pool(
    role: Role, pools: Sequence[Pool], groups: Sequence[Group]
) -> list[tuple[Pool, list[Group]]]:
    """A role's groups by the pool and GPU kind they belong to; they come in the pools' order."""
    found: list[tuple[Pool, list[Group]]] = []
    at = 0
    for pool in pools:
        if pool.role is not role:
            continue
        mine = groups[at : at + len(pool.replicas)]
        at += len(pool.replicas)
        found += [
            (pool, [g for g in mine if kind_of(g.gpus[0]) == kind])
            for kind in sorted({kind_of(g.gpus[0]) for g in mine})
        ]
    return found


def _slowest(wish: DeploymentWish, sides: Sequence[Side]) -> Side:
    """Unlike engines of one role, all taken to be as slow as the slowest."""
    work = wish.workload
    pace = max(
        (side.engine for side in sides),
        key=lambda p: (
            p.prefill_s(work.isl_tokens) + work.osl_tokens * p.decode_s(8, work.isl_tokens)
        ),
    )
    return Side(
        pace,
        sum(s.replicas for s in sides),
        min(s.max_sequences for s in sides),
        min(s.kv_capacity_tokens for s in sides),
        min(s.max_num_batched_tokens for s in sides),
    )


def _price_simulated(
    wish: DeploymentWish, pools: Sequence[Pool]
) -> tuple[Estimate | None, list[str]]:
    pace, pull_bytes_s = declared_pace(wish.engine.args)
    bound = max_sequences(wish, None, 1)

    def side(role: Role) -> Side:
        mine = [pool for pool in pools if pool.role is role]
        step = min(
            int(p.max_num_batched_tokens.value) if p.max_num_batched_tokens else MAX_BATCHED_TOKENS
            for p in mine
        )
        # Its ranks know nothing of each other.
        num = sum(len(pool.replicas) * pool.parallelism.dp for pool in mine)
        return Side(pace, num, bound, max_num_batched_tokens=step)

    if any(pool.role is Role.PREFILL for pool in pools):
        # What it declares it has in full, unlike a network.
        layout = Layout(side(Role.PREFILL), side(Role.DECODE), pull_bytes_s / ETA_TRANSFER)
    else:
        layout = Layout(side(Role.AGGREGATED))
    return _judged(wish, [layout], "declared: the simulated engine's flags")


def _why_not(wish: DeploymentWish, model: Model | None) -> str:
    if wish.engine.kind == "external":
        return "not estimated: the servers are not ours"
    if model is None:
        return f"not estimated and not checked against memory: the shape of {wish.model} is unknown"
    return "not estimated: no figures for CPUs; measure with dynctl bench run"


def _judged(
    wish: DeploymentWish, layouts: Sequence[Layout], source: str
) -> tuple[Estimate | None, list[str]]:
    """The estimate with a sentence on each goal; none for a layout that the rate overloads.

    Several layouts share the rate by what each bears, as a router does that learns their speed.
    """
    work, slo = wish.workload, wish.slo
    # An engine that keeps the goals up to some rate takes its share of the wished one by it.
    bears = [max_rate_rps(layout, work, slo) for layout in layouts]
    if not any(bears):
        bears = [max_rate_rps(layout, work, Slo()) for layout in layouts]
    total = sum(bears)
    works = [
        replace(work, rate_rps=work.rate_rps * (most / total if total else 1 / len(layouts)))
        for most in bears
    ]
    served = [serve(layout, w, w.rate_rps) for layout, w in zip(layouts, works, strict=True)]
    unstable = next((s for s in served if not s.is_stable), None)
    if unstable is not None:
        what = {
            "prefill": "prompts queue without end",
            "transfer": "KV transfers queue without end",
        }
        why = what.get(unstable.limit, "sequences do not fit the KV cache")
        most = sum(max_rate_rps(layout, work, Slo()) for layout in layouts)
        return None, [
            f"overloaded at {work.rate_rps:g} req/s: {why}; it bears {format_number(most)} req/s"
        ]
    reasons = []
    for key, goal, reached in (
        ("ttft_ms", slo.ttft_ms, max(s.ttft_p99_s for s in served) * 1e3),
        ("itl_ms", slo.itl_ms, max(s.itl_p99_s for s in served) * 1e3),
    ):
        if goal is not None:
            verb = "holds" if reached <= goal else "is missed"
            reasons.append(
                f"slo.{key} {goal:g} {verb} at {work.rate_rps:g} req/s: p99 of {format_seconds(reached / 1e3)} expected"
            )
    figures = [estimate(layout, w, source) for layout, w in zip(layouts, works, strict=True)]
    within = (
        sum(max_rate_rps(layout, work, slo) for layout in layouts)
        if all(meets(s, slo) for s in served)
        else min(work.rate_rps, sum(max_rate_rps(layout, work, slo) for layout in layouts))
    )
    reasons.append(f"bears {format_number(within)} req/s within the goals")
    return _with_goodput(_together(figures, works), work.rate_rps, within), reasons


def _together(figures: Sequence[Estimate], works: Sequence[Workload]) -> Estimate:
    """One estimate of several kinds of engines: latencies by their share of requests, throughput summed."""
    if len(figures) == 1:
        return figures[0]
    total = sum(work.rate_rps for work in works)
    shares = [work.rate_rps / total for work in works]

    def mean(values: Sequence[Figure]) -> Figure:
        parts = [
            rounded(sum(share * getattr(f, name) for share, f in zip(shares, values, strict=True)))
            for name in ("low", "expected", "high")
        ]
        return Figure(parts[0], parts[1], parts[2], values[0].source)

    sums = [
        rounded(sum(getattr(f.out_tokens_s, name) for f in figures))
        for name in ("low", "expected", "high")
    ]
    return replace(
        figures[0],
        ttft_ms=mean([f.ttft_ms for f in figures]),
        itl_ms=mean([f.itl_ms for f in figures]),
        out_tokens_s=Figure(sums[0], sums[1], sums[2], figures[0].out_tokens_s.source),
    )


def _with_goodput(found: Estimate, wanted_rps: float, within_rps: float) -> Estimate:
    """Add the requests per second that are served within the goals, of those that are wished."""
    most = found.out_tokens_s
    low, high = (
        (most.low / most.expected, most.high / most.expected) if most.expected else (1.0, 1.0)
    )
    return replace(
        found,
        goodput_rps=Figure(
            rounded(min(wanted_rps, within_rps * low)),
            rounded(min(wanted_rps, within_rps)),
            rounded(min(wanted_rps, within_rps * high)),
            most.source,
        ),
    )
