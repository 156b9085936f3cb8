"""What a deployment could run on: GPU kinds and tensor-parallel sizes that fit, priced; and why others do not.

Not here: taking GPUs (`placement`), choosing among deployments (`search`).
Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynctl.core.hardware import Host
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import MemorySheet, Parallelism, Sourced
from dynctl.core.units import GIB, format_bytes
from dynctl.errors import PlanError
from dynctl.planner.estimate import Layout, Pace, Side, max_rate_rps, meets, serve
from dynctl.planner.grouping import num_nvlinks
from dynctl.planner.memory import MAX_NUM_SEQS, Room, legal_tp, needed_bytes, sheet
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import Allocation, GpuKind, Group
from dynctl.planner.roofline import Engine, group_link
from dynctl.planner.transfer import ETHERNET_BYTES_S, transfer_bytes_s

TP_SIZES = (1, 2, 4, 8, 16)
PD_MARGIN = 0.85
"""Prefill/decode is chosen when it needs at most this share of the GPUs: less is within the model's error."""


@dataclass(frozen=True, slots=True)
class Option:
    """One engine size on one kind of GPU."""

    kind: GpuKind
    tp: int
    groups: tuple[Group, ...]
    """Groups there are, best linked first."""
    memory: MemorySheet
    pace: Pace | None
    """None: no figures for this GPU, so nothing can be estimated."""

    @property
    def name(self) -> str:
        """`tp 4 on H100`."""
        return f"tp {self.tp} on {self.kind.name}"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A size that does not fit, and by how much."""

    text: str
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How many engines of one option serve a deployment."""

    option: Option
    num_prefill: int
    num_decode: int
    """0: the prefill engines are aggregated."""

    @property
    def num_gpus(self) -> int:
        """GPUs taken in all."""
        return (self.num_prefill + self.num_decode) * self.option.tp


def needed_tokens(wish: DeploymentWish) -> int:
    """KV one engine must at least hold: its longest request."""
    work = wish.workload
    return wish.limits.max_model_len_tokens or work.isl_tokens + work.osl_tokens


def room_of(wish: DeploymentWish, memory_bytes: int) -> Room:
    """The memory an engine of this deployment may use per GPU."""
    limits = wish.limits
    return Room(memory_bytes, limits.gpu_memory_utilization, limits.max_num_seqs or MAX_NUM_SEQS)


def check_wishes(wish: DeploymentWish) -> None:
    """Refuse workloads and goals that mean nothing.

    Raises:
        PlanError: naming the key.
    """
    work, slo = wish.workload, wish.slo
    values = {
        "workload.isl_tokens": work.isl_tokens,
        "workload.osl_tokens": work.osl_tokens,
        "workload.rate_rps": work.rate_rps,
        "slo.ttft_ms": slo.ttft_ms,
        "slo.itl_ms": slo.itl_ms,
    }
    for key, value in values.items():
        if value is not None and not (math.isfinite(value) and 0 < value <= 1e12):
            raise PlanError(f"deployment {wish.name}: {key} is {value}", "write a positive number")
    if not 0 <= work.shared_prefix_ratio <= 1:
        raise PlanError(
            f"deployment {wish.name}: workload.shared_prefix_ratio is {work.shared_prefix_ratio}",
            "write a share between 0 and 1",
        )


def pace_on(
    model: Model, kind: GpuKind, parallelism: Parallelism, groups: Sequence[Group]
) -> Pace | None:
    """How fast an engine is on the worst of some groups; None where the GPU's peaks are unknown."""
    spec = find_spec(kind.name)
    if spec is None:
        return None
    links = [group.worst_link() for group in groups]
    slowest = min(
        (group_link(spec, num_nvlinks(label), label) for label in links),
        key=lambda link: (link.bytes_s, -link.latency_s),
        default=group_link(spec, 0, None),
    )
    return Engine(model, spec, parallelism, slowest)


def options_for(
    wish: DeploymentWish, model: Model, allocation: Allocation, hosts: Sequence[Host]
) -> tuple[list[Option], list[Misfit]]:
    """Every size that fits, and every one that does not with what is missing."""
    options: list[Option] = []
    misfits: list[Misfit] = []
    for kind in allocation.kinds(hosts):
        for tp in TP_SIZES:
            groups = allocation.all_groups(hosts, kind, tp)
            if not groups or not legal_tp(model, tp):
                continue
            found = sheet(model, Parallelism(tp=tp), room_of(wish, kind.memory_bytes))
            if found.kv_capacity_tokens < needed_tokens(wish):
                misfits.append(misfit(wish, model, kind, Parallelism(tp=tp), found))
                continue
            pace = pace_on(model, kind, Parallelism(tp=tp), groups)
            options.append(Option(kind, tp, tuple(groups), found, pace))
    return options, misfits


def misfit(
    wish: DeploymentWish, model: Model, kind: GpuKind, parallelism: Parallelism, found: MemorySheet
) -> Misfit:
    """Say what one GPU would need and what it has."""
    needs = needed_bytes(found, model, parallelism, needed_tokens(wish))
    missing = needs - found.total_bytes
    text = (
        f"tp {parallelism.tp} on {kind.name} needs {format_bytes(needs)} per GPU, it has "
        f"{format_bytes(found.total_bytes)}: {format_bytes(missing)} short"
    )
    return Misfit(text, missing)


def refuse_fit(wish: DeploymentWish, model: Model, misfits: Sequence[Misfit]) -> PlanError:
    """The error for a model that fits nowhere: the smallest shortfall and the nearest change."""
    nearest = min(misfits, key=lambda m: m.missing_bytes)
    fitting = next(
        (
            tp
            for tp in TP_SIZES
            if legal_tp(model, tp)
            and sheet(model, Parallelism(tp=tp), room_of(wish, 80 * GIB)).kv_capacity_tokens
            >= needed_tokens(wish)
        ),
        None,
    )
    change = (
        f"{fitting} GPUs of 80 GiB in one host would do"
        if fitting
        else "it needs several hosts per engine, which up cannot start yet"
    )
    if model.dtype_bytes >= 2:
        change += ", so may fp8 weights"
    return PlanError(
        f"deployment {wish.name}: {model.name} ({format_bytes(model.weight_bytes)} of weights) fits no layout; "
        f"nearest: {nearest.text}",
        change
        + (
            "; or a smaller limits.max_model_len_tokens" if wish.limits.max_model_len_tokens else ""
        ),
    )


def choose(wish: DeploymentWish, options: Sequence[Option]) -> tuple[Choice, tuple[str, ...]]:
    """The fewest GPUs that serve the workload within its goals, with the reasons.

    Raises:
        PlanError: when none does; names what binds and the best that can be had.
    """
    priced = [option for option in options if option.pace is not None]
    if not priced:
        option = min(options, key=lambda o: (o.tp, o.kind))
        return Choice(option, 1, 0), (
            f"no figures for {option.kind.name}: nothing estimated, the smallest size that fits is taken",
        )
    alone = [c for o in priced if (c := _aggregated(wish, o)) is not None]
    split = [c for o in priced if (c := _split(wish, o)) is not None]
    best = min(alone, key=lambda c: _preference(wish, c), default=None)
    pair = min(split, key=lambda c: _preference(wish, c), default=None)
    if best is None and pair is None:
        raise _refuse_goals(wish, priced)
    if pair is not None and (best is None or pair.num_gpus <= PD_MARGIN * best.num_gpus):
        why = (
            "aggregated engines do not reach the goals"
            if best is None
            else (
                f"aggregated engines would need {best.num_gpus} GPUs for the same goals, {pair.num_gpus} do"
            )
        )
        return pair, (f"prefill and decode apart: {why}",)
    assert best is not None
    return best, _why_together(wish, best, pair, can_split=any(len(o.groups) > 1 for o in priced))


def _why_together(
    wish: DeploymentWish, best: Choice, pair: Choice | None, *, can_split: bool
) -> tuple[str, ...]:
    size = f"{best.option.name}: the fewest GPUs that fit the model and serve {wish.workload.rate_rps:g} req/s"
    if pair is None and not can_split:
        apart = "do not disaggregate: prefill/decode needs two engines, the GPUs hold one"
    elif pair is None:
        apart = "do not disaggregate: prefill/decode does not reach the goals on these GPUs"
    elif pair.num_gpus > best.num_gpus:
        apart = f"do not disaggregate: prefill/decode would need {pair.num_gpus} GPUs, aggregated {best.num_gpus}"
    else:
        apart = (
            f"do not disaggregate: prefill/decode would need {pair.num_gpus} GPUs, aggregated {best.num_gpus}; "
            "the gain is within the error of the estimate"
        )
    return size, apart


def _preference(wish: DeploymentWish, choice: Choice) -> tuple[float, float, GpuKind]:
    layout = layout_of(wish, choice, ETHERNET_BYTES_S)
    served = serve(layout, wish.workload, wish.workload.rate_rps)
    return choice.num_gpus, round(served.ttft_p99_s, 4), choice.option.kind


def layout_of(wish: DeploymentWish, choice: Choice, transfer_bytes_s: float) -> Layout:
    """The choice as the estimate sees it."""
    option = choice.option
    assert option.pace is not None
    bound = max_sequences(wish, option.memory)
    decode = Side(option.pace, choice.num_decode, bound) if choice.num_decode else None
    return Layout(Side(option.pace, choice.num_prefill, bound), decode, transfer_bytes_s)


def max_sequences(wish: DeploymentWish, memory: MemorySheet | None) -> float:
    """Sequences one engine can hold: by its own limit and by its KV cache; what requests share is stored once."""
    work = wish.workload
    bound = float(wish.limits.max_num_seqs or MAX_NUM_SEQS)
    if memory is None:
        return bound
    tokens = work.isl_tokens * (1 - work.shared_prefix_ratio) + work.osl_tokens
    return max(1.0, min(bound, memory.kv_capacity_tokens / tokens))


def _aggregated(wish: DeploymentWish, option: Option) -> Choice | None:
    one = layout_of(wish, Choice(option, 1, 0), ETHERNET_BYTES_S)
    rate = max_rate_rps(one, wish.workload, wish.slo)
    if rate <= 0:
        return None
    count = math.ceil(wish.workload.rate_rps / rate - 1e-9)
    return Choice(option, max(1, count), 0) if count <= len(option.groups) else None


def _split(wish: DeploymentWish, option: Option) -> Choice | None:
    """Rate matching: add prefill engines until TTFT holds, decode engines until ITL and capacity hold."""
    available = len(option.groups)
    work = wish.workload
    num_prefill, num_decode = 1, 1
    while num_prefill + num_decode <= available:
        choice = Choice(option, num_prefill, num_decode)
        layout = layout_of(
            wish, choice, transfer_bytes_s(option.groups[: num_prefill + num_decode])
        )
        served = serve(layout, work, work.rate_rps)
        if meets(served, wish.slo):
            return choice
        is_late = wish.slo.ttft_ms is not None and served.ttft_p99_s * 1e3 > wish.slo.ttft_ms
        is_slow = wish.slo.itl_ms is not None and served.itl_p99_s * 1e3 > wish.slo.itl_ms
        if served.limit == "kv cache" or (is_slow and served.limit != "prefill"):
            num_decode += 1
        elif served.limit == "transfer":
            num_prefill, num_decode = num_prefill + 1, num_decode + 1
        elif served.limit == "prefill" or is_late:
            num_prefill += 1
        else:
            return None
    return None


def _refuse_goals(wish: DeploymentWish, options: Sequence[Option]) -> PlanError:
    """Name what binds: the rate, or the goal that no size reaches at any rate."""
    work, slo = wish.workload, wish.slo
    reach = {option: layout_of(wish, Choice(option, 1, 0), ETHERNET_BYTES_S) for option in options}
    rates = {o: max_rate_rps(layout, work, slo) for o, layout in reach.items()}
    able = {o: rate for o, rate in rates.items() if rate > 0}
    apart = {o: _best_split_rps(wish, o) for o in options}
    best_apart = max(apart, key=lambda o: apart[o])
    if apart[best_apart] > max((r * len(o.groups) for o, r in able.items()), default=0.0):
        count = len(best_apart.groups)
        return PlanError(
            f"deployment {wish.name}: {work.rate_rps:g} req/s is more than the free GPUs serve within the goals: "
            f"at most {apart[best_apart]:.3g} req/s with {count} × {best_apart.name}, prefill and decode apart",
            f"about {math.ceil(work.rate_rps / apart[best_apart] * count) * best_apart.tp} such GPUs would do, "
            "or lower workload.rate_rps, or loosen slo",
        )
    if able:
        best = max(able, key=lambda o: able[o] * len(o.groups))
        total = able[best] * len(best.groups)
        wanted = math.ceil(work.rate_rps / able[best]) * best.tp
        return PlanError(
            f"deployment {wish.name}: {work.rate_rps:g} req/s is more than the free GPUs serve within the goals: "
            f"at most {total:.3g} req/s with {len(best.groups)} × {best.name}",
            f"about {wanted} such GPUs would do, or lower workload.rate_rps, or loosen slo",
        )
    idle = {o: serve(layout, work, 1e-3) for o, layout in reach.items()}
    ttft = min(s.ttft_p99_s for s in idle.values()) * 1e3
    itl = min(s.itl_p99_s for s in idle.values()) * 1e3
    if slo.ttft_ms is not None and ttft > slo.ttft_ms:
        return PlanError(
            f"deployment {wish.name}: slo.ttft_ms {slo.ttft_ms:g} is infeasible: the best reachable TTFT is "
            f"{ttft:.3g} ms for {work.isl_tokens} prompt tokens",
            "loosen slo.ttft_ms, shorten prompts, or use faster GPUs",
        )
    return PlanError(
        f"deployment {wish.name}: slo.itl_ms {slo.itl_ms or 0:g} is infeasible: the best reachable ITL is {itl:.3g} ms",
        "loosen slo.itl_ms, or use GPUs with more memory bandwidth",
    )


def _best_split_rps(wish: DeploymentWish, option: Option) -> float:
    """The highest rate any division of all groups into prefill and decode serves within the goals."""
    count = min(len(option.groups), 32)
    speed = transfer_bytes_s(option.groups[:count])
    return max(
        (
            max_rate_rps(
                layout_of(wish, Choice(option, p, count - p), speed), wish.workload, wish.slo
            )
            for p in range(1, count)
        ),
        default=0.0,
    )


def max_model_len(
    wish: DeploymentWish, model: Model | None, memory: MemorySheet | None
) -> Sourced | None:
    """The context length to start engines with: as declared, else what the model allows and the cache holds."""
    if wish.limits.max_model_len_tokens is not None:
        return Sourced(wish.limits.max_model_len_tokens, "declared in the inventory")
    if model is None or memory is None or not model.max_len_tokens:
        return None
    room = memory.kv_capacity_tokens * 9 // 10
    if model.max_len_tokens <= room:
        return Sourced(model.max_len_tokens, "default: the model's own limit")
    return Sourced(max(1, room), "modelled: 90 % of what the KV cache holds")
