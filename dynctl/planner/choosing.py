"""Which layout a deployment gets, and why not another one; or what binds when none serves it.

The fewest GPUs that serve the wished rate within the goals win. Prefill and decode go apart only where that needs fewer
GPUs and gains more than the estimate's error.
Not here: enumerating and pricing (`layouts`), taking GPUs (`search`).
Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Figure
from dynctl.core.units import format_number
from dynctl.planner.estimate import LEAST_RPS, serve
from dynctl.planner.layouts import (
    Cell,
    Choice,
    Pricer,
    aggregated,
    cells,
    gpus_per_rps,
    mixed,
    pairs,
    split,
)
from dynctl.planner.limits import batched_choices
from dynctl.planner.memory import rank_tokens
from dynctl.planner.options import Misfit, Option, with_batch
from dynctl.planner.placement import GpuKind
from dynctl.planner.refusing import refusal

GAIN_ERROR_DENSE = 0.15
GAIN_ERROR_MOE = 0.25
"""How far a ratio of two layouts' rates on the same GPUs is off: smaller than either rate's own error, which both share.
Hand-set from the errors of throughput on public points (7 to 13 % dense, 21 % MoE)."""
ROOMY = 8
"""Times the typical request an engine should hold in its cache: lengths vary, and prefixes want to stay."""
GAIN_ERROR_UNMEASURED = 0.1
"""What a link that was never measured adds."""


@dataclass(frozen=True, slots=True)
class Considered:
    """One layout that was looked at."""

    name: str
    num_gpus: int
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    rate_rps: float
    """The highest rate within the goals; 0: none."""
    outcome: str
    """`chosen`, or why not."""
    is_split: bool = False
    """Whether prefill and decode are apart."""


@dataclass(slots=True)
class Trail:
    """How a deployment's layout was found, for `--why`."""

    considered: list[Considered] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    together: Choice | None = None
    apart: Choice | None = None
    chosen: Choice | None = None
    gain: Figure | None = None
    """Requests per second and GPU, prefill/decode over aggregated."""
    can_split: bool = False
    """Whether the GPUs hold two engines at all."""
    is_cut_short: bool = False


def choose(pricer: Pricer, model: Model, options: Sequence[Option], trail: Trail) -> list[Choice]:
    """The layouts worth taking, the best first.

    Raises:
        PlanError: when none serves the rate within the goals; names what binds and the best that can be had.
    """
    priced = [option for option in options if option.pace is not None]
    rates = [tuned(pricer, model, option) for option in priced]
    together = [c for o, rate in rates if (c := aggregated(pricer, o, rate)) is not None]
    several = (mixed(pricer, rates), mixed(pricer, _most_of_each_kind(rates)))
    together += [choice for choice in several if choice is not None]
    together.sort(key=lambda c: _preference(c, model, pricer.wish))
    fewest = together[0].num_gpus if together else None
    apart = _splits(pricer, model, priced, fewest, _per_gpu(priced, rates))
    trail.together = together[0] if together else None
    trail.apart = apart[0] if apart else None
    trail.can_split = any(len(o.groups) > 1 for o in priced) or len({o.kind for o in priced}) > 1
    trail.is_cut_short = pricer.is_spent
    _note(trail, pricer, rates, together, apart)
    if not together and not apart:
        raise refusal(pricer, model, rates, priced)
    trail.gain = apart[0].gain if apart else None
    if apart and (fewest is None or (is_sure(apart[0]) and apart[0].num_gpus < fewest)):
        return [*apart, *together]
    return [*together, *apart]


def is_sure(choice: Choice) -> bool:
    """Whether prefill/decode wins by more than its error.

    A property of engines, links and goals, not of the rate: so a higher rate never needs fewer GPUs.
    """
    return _wins(choice.gain)


def _wins(gain: Figure | None) -> bool:
    return gain is None or gain.low > 1


def _most_of_each_kind(rates: Sequence[tuple[Option, float]]) -> list[tuple[Option, float]]:
    """Of every GPU kind the option that bears most in all."""
    best: dict[GpuKind, tuple[Option, float]] = {}
    for option, rate in rates:
        known = best.get(option.kind)
        if known is None or rate * len(option.groups) > known[1] * len(known[0].groups):
            best[option.kind] = option, rate
    return list(best.values())


def tuned(pricer: Pricer, model: Model, option: Option) -> tuple[Option, float]:
    """The option with the bound on a step's tokens at which one engine bears most within the goals, and that rate.

    Without a goal for ITL the default stays as long as no other bound saves an engine.
    """
    best, top = option, pricer.max_rate_rps(pricer.alone(option, 1))
    for tokens in batched_choices(pricer.wish, option.kind):
        least = _worth(pricer.wish, top)
        if tokens == option.max_num_batched_tokens or math.isinf(least):
            continue
        other = with_batch(pricer.wish, model, option, tokens, pricer.calibration)
        if other is not None and pricer.meets(pricer.alone(other, 1), least):
            rate = pricer.max_rate_rps(pricer.alone(other, 1))
            if rate > top:
                best, top = other, rate
    return best, top


def _worth(wish: DeploymentWish, rate_rps: float) -> float:
    """The rate from which another bound on a step's tokens is worth taking; infinite: none is."""
    if wish.slo.itl_ms is not None or rate_rps <= 0:
        return max(rate_rps, LEAST_RPS)
    num = math.ceil(wish.workload.rate_rps / rate_rps - 1e-9)
    return wish.workload.rate_rps / (num - 1) if num > 1 else math.inf


def _splits(
    pricer: Pricer,
    model: Model,
    options: Sequence[Option],
    fewest: int | None,
    per_gpu: Mapping[int, float],
) -> list[Choice]:
    """Prefill/decode layouts. Those that take far more GPUs than aggregated engines do are not followed to their end."""
    found: list[Choice] = []
    ceiling = 10**9 if fewest is None else fewest * 2 + 16
    # Where two engines take as many GPUs as aggregated ones do in all, unlike pairs cannot win either.
    smallest = min((option.size for option in options), default=1)
    only_equal = fewest is not None and fewest <= 2 * smallest
    for p, d in pairs(options, model):
        if only_equal and p is not d:
            continue
        for cell in cells(pricer, p, d):
            if pricer.is_spent:
                break
            gain = _gain(pricer, p, d, cell, per_gpu, model)
            # What wins surely is not cut off by what only seems to.
            rivals = [c.num_gpus for c in found if is_sure(c) or not _wins(gain)]
            choice = split(pricer, p, d, cell, min(rivals, default=ceiling))
            if choice is not None:
                found.append(replace(choice, gain=gain))

    def order(choice: Choice) -> tuple[object, ...]:
        # Against aggregated engines only what wins surely counts; without them the fewest GPUs do.
        must_win = fewest is not None
        return must_win and not is_sure(choice), *_preference(choice, model, pricer.wish)

    return sorted(found, key=order)


def _preference(choice: Choice, model: Model, wish: DeploymentWish) -> tuple[object, ...]:
    """Fewest GPUs; then room for long contexts, engines that are alike, early first tokens."""
    kinds = [part.option.kind for part in choice.parts]
    work = wish.workload
    roomy = min(model.max_len_tokens, ROOMY * (work.isl_tokens + work.osl_tokens))
    return (
        choice.num_gpus,
        any(
            rank_tokens(part.option.memory, part.option.parallelism) < roomy
            for part in choice.parts
        ),
        len({id(part.option) for part in choice.parts}),
        round(choice.served.ttft_p99_s, 4),
        len(set(kinds)),
        kinds,
        choice.name,
    )


def _per_gpu(options: Sequence[Option], rates: Sequence[tuple[Option, float]]) -> dict[int, float]:
    """What each GPU of an option (by its `id`) bears under the best aggregated engines its hosts allow, on average."""
    best: dict[tuple[str, GpuKind], float] = {}
    for option, rate in rates:
        for name in {group.host.name for group in option.groups}:
            key = name, option.kind
            best[key] = max(best.get(key, 0.0), rate / option.size)
    return {
        id(o): sum(best.get((g.host.name, o.kind), 0.0) for g in o.groups) / len(o.groups)
        for o in options
    }


def _gain(
    pricer: Pricer,
    p: Option,
    d: Option,
    cell: Cell,
    per_gpu: Mapping[int, float],
    model: Model,
) -> Figure | None:
    """Prefill/decode over aggregated engines on the same GPUs; None where one of them serves nothing."""
    gpus = gpus_per_rps(pricer, p, d, cell)
    if gpus is None:
        return None
    together = gpus[0] * per_gpu[id(p)] + gpus[1] * per_gpu[id(d)]
    if together <= 0:
        return None
    error = GAIN_ERROR_MOE if model.num_experts else GAIN_ERROR_DENSE
    is_known = cell.where != "over hosts" or cell.speed.is_measured
    error += 0.0 if is_known else GAIN_ERROR_UNMEASURED
    return Figure(
        round(1 / together / (1 + error), 2),
        round(1 / together, 2),
        round(1 / together * (1 + error), 2),
        f"modelled, ± {error:.0%}{'' if is_known else ', the links were not measured'}",
    )


def _note(
    trail: Trail,
    pricer: Pricer,
    rates: Sequence[tuple[Option, float]],
    together: Sequence[Choice],
    apart: Sequence[Choice],
) -> None:
    """Write down every layout that was priced, with what speaks against it."""
    slo, wanted = pricer.wish.slo, pricer.wish.workload.rate_rps
    served = {id(c.parts[0].option) for c in together if len(c.parts) == 1}
    for option, rate in rates:
        if id(option) in served:
            continue
        idle = serve(pricer.alone(option, 1), pricer.wish.workload, LEAST_RPS)
        if rate > 0:
            why = f"{len(option.groups)} engines bear {format_number(rate * len(option.groups))} of {wanted:g} req/s"
        elif slo.ttft_ms is not None and idle.ttft_p99_s * 1e3 > slo.ttft_ms:
            why = f"misses slo.ttft_ms even idle ({format_number(idle.ttft_p99_s * 1e3)} ms)"
        else:
            why = f"misses slo.itl_ms: {format_number(idle.itl_p99_s * 1e3)} ms while a prompt is computed"
        trail.considered.append(
            Considered(
                f"aggregated {option.name}",
                option.size,
                idle.ttft_p99_s * 1e3,
                idle.itl_p99_s * 1e3,
                rate,
                why,
            )
        )
    for choice in (*together, *apart):
        trail.considered.append(
            Considered(
                f"{'' if choice.is_split else 'aggregated '}{choice.name}"
                f"{f' {choice.where}' if choice.where else ''}",
                choice.num_gpus,
                choice.served.ttft_p99_s * 1e3,
                choice.served.itl_p99_s * 1e3,
                choice.rate_rps,
                "",
                choice.is_split,
            )
        )


def settle(trail: Trail, chosen: Choice) -> None:
    """Say of every layout that serves the goals how it compares with the chosen one."""
    trail.chosen = chosen
    name = f"{'' if chosen.is_split else 'aggregated '}{chosen.name}"
    done = []
    for each in trail.considered:
        if each.outcome:
            done.append(each)
            continue
        if each.name.startswith(name) and each.num_gpus == chosen.num_gpus:
            outcome = "chosen" if not any(c.outcome == "chosen" for c in done) else "same"
        elif each.num_gpus > chosen.num_gpus:
            outcome = f"needs {each.num_gpus - chosen.num_gpus} GPUs more"
        elif each.num_gpus < chosen.num_gpus:
            outcome = "fewer GPUs, but the gain is within the error of the estimate"
        elif each.is_split and not chosen.is_split:
            outcome = "as many GPUs: apart is worth it only where it saves some"
        elif (each.ttft_p99_ms or 0) > chosen.served.ttft_p99_s * 1e3 * 1.001:
            outcome = "as many GPUs, later first tokens"
        else:
            outcome = "as many GPUs, no clear gain"
        done.append(replace(each, outcome=outcome))
    trail.considered = done


def ratio_rows(pricer: Pricer, choice: Choice) -> list[tuple[int, int, Choice]]:
    """Every division of a prefill/decode layout's engines, at most 9 around the chosen one."""
    prefill, decode = choice.parts
    total = prefill.count + decode.count
    assert choice.speed is not None
    first = max(1, min(prefill.count - 4, total - 9))
    rows = []
    for num_p in range(first, min(total, first + 9)):
        num_d = total - num_p
        layout = pricer.apart(prefill.option, num_p, decode.option, num_d, choice.speed.bytes_s)
        rows.append(
            (
                num_p,
                num_d,
                Choice(
                    choice.parts, pricer.serve(layout), pricer.max_rate_rps(layout), choice.speed
                ),
            )
        )
    return rows
