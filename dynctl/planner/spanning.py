"""Layouts that would be worth having and are not chosen: data and expert parallel ones, and engines over several hosts.

They are only shown, as what pools can ask for: how fast an engine over several hosts is depends on the network between
them, which is not priced. With data-parallel ranks on several hosts they are marked `not startable yet`. Hosts of one NVLink
domain are as one host here. Over other hosts a pipeline comes first; tensor parallelism only over a fast fabric and when no
pipeline holds the model.
Not here: layouts that can be chosen (`options`, `layouts`).
Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynctl.core.hardware import Host
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.core.text import clean
from dynctl.core.units import format_count, format_number
from dynctl.planner.calibration import Calibration
from dynctl.planner.choosing import Trail, tuned
from dynctl.planner.drawing import parallelism_text
from dynctl.planner.grouping import link_rank
from dynctl.planner.layouts import Pricer
from dynctl.planner.memory import legal_tp
from dynctl.planner.options import Option, fitting_batch, pace_at
from dynctl.planner.placement import Allocation, GpuKind, Group, kind_of
from dynctl.planner.transfer import outside

NOT_YET = "not startable yet"
ON_REQUEST = "only if asked for"
FAST_BYTES_S = 25e9
"""Per GPU, from which tensor parallelism over hosts is worth a thought: 200 Gb/s each."""
MAX_HOSTS = 16
WORTH = 1.2
"""A layout that is not chosen is mentioned from this much more rate per GPU: less is within the error."""


@dataclass(frozen=True, slots=True)
class Spanning:
    """One engine over several hosts."""

    parallelism: Parallelism
    kind: GpuKind
    host_names: tuple[str, ...]
    kv_tokens: int
    is_in_domain: bool = False
    """Whether NVLink joins the hosts."""

    def __str__(self) -> str:
        hosts = ", ".join(self.host_names)
        return (
            f"{parallelism_text(self.parallelism)} over {hosts}"
            f"{' of one NVLink domain' if self.is_in_domain else ''} "
            f"({self.parallelism.num_gpus} × {self.kind.name}) would hold it with "
            f"{format_count(self.kv_tokens)} KV tokens if asked for "
            f"({_request(self.parallelism, len(self.host_names))})"
        )


@dataclass(frozen=True, slots=True)
class Domain:
    """Hosts that NVLink joins, as the GPUs of a GB200 rack: all their GPUs are of one clique."""

    clique: str
    hosts: tuple[Host, ...]


def nvlink_domains(hosts: Sequence[Host]) -> tuple[Domain, ...]:
    """The NVLink domains of several hosts, in the order of their first hosts."""
    members: dict[str, list[Host]] = {}
    for host in hosts:
        cliques = {gpu.health.fabric_clique for gpu in host.gpus}
        if len(cliques) == 1 and (clique := cliques.pop()):
            members.setdefault(clique, []).append(host)
    return tuple(Domain(clique, tuple(m)) for clique, m in members.items() if len(m) > 1)


def about_domains(hosts: Sequence[Host], used: Collection[str]) -> list[str]:
    """What it means for a plan that hosts it uses are joined by NVLink."""
    return [
        (
            f"{len(domain.hosts)} hosts from {domain.hosts[0].name} to {domain.hosts[-1].name} are one NVLink domain "
            f"(clique {clean(domain.clique, 60)}): engines over several of them are had only if asked for, and KV is taken to move over "
            "the network, since engines do not keep it in fabric memory by default"
        )
        for domain in nvlink_domains(hosts)
        if any(host.name in used for host in domain.hosts)
    ]


def over_hosts(
    wish: DeploymentWish,
    model: Model,
    allocation: Allocation,
    hosts: Sequence[Host],
    calibration: Calibration,
) -> str:
    """Describe the smallest engine over several hosts that would hold a model; empty when there is none."""
    for spans in (_in_domains, _pipelines, _wide):
        found = [
            each
            for kind in allocation.kinds(hosts)
            for each in spans(wish, model, kind, allocation, hosts, calibration)
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


def _in_domains(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    allocation: Allocation,
    hosts: Sequence[Host],
    calibration: Calibration,
) -> Iterator[Spanning]:
    for domain in nvlink_domains(hosts):
        for inner in (8, 4, 2, 1):
            ranks = _ranks(kind, inner, allocation, domain.hosts)
            for count in range(2, len(ranks) + 1):
                tokens = (
                    _tokens(wish, model, kind, Parallelism(inner * count), calibration)
                    if legal_tp(model, inner * count)
                    else 0
                )
                if tokens:
                    names = tuple(group.host.name for group in ranks[:count])
                    yield Spanning(Parallelism(inner * count), kind, names, tokens, True)
                    break


def _pipelines(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    allocation: Allocation,
    hosts: Sequence[Host],
    calibration: Calibration,
) -> Iterator[Spanning]:
    for tp in (8, 4, 2, 1):
        stages = _ranks(kind, tp, allocation, hosts)
        if not legal_tp(model, tp):
            continue
        for pp in range(2, min(len(stages), model.num_layers) + 1):
            tokens = _tokens(wish, model, kind, Parallelism(tp, pp), calibration)
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
    calibration: Calibration,
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
                tokens = _tokens(wish, model, kind, Parallelism(tp), calibration)
                if tokens:
                    names = tuple(group.host.name for group in ranks[:count])
                    yield Spanning(Parallelism(tp), kind, names, tokens)


def _tokens(
    wish: DeploymentWish,
    model: Model,
    kind: GpuKind,
    parallelism: Parallelism,
    calibration: Calibration,
) -> int:
    """KV tokens of an engine; 0 when they are too few."""
    found = fitting_batch(wish, model, kind, parallelism, calibration)
    return 0 if found is None else found[1].kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class OpenGpus:
    """The GPUs one deployment may have, were it laid out otherwise: what others took is not among them."""

    hosts: tuple[Host, ...]
    positions: Mapping[str, tuple[int, ...]]
    """In `host.gpus`, by host."""

    def of(self, host: Host, kind: GpuKind) -> tuple[int, ...]:
        """Positions of a kind's GPUs on a host."""
        return tuple(i for i in self.positions[host.name] if kind_of(host.gpus[i]) == kind)

    def worst_link(self, host: Host, kind: GpuKind) -> str | None:
        """The slowest link between these."""
        return Group(host, self.of(host, kind)).worst_link()


@dataclass(frozen=True, slots=True)
class _Idea:
    """An engine that is not chosen, with its worst link; where it would be and on how many hosts, if over several."""

    kind: GpuKind
    parallelism: Parallelism
    link: str | None
    where: str
    nodes: int = 1

    @property
    def is_startable(self) -> bool:
        """Whether pools may ask for it."""
        return self.nodes == 1 or self.parallelism.dp == 1


def better_elsewhere(
    pricer: Pricer,
    model: Model,
    options: Sequence[Option],
    trail: Trail,
    room: OpenGpus,
) -> list[str]:
    """Mention data and expert parallel layouts, and engines over an NVLink domain, that would bear clearly more per GPU."""
    if trail.chosen is None or not trail.chosen.num_gpus:
        return []
    chosen = trail.chosen.rate_rps / trail.chosen.num_gpus
    ideas = [
        idea
        for kind in dict.fromkeys(option.kind for option in options)
        for idea in (*_parallel_inside(model, kind, room), *_over_domains(model, kind, room))
    ]
    found = [(_rate_per_gpu(pricer, model, idea), idea) for idea in ideas]
    if not found:
        return []
    rate, best = max(found, key=lambda f: (f[0], -f[1].parallelism.num_gpus, f[1].kind))
    if rate < chosen * WORTH:
        return []
    what = f"{parallelism_text(best.parallelism)} on {best.kind.name}{best.where}"
    return [
        (
            f"{ON_REQUEST if best.is_startable else NOT_YET}: {what} would bear {format_number(rate)} req/s per GPU, "
            f"the chosen layout {format_number(chosen)}"
            + (
                f"; {_request(best.parallelism, best.nodes)} asks for it"
                if best.is_startable
                else ""
            )
        )
    ]


def _request(parallelism: Parallelism, nodes: int) -> str:
    """What to write for it."""
    p = parallelism
    sizes = {"tp": p.tp, "pp": p.pp, "dp": p.dp, "ep": p.ep, "nodes": nodes}
    told = [f"{name}: {size}" for name, size in sizes.items() if size > 1 or name == "tp"]
    return f"pools: with {', '.join(told)}"


def _parallel_inside(model: Model, kind: GpuKind, room: OpenGpus) -> Iterator[_Idea]:
    """Data and expert parallel engines of a MoE model inside one host."""
    largest = max(len(room.of(host, kind)) for host in room.hosts)
    for tp in (1, 2, 4) if model.num_experts else ():
        for dp in (2, 4, 8):
            if tp * dp <= largest and legal_tp(model, tp):
                able = next(h for h in room.hosts if len(room.of(h, kind)) >= tp * dp)
                link = room.worst_link(able, kind)
                yield _Idea(kind, Parallelism(tp, 1, dp, tp * dp), link, "")


def _over_domains(model: Model, kind: GpuKind, room: OpenGpus) -> Iterator[_Idea]:
    """Engines larger than a host, tensor parallel and for MoE models also data and expert parallel."""
    for domain in nvlink_domains(room.hosts):
        able = [host for host in domain.hosts if room.of(host, kind)]
        if len(able) < 2:
            continue
        sizes = [len(room.of(host, kind)) for host in able]
        where = f" over several of the {len(sizes)} hosts of one NVLink domain"
        link = min((room.worst_link(host, kind) for host in able), key=link_rank)
        for tp in (1, 2, 4, 8, 16):
            for dp in (1, 2, 4, 8, 16, 32) if model.num_experts else (1,):
                if max(sizes) < tp * dp <= sum(sizes) and legal_tp(model, tp):
                    whole = Parallelism(tp, 1, dp, tp * dp if dp > 1 else 1)
                    yield _Idea(kind, whole, link, where, -(-tp * dp // max(sizes)))


def _rate_per_gpu(pricer: Pricer, model: Model, idea: _Idea) -> float:
    wish, kind, parallelism = pricer.wish, idea.kind, idea.parallelism
    fitting = fitting_batch(wish, model, kind, parallelism, pricer.calibration)
    pace = pace_at(model, kind, parallelism, idea.link, pricer.calibration)
    if fitting is None or pace is None:
        return 0.0
    tokens, memory = fitting
    option = Option(kind, parallelism, idea.link, (), memory, pace, tokens)
    return tuned(pricer, model, option)[1] / parallelism.num_gpus
