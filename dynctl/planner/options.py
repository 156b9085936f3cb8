"""What one engine of a deployment could be: GPU kinds, tensor and pipeline sizes that fit, priced; and why others do not.

Options are inside one host, without data or expert parallelism: those are had by asking (`pools`), and `spanning` shows
where they would bear more.
Not here: taking GPUs (`placement`), how many engines of which option (`layouts`).
Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynctl.core.engine_flags import flag_faults
from dynctl.core.hardware import Host
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import MemorySheet, Parallelism
from dynctl.core.units import format_bytes
from dynctl.errors import PlanError
from dynctl.planner.calibration import Calibration
from dynctl.planner.drawing import parallelism_text
from dynctl.planner.estimate import Pace, Side, by_rank
from dynctl.planner.grouping import link_rank, near_of, num_nvlinks, tp_groups
from dynctl.planner.limits import (
    batched_choices,
    declared,
    default_batched_tokens,
    max_num_seqs,
    room_of,
)
from dynctl.planner.memory import legal_tp, needed_bytes, no_kernels, rank_tokens, sheet
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import Allocation, GpuKind, Group, kind_of
from dynctl.planner.roofline import Engine, group_link

TP_SIZES = (1, 2, 4, 8, 16)
PP_SIZES = (2, 3, 4)
MAX_LINK_CLASSES = 6
NEVER_BYTES = 1 << 60
"""What is missing where no memory would help."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One engine size on one kind of GPU, on groups that are linked at least so well."""

    kind: GpuKind
    parallelism: Parallelism
    link: str | None
    """The worst link inside the tensor-parallel groups; None: a single GPU, or not known."""
    groups: tuple[Group, ...]
    """Groups there are, best linked first."""
    memory: MemorySheet
    pace: Pace | None
    """None: no figures for this GPU, so nothing can be estimated."""
    max_num_batched_tokens: int
    """Tokens of one step: longer prompts are computed in pieces."""

    @property
    def size(self) -> int:
        """GPUs one engine takes."""
        return self.parallelism.num_gpus

    @property
    def name(self) -> str:
        """`tp4 on NVIDIA H100 (NV18)`."""
        link = f" ({self.link})" if self.size > 1 and self.link else ""
        tokens = self.max_num_batched_tokens
        is_usual = tokens == default_batched_tokens(self.kind.memory_bytes, self.kind.name)
        pieces = "" if is_usual else f", {tokens} tokens a step"
        return f"{parallelism_text(self.parallelism)} on {self.kind.name}{link}{pieces}"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A size that does not fit, and by how much."""

    text: str
    missing_bytes: int
    saved_bytes: int = 0
    """What weights of 8 instead of 16 bits would save on each GPU."""
    held_tokens: int = 0
    """How long a request may be for it to fit."""


def needed_tokens(wish: DeploymentWish) -> int:
    """KV one engine must at least hold: its longest request."""
    longest = declared(wish, "max_model_len_tokens")
    return int(longest.value) if longest else wish.workload.isl_tokens + wish.workload.osl_tokens


def check_wishes(wish: DeploymentWish) -> None:
    """Refuse workloads, goals and flags that mean nothing.

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
            raise PlanError(
                f"deployment {wish.name}: {key} is {value:g}",
                "write a positive number of at most 1e12, or leave the key out for no goal",
            )
    step, seqs = (declared(wish, key) for key in ("max_num_batched_tokens", "max_num_seqs"))
    if step is not None and seqs is not None and step.value < seqs.value:
        raise PlanError(
            f"deployment {wish.name}: {step.value:g} batched tokens a step are fewer than its {seqs.value:g} sequences, "
            "of which each takes one",
            "raise limits.max_num_batched_tokens or lower limits.max_num_seqs",
        )
    if fault := next(flag_faults(wish.engine, wish.limits), None):
        where = f"deployment {wish.name}: engine.{fault.key[0]}.{fault.key[1]}"
        raise PlanError(f"{where}: {fault.text}", fault.hint)
    if not 0 <= work.shared_prefix_ratio <= 1:
        raise PlanError(
            f"deployment {wish.name}: workload.shared_prefix_ratio is {work.shared_prefix_ratio}",
            "write a share between 0 and 1",
        )


def pace_on(
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    groups: Sequence[Group],
    calibration: Calibration,
) -> Pace | None:
    """How fast an engine is on the worst of some groups; None where the GPU's peaks are unknown."""
    worst = min((worst_link(g, parallelism) for g in groups), key=link_rank, default=None)
    return pace_at(model, kind, parallelism, worst, calibration)


def pace_at(
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    label: str | None,
    calibration: Calibration,
) -> Pace | None:
    """How fast an engine is whose tensor-parallel ranks are linked so; None where the GPU's peaks are unknown."""
    spec = find_spec(kind.name)
    if spec is None:
        return None
    link = group_link(spec, num_nvlinks(label), label)
    return Engine(model, spec, parallelism, link, calibration=calibration)


def worst_link(group: Group, parallelism: Parallelism) -> str | None:
    """The slowest link between GPUs that share the work of a layer.

    Those are tensor-parallel ranks, of which pipeline stages and data-parallel ranks lie one after another; and all of an
    engine whose data-parallel ranks share experts.
    """
    links = group.host.gpu_links
    has_shared_experts = parallelism.dp > 1 and parallelism.ep > 1
    size = len(group.positions) if has_shared_experts else parallelism.tp
    labels = [
        links[a][b]
        for start in range(0, len(group.positions), size)
        for a in group.positions[start : start + size]
        for b in group.positions[start : start + size]
        if a < b
    ]
    return min(labels, key=link_rank, default=None)


def lacks_nvlink(group: Group) -> bool:
    """Whether cards of a kind that is joined by NVLink show none anywhere in their host."""
    spec = find_spec(group.gpus[0].name)
    is_joined = any(num_nvlinks(label) for row in group.host.gpu_links for label in row)
    is_alone = len(group.host.gpus) < 2
    return spec is not None and spec.num_nvlinks > 0 and not is_joined and not is_alone


def staged(group: Group, tp: int) -> Group:
    """Order a group's GPUs so that each pipeline stage is a well linked tensor-parallel group."""
    if tp in {1, len(group.positions)}:
        return group
    links = group.host.gpu_links
    inner = tuple(tuple(links[a][b] for b in group.positions) for a in group.positions)
    stages = tp_groups(inner, near_of(group.host, group.positions), tp)
    order = [group.positions[i] for stage in sorted(stages) for i in stage]
    return Group(group.host, tuple(order))


def groups_of(
    allocation: Allocation,
    hosts: Sequence[Host],
    kind: GpuKind,
    parallelism: Parallelism,
    least: str | None = None,
) -> list[Group]:
    """Free groups for one engine size, linked at least as well as a label inside their tensor-parallel ranks."""
    found = allocation.all_groups(hosts, kind, parallelism.num_gpus)
    staged_ones = [staged(group, parallelism.tp) for group in found]
    if least is None:
        return staged_ones
    bound = link_rank(least)
    return [g for g in staged_ones if link_rank(worst_link(g, parallelism)) >= bound]


def options_for(
    wish: DeploymentWish,
    model: Model,
    allocation: Allocation,
    hosts: Sequence[Host],
    calibration: Calibration,
    *,
    advanced: bool = False,
) -> tuple[list[Option], list[Misfit]]:
    """Every size that fits, and every one that does not with what is missing.

    Pipelines cost latency, so they are options only where nothing fits without, or when asked for (`advanced`).
    """
    options: list[Option] = []
    misfits: list[Misfit] = []
    for kind in allocation.kinds(hosts):
        if why := unsupported(model, kind):
            misfits.append(Misfit(why, NEVER_BYTES))
            continue
        found = [
            option
            for tp in TP_SIZES
            for option in _of_size(
                wish, model, allocation, hosts, kind, Parallelism(tp), calibration, misfits
            )
        ]
        if not found or advanced:
            found += [
                option
                for pp in PP_SIZES
                for tp in TP_SIZES
                if model.num_layers >= pp
                for option in _of_size(
                    wish, model, allocation, hosts, kind, Parallelism(tp, pp), calibration, misfits
                )
            ]
        options += found
    return options, misfits


def unsupported(model: Model, kind: GpuKind) -> str:
    """Say why a kind of GPU cannot compute a model's weights at all; empty: it can, or is not in the table."""
    spec = find_spec(kind.name)
    return no_kernels(model, spec, kind.name) if spec else ""


def _of_size(
    wish: DeploymentWish,
    model: Model,
    allocation: Allocation,
    hosts: Sequence[Host],
    kind: GpuKind,
    parallelism: Parallelism,
    calibration: Calibration,
    misfits: list[Misfit],
) -> list[Option]:
    """The options of one size: one per class of links, each with all groups linked at least so well."""
    if not legal_tp(model, parallelism.tp):
        return []
    groups = groups_of(allocation, hosts, kind, parallelism)
    if not groups:
        return []
    fitting = fitting_batch(wish, model, kind, parallelism, calibration)
    if fitting is None:
        misfits.append(misfit(wish, model, kind, parallelism, calibration))
        return []
    tokens, found = fitting
    labels = [worst_link(group, parallelism) for group in groups]
    classes = sorted(set(labels), key=lambda label: (-link_rank(label), label or ""))
    if len(classes) > MAX_LINK_CLASSES:
        classes = [*classes[: MAX_LINK_CLASSES - 1], classes[-1]]
    return [
        Option(
            kind,
            parallelism,
            label,
            tuple(
                g
                for g, own in zip(groups, labels, strict=True)
                if link_rank(own) >= link_rank(label)
            ),
            found,
            pace_at(model, kind, parallelism, label, calibration),
            tokens,
        )
        for label in classes
    ]


def fitting_batch(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    calibration: Calibration,
) -> tuple[int, MemorySheet] | None:
    """The first choice of a step's tokens whose activations leave room for a request, with its memory; None: none does."""
    for tokens in batched_choices(wish, kind):
        found = sheet(model, parallelism, room_of(wish, kind, calibration, tokens))
        if rank_tokens(found, parallelism) >= needed_tokens(wish):
            return tokens, found
    return None


def with_batch(
    wish: DeploymentWish, model: Model, option: Option, tokens: int, calibration: Calibration
) -> Option | None:
    """The option with another bound on a step's tokens; None when a request would not fit beside its activations."""
    room = room_of(wish, option.kind, calibration, tokens)
    found = sheet(model, option.parallelism, room)
    if rank_tokens(found, option.parallelism) < needed_tokens(wish):
        return None
    return replace(option, max_num_batched_tokens=tokens, memory=found)


def option_of(
    wish: DeploymentWish,
    model: Model,
    parallelism: Parallelism,
    groups: Sequence[Group],
    calibration: Calibration,
) -> Option:
    """What engines on given groups are, at worst: the smallest memory, the slowest link."""
    kind = min((kind_of(g.gpus[0]) for g in groups), key=lambda k: (k.memory_bytes, k.name))
    link = min((worst_link(g, parallelism) for g in groups), key=link_rank)
    tokens, memory = fitting_batch(wish, model, kind, parallelism, calibration) or (
        batched_choices(wish, kind)[0],
        sheet(model, parallelism, room_of(wish, kind, calibration)),
    )
    pace = pace_at(model, kind, parallelism, link, calibration)
    return Option(kind, parallelism, link, tuple(groups), memory, pace, tokens)


def for_decoding(
    wish: DeploymentWish, model: Model, option: Option, calibration: Calibration
) -> Option:
    """A decode engine computes prompts only when a transfer failed: bounded so that even then tokens keep their goal."""
    if wish.slo.itl_ms is None or option.pace is None:
        return option
    context = wish.workload.isl_tokens + wish.workload.osl_tokens / 2
    choices = sorted(batched_choices(wish, option.kind), reverse=True)
    for tokens in choices:
        step_s = option.pace.mixed_s(1, context, min(tokens, wish.workload.isl_tokens), 0)
        if step_s * 1e3 <= wish.slo.itl_ms and tokens <= option.max_num_batched_tokens:
            return with_batch(wish, model, option, tokens, calibration) or option
    return with_batch(wish, model, option, choices[-1], calibration) or option


def misfit(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    calibration: Calibration,
) -> Misfit:
    """Say what one GPU would need and what it has."""
    found = sheet(model, parallelism, room_of(wish, kind, calibration))
    needs = needed_bytes(found, model, parallelism, needed_tokens(wish))
    missing = needs - found.total_bytes
    text = (
        f"{parallelism_text(parallelism)} on {kind.name} needs {format_bytes(needs)} per GPU, it has "
        f"{format_bytes(found.total_bytes)}: {format_bytes(missing)} short"
    )
    inner = found.weight_bytes - model.embedding_weight_bytes // parallelism.tp
    saved = inner // 2 if model.dtype_bytes >= 2 else 0
    return Misfit(text, missing, saved, rank_tokens(found, parallelism))


def engines_of(wish: DeploymentWish, option: Option, count: int) -> Side:
    """Engines of an option as the estimate sees them."""
    assert option.pace is not None
    dp = option.parallelism.dp
    side = Side(
        option.pace,
        count,
        max_sequences(wish, option.memory, dp),
        float(option.memory.kv_capacity_tokens),
        option.max_num_batched_tokens,
    )
    return by_rank(side, dp)


def max_sequences(wish: DeploymentWish, memory: MemorySheet | None, dp: int) -> float:
    """Sequences one engine can hold: by its ranks' own limit and by its KV cache; what requests share is stored once."""
    work = wish.workload
    bound = float(max_num_seqs(wish).value) * dp
    if memory is None:
        return bound
    tokens = work.isl_tokens * (1 - work.shared_prefix_ratio) + work.osl_tokens
    return max(1.0, min(bound, memory.kv_capacity_tokens / tokens))
