"""What a layout is and what to expect of it: the verdict, the estimate, and whether the goals hold.

Not here: choosing a layout (`options`, `search`).
Pure.
"""

from collections.abc import Mapping, Sequence

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Estimate, MemorySheet, Pool, Role
from dynctl.core.units import format_seconds
from dynctl.core.workload import Slo
from dynctl.planner.estimate import DeclaredPace, Layout, Pace, Side, estimate, max_rate_rps, serve
from dynctl.planner.options import max_sequences, pace_on
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import Group, kind_of
from dynctl.planner.transfer import transfer_bytes_s
from dynctl.sim.scheduler import StepCosts

SIM_TRANSFER_BYTES_S = 1e9


def declared_pace(args: Mapping[str, str]) -> DeclaredPace | None:
    """How fast a simulated engine pretends to be, by its flags; None when a flag is no number."""
    try:
        costs = StepCosts(
            **{
                field: float(args[flag])
                for field in StepCosts.__slots__
                if (flag := field.replace("_", "-")) in args
            }
        )
    except ValueError:
        return None
    return DeclaredPace(
        prefill_base_s=costs.prefill_base_ms / 1e3,
        prefill_s_per_token=costs.prefill_us_per_token / 1e6,
        step_s=costs.decode_ms / 1e3,
        step_s_per_sequence=costs.decode_us_per_seq / 1e6,
    )


def judge(pools: Sequence[Pool]) -> str:
    """Name the kind of layout."""
    num = sum(len(pool.replicas) for pool in pools)
    prefill = sum(len(p.replicas) for p in pools if p.role is Role.PREFILL)
    if prefill:
        return (
            f"prefill/decode: {prefill} prefill and {num - prefill} decode, KV moves between them"
        )
    if num == 1:
        return "single engine: nothing to route between"
    return f"replicas with KV routing: {num} aggregated engines, each request to the one that holds its prefix"


def price(
    wish: DeploymentWish,
    model: Model | None,
    pools: Sequence[Pool],
    groups: Mapping[Role, Sequence[Group]],
) -> tuple[Estimate | None, list[str]]:
    """Estimate a placed deployment; None with the reason when nothing can be said."""
    engine = wish.engine
    if engine.kind == "sim":
        declared = declared_pace(dict(engine.args))
        if declared is None:
            return None, ["not estimated: a speed flag of the simulated engine is no number"]
        layout = _layout(
            wish, pools, dict.fromkeys((p.role for p in pools), declared), SIM_TRANSFER_BYTES_S
        )
        return _judged(wish, layout, "declared: the simulated engine's flags")
    if not groups or model is None:
        return None, [_why_not(wish, model)]
    if any(len({p.parallelism for p in pools if p.role is role}) > 1 for role in groups):
        return None, ["not estimated: pools of one role differ in size"]
    paces: dict[Role, Pace] = {}
    for role, taken in groups.items():
        pool = next(p for p in pools if p.role is role)
        slowest = min((kind_of(g.gpus[0]) for g in taken), key=lambda k: _speed(k.name))
        pace = pace_on(model, slowest, pool.parallelism, taken)
        if pace is None:
            return None, [f"not estimated: no figures for {slowest.name}"]
        paces[role] = pace
    everyone = [group for taken in groups.values() for group in taken]
    names = sorted({spec.name for g in everyone if (spec := find_spec(g.gpus[0].name))})
    layout = _layout(wish, pools, paces, transfer_bytes_s(everyone))
    return _judged(wish, layout, f"modelled: roofline on {', '.join(names)}, not calibrated")


def _why_not(wish: DeploymentWish, model: Model | None) -> str:
    if wish.engine.kind == "external":
        return "not estimated: the servers are not ours"
    if model is None:
        return f"not estimated and not checked against memory: the shape of {wish.model} is unknown"
    return "not estimated: no figures for CPUs; measure with dynctl bench run"


def _speed(gpu_name: str) -> float:
    spec = find_spec(gpu_name)
    return spec.memory_bytes_s if spec else 0.0


def _layout(
    wish: DeploymentWish, pools: Sequence[Pool], paces: Mapping[Role, Pace], transfer: float
) -> Layout:
    def side(role: Role) -> Side:
        mine = [pool for pool in pools if pool.role is role]
        sheets: list[MemorySheet] = [pool.memory for pool in mine if pool.memory is not None]
        smallest = min(sheets, key=lambda s: s.kv_capacity_tokens, default=None)
        count = sum(len(pool.replicas) for pool in mine)
        return Side(paces[role], count, max_sequences(wish, smallest))

    if Role.PREFILL in paces:
        return Layout(side(Role.PREFILL), side(Role.DECODE), transfer)
    return Layout(side(Role.AGGREGATED))


def _judged(wish: DeploymentWish, layout: Layout, source: str) -> tuple[Estimate | None, list[str]]:
    """The estimate with a sentence on each goal; none for a layout that the rate overloads."""
    work, slo = wish.workload, wish.slo
    served = serve(layout, work, work.rate_rps)
    reasons = []
    if not served.is_stable:
        what = {
            "prefill": "prompts queue without end",
            "transfer": "KV transfers queue without end",
        }
        why = what.get(served.limit, "sequences do not fit the KV cache")
        most = max_rate_rps(layout, work, Slo())
        return None, [f"overloaded at {work.rate_rps:g} req/s: {why}; it bears {most:.3g} req/s"]
    for key, goal, reached in (
        ("ttft_ms", slo.ttft_ms, served.ttft_p99_s * 1e3),
        ("itl_ms", slo.itl_ms, served.itl_p99_s * 1e3),
    ):
        if goal is not None:
            verb = "holds" if reached <= goal else "is missed"
            reasons.append(
                f"slo.{key} {goal:g} {verb} at {work.rate_rps:g} req/s: p99 of {format_seconds(reached / 1e3)} expected"
            )
    return estimate(layout, work, source), reasons
