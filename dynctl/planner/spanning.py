"""Layouts that would be worth having and cannot be started yet: engines over several hosts, data and expert parallel.

They are only shown, marked `not startable yet`. Over hosts a pipeline comes first; tensor parallelism only over a
fast fabric and when no pipeline holds the model.
Not here: layouts that can be started (`options`, `layouts`).
Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynctl.core.hardware import GpuState, Host
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.core.units import format_count
from dynctl.planner.choosing import Trail
from dynctl.planner.drawing import parallelism_text
from dynctl.planner.estimate import Layout, Side
from dynctl.planner.layouts import Pricer
from dynctl.planner.limits import batched_choices, room_of
from dynctl.planner.memory import legal_tp, sheet
from dynctl.planner.options import Option, max_sequences, needed_tokens, pace_on
from dynctl.planner.placement import Allocation, GpuKind, Group, kind_of
from dynctl.planner.transfer import Fabric, outside

NOT_YET = "not startable yet"
FAST_BYTES_S = 25e9
"""Per GPU, from which tensor parallelism over hosts is worth a thought: 200 Gb/s each."""
MAX_HOSTS = 16
WORTH = 1.2
"""A layout that cannot be started is mentioned from this much more rate per GPU: less is within the error."""


@dataclass(frozen=True, slots=True)
class Spanning:
    """One engine over several hosts."""

    parallelism: Parallelism
    kind: GpuKind
    host_names: tuple[str, ...]
    kv_tokens: int

    def __str__(self) -> str:
        hosts = ", ".join(self.host_names)
        return (
            f"{NOT_YET}: {parallelism_text(self.parallelism)} over {hosts} "
            f"({self.parallelism.num_gpus} × {self.kind.name}) would hold it with "
            f"{format_count(self.kv_tokens)} KV tokens"
        )


def over_hosts(
    wish: DeploymentWish,
    model: Model,
    allocation: Allocation,
    hosts: Sequence[Host],
    fabric: Fabric,
) -> str:
    """Describe the smallest engine over several hosts that would hold a model; empty when there is none."""
    del fabric  # links between hosts decide only whether tensor parallelism may cross them
    for spans in (_pipelines, _wide):
        found = [
            each
            for kind in allocation.kinds(hosts)
            for each in spans(wish, model, kind, allocation, hosts)
        ]
        if found:
            return str(
                min(found, key=lambda s: (len(s.host_names), s.parallelism.num_gpus, s.kind))
            )
    return ""


def _ranks(kind: GpuKind, tp: int, allocation: Allocation, hosts: Sequence[Host]) -> list[Group]:
    """One group of a size per host, at most `MAX_HOSTS`."""
    found = [allocation.groups(host, kind, tp) for host in hosts]
    return [groups[0] for groups in found if groups][:MAX_HOSTS]


def _pipelines(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    allocation: Allocation,
    hosts: Sequence[Host],
) -> Iterator[Spanning]:
    for tp in (8, 4, 2, 1):
        stages = _ranks(kind, tp, allocation, hosts)
        if not legal_tp(model, tp):
            continue
        for pp in range(2, min(len(stages), model.num_layers) + 1):
            tokens = _tokens(wish, model, kind, Parallelism(tp, pp))
            if tokens:
                names = tuple(group.host.name for group in stages[:pp])
                yield Spanning(Parallelism(tp, pp), kind, names, tokens)
                break


def _wide(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    allocation: Allocation,
    hosts: Sequence[Host],
) -> Iterator[Spanning]:
    for inner in (8, 4):
        ranks = [
            group
            for group in _ranks(kind, inner, allocation, hosts)
            if outside(group).bytes_s >= FAST_BYTES_S * inner
        ]
        for count in (2, 4):
            tp = inner * count
            if count <= len(ranks) and legal_tp(model, tp):
                tokens = _tokens(wish, model, kind, Parallelism(tp))
                if tokens:
                    names = tuple(group.host.name for group in ranks[:count])
                    yield Spanning(Parallelism(tp), kind, names, tokens)


def _tokens(wish: DeploymentWish, model: Model, kind: GpuKind, parallelism: Parallelism) -> int:
    """KV tokens of an engine; 0 when they are too few."""
    found = sheet(model, parallelism, room_of(wish, kind.memory_bytes))
    return found.kv_capacity_tokens if found.kv_capacity_tokens >= needed_tokens(wish) else 0


def better_elsewhere(
    pricer: Pricer,
    model: Model,
    options: Sequence[Option],
    trail: Trail,
    hosts: Sequence[Host],
) -> list[str]:
    """Mention data and expert parallel layouts of a MoE model that would bear clearly more per GPU."""
    if not model.num_experts or trail.chosen is None or not trail.chosen.num_gpus:
        return []
    chosen = trail.chosen.rate_rps / trail.chosen.num_gpus
    found = []
    for kind in dict.fromkeys(option.kind for option in options):
        largest = max(_num_of(host, kind) for host in hosts)
        for tp in (1, 2, 4):
            for dp in (2, 4, 8):
                parallelism = Parallelism(tp, 1, dp, tp * dp)
                if tp * dp <= largest and legal_tp(model, tp):
                    rate = _rate_per_gpu(pricer, model, kind, parallelism, hosts)
                    found.append((rate, parallelism, kind))
    if not found:
        return []
    rate, parallelism, kind = max(found, key=lambda f: (f[0], -f[1].num_gpus, f[2]))
    if rate < chosen * WORTH:
        return []
    return [
        (
            f"{NOT_YET}: {parallelism_text(parallelism)} on {kind.name} would bear {rate:.3g} req/s per GPU, "
            f"the chosen layout {chosen:.3g}"
        )
    ]


def _num_of(host: Host, kind: GpuKind) -> int:
    return sum(gpu.state is GpuState.FREE and kind_of(gpu) == kind for gpu in host.gpus)


def _rate_per_gpu(
    pricer: Pricer,
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    hosts: Sequence[Host],
) -> float:
    found = sheet(model, parallelism, room_of(pricer.wish, kind.memory_bytes))
    if found.kv_capacity_tokens < needed_tokens(pricer.wish):
        return 0.0
    groups = [
        Group(host, tuple(i for i, gpu in enumerate(host.gpus) if kind_of(gpu) == kind))
        for host in hosts
        if _num_of(host, kind) >= parallelism.num_gpus
    ]
    pace = pace_on(model, kind, parallelism, groups[:1])
    if pace is None or not groups:
        return 0.0
    tokens = float(found.kv_capacity_tokens)
    side = Side(
        pace, 1, max_sequences(pricer.wish, found), tokens,
        batched_choices(pricer.wish, kind.memory_bytes)[0],
    )  # fmt: skip
    return pricer.max_rate_rps(Layout(side)) / parallelism.num_gpus
