"""The GPU pools of one deployment: as the inventory writes them, or as the search chooses; GPUs taken for each replica.

Not here: which layout is best (`choosing`), routers, the plan as a whole (`search`).
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynctl.core.hardware import GpuState, Host
from dynctl.core.inventory import DeploymentWish, HostEntry, PoolWish
from dynctl.core.model import Model
from dynctl.core.plan import Parallelism, Pool, Role
from dynctl.errors import PlanError
from dynctl.planner import options as sizes
from dynctl.planner.calibration import Calibration
from dynctl.planner.choosing import Trail, choose, settle, tuned
from dynctl.planner.grouping import num_nvlinks
from dynctl.planner.layouts import Choice, Part, Pricer
from dynctl.planner.limits import batched_tokens
from dynctl.planner.memory import legal_tp, unspreadable, unstartable
from dynctl.planner.options import Option, for_decoding
from dynctl.planner.pairing import RULE, leaning, pair_fault
from dynctl.planner.placement import (
    Allocation,
    GpuKind,
    Group,
    kind_of,
    left_out,
    matches,
    natural,
    replica_on,
    spread,
)
from dynctl.planner.refusing import refuse_fit
from dynctl.planner.spanning import OpenGpus, about_domains, better_elsewhere, over_hosts
from dynctl.planner.transfer import Fabric
from dynctl.planner.verdict import why_chosen


@dataclass(frozen=True, slots=True)
class Ground:
    """What all deployments of one plan share."""

    allocation: Allocation
    entries: Mapping[str, HostEntry]
    fabric: Fabric
    most_priced: int
    """Layouts that may be priced for one deployment."""
    calibration: Calibration
    advanced: bool = False


@dataclass(frozen=True, slots=True)
class Search:
    """What a layout was chosen with."""

    options: tuple[Option, ...]
    pricer: Pricer | None
    """None: nothing is known of how fast the GPUs are."""
    hosts: tuple[Host, ...]


@dataclass(slots=True)
class Draft:
    """One deployment while its parts come together."""

    wish: DeploymentWish
    model: Model | None
    pools: list[Pool] = field(default_factory=list)
    groups: dict[Role, list[Group]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    trail: Trail = field(default_factory=Trail)
    search: Search | None = None
    """None: the inventory fixes the pools, or no GPU is used."""


def gpu_hosts(wish: DeploymentWish, allocation: Allocation) -> tuple[Host, ...]:
    """Hosts with GPUs, of which one at least is free.

    Raises:
        PlanError: when there is none; says what the hosts have instead.
    """
    hosts = tuple(host for host in allocation.hosts if host.gpus)
    if not hosts:
        raise PlanError(
            f"deployment {wish.name}: engine {wish.engine.kind} needs GPUs and no host has one",
            "use engine kind sim, or device: cpu on hosts with cpu_slots, or add hosts with GPUs",
        )
    if allocation.num_free(hosts) == 0:
        reasons = left_out(hosts)
        why = "; ".join(reasons) if reasons else "other deployments of this plan take all"
        states = {gpu.state for host in hosts for gpu in host.gpus}
        raise PlanError(
            f"deployment {wish.name}: no GPU is free: {why}",
            "describe them anew: dynctl discover, or all that dynctl discover --script prints, says how they are"
            if states == {GpuState.UNKNOWN}
            else "free some (dynctl discover shows who holds them), or plan fewer replicas elsewhere",
        )
    return hosts


def searched_pools(draft: Draft, ground: Ground, hosts: Sequence[Host]) -> None:
    """Let the planner decide.

    Raises:
        PlanError: when no layout fits, or none reaches the goals.
    """
    wish, model, trail = draft.wish, _known_model(draft), draft.trail
    options, misfits = sizes.options_for(
        wish, model, ground.allocation, hosts, ground.calibration, advanced=ground.advanced
    )
    trail.misfits = misfits
    if not options:
        raise _no_option(wish, model, ground, hosts, misfits)
    pricer: Pricer | None = None
    if all(option.pace is None for option in options):
        option = min(options, key=lambda o: (o.size, o.kind))
        part = Part(Role.AGGREGATED, option, 1, option.groups)
        draft.reasons.append(
            f"no figures for {option.kind.name}: nothing estimated, the smallest size that fits is taken"
        )
        groups = _take_part(ground, part, wish.name)
        _add_pool(draft, ground, part.role, option.parallelism, groups, option)
    else:
        pricer = Pricer(wish, ground.fabric, ground.most_priced, ground.calibration)
        choice = _first_that_fits(draft, ground, choose(pricer, model, options, trail))
        settle(trail, choice)
        draft.reasons += why_chosen(wish, model, trail, ground.fabric, ground.calibration)
        draft.reasons += _about_pairs(draft)
    draft.search = Search(tuple(options), pricer, tuple(hosts))


def about_the_rest(draft: Draft, ground: Ground) -> list[str]:
    """What is true of a searched layout only once all deployments are placed: what would bear more, what stays free."""
    search = draft.search
    if search is None:
        return []
    mine = [group for groups in draft.groups.values() for group in groups]
    reasons = []
    if search.pricer is not None:
        open_to = ground.allocation.open_to
        room = OpenGpus(search.hosts, {h.name: open_to(h, mine) for h in search.hosts})
        model = _known_model(draft)
        reasons += better_elsewhere(search.pricer, model, search.options, draft.trail, room)
        reasons += about_domains(search.hosts, {group.host.name for group in mine})
    free = ground.allocation.num_free(search.hosts, {option.kind for option in search.options})
    if free:
        free_text = "1 GPU stays" if free == 1 else f"{free} GPUs stay"
        reasons.append(
            f"{free_text} free: raise workload.rate_rps, tighten slo, or write pools: to use them"
        )
    return reasons


def _no_option(
    wish: DeploymentWish,
    model: Model,
    ground: Ground,
    hosts: Sequence[Host],
    misfits: Sequence[sizes.Misfit],
) -> PlanError:
    if misfits:
        spanning = over_hosts(wish, model, ground.allocation, hosts, ground.calibration)
        return refuse_fit(wish, model, misfits, ground.calibration, spanning)
    return PlanError(
        f"deployment {wish.name}: {model.num_heads} attention heads divide over no group of GPUs there is",
        "free more GPUs in one host",
    )


def _known_model(draft: Draft) -> Model:
    if draft.model is None:
        raise PlanError(
            f"deployment {draft.wish.name}: the shape of {draft.wish.model} is unknown, so no layout can be chosen",
            "write pools: with replicas and tp, which is then not checked against memory",
        )
    return draft.model


def _first_that_fits(draft: Draft, ground: Ground, choices: Sequence[Choice]) -> Choice:
    """Take the best layout that can really be placed: sizes of one kind may get into each other's way."""
    allocation, name = ground.allocation, draft.wish.name
    for choice in choices:
        taken: dict[int, list[Group]] = {}
        for i in sorted(range(len(choice.parts)), key=lambda i: -choice.parts[i].option.size):
            taken[i] = _take_part(ground, choice.parts[i], name)
            if len(taken[i]) < choice.parts[i].count:
                break
        else:
            for i, part in enumerate(choice.parts):
                _add_pool(draft, ground, part.role, part.option.parallelism, taken[i], part.option)
            return choice
        for i, groups in taken.items():
            allocation.give_back(groups, name, choice.parts[i].role)
    raise PlanError(
        f"deployment {name}: the layouts that reach the goals cannot be placed side by side",
        "write pools: with the sizes you want",
    )


def _take_part(ground: Ground, part: Part, name: str) -> list[Group]:
    """Take the groups of a part, fewer when there are not enough."""
    allocation, option = ground.allocation, part.option
    groups: list[Group] = []
    able = [h for h in allocation.hosts if h.name in {g.host.name for g in part.groups}]
    while len(groups) < part.count:
        group = allocation.take_group(part.groups, name, part.role)
        if group is None:
            # Another size took GPUs of these groups: what is left is grouped anew.
            again = sizes.groups_of(allocation, able, option.kind, option.parallelism, option.link)
            group = allocation.take_group(again, name, part.role)
        if group is None:
            break
        groups.append(group)
    return groups


def explicit_pools(draft: Draft, ground: Ground, hosts: Sequence[Host]) -> None:
    """Honour the inventory's pools exactly.

    Raises:
        PlanError: when one cannot be had, with what binds.
    """
    draft.reasons.append("pools as the inventory asks for them")
    for number, pool in enumerate(draft.wish.pools):
        _explicit_pool(draft, number, pool, ground, hosts)
    draft.reasons += _about_pairs(draft)


def _about_pairs(draft: Draft) -> list[str]:
    """Whether prefill and decode pools of different shapes may hand over to each other, and by which rule."""
    shapes = {
        role: {
            (kind_of(group.gpus[0]), pool.parallelism)
            for pool, group in zip(
                (p for p in draft.pools if p.role is role for _ in p.replicas),
                draft.groups.get(role, ()),
                strict=True,
            )
        }
        for role in (Role.PREFILL, Role.DECODE)
    }
    pairs = sorted(((p, d) for p in shapes[Role.PREFILL] for d in shapes[Role.DECODE]), key=str)
    if draft.model is not None:
        for (one, p), (other, d) in pairs:
            if fault := pair_fault(draft.model, one, p, other, d):
                return [f"prefill and decode may not fit: {fault} (vLLM NixlConnector matrix)"]
    if any(p.tp != d.tp for (_, p), (_, d) in pairs):
        return [f"prefill and decode differ in tp: {RULE}"]
    return []


def _explicit_pool(
    draft: Draft, number: int, pool: PoolWish, ground: Ground, hosts: Sequence[Host]
) -> None:
    wish, allocation = draft.wish, ground.allocation
    size = pool.parallelism.num_gpus // max(1, pool.nodes)
    where = f"deployment {wish.name}: pool {number + 1} ({pool.role.value})"
    if pool.replicas < 1 or size < 1:
        raise PlanError(
            f"{where} asks for {pool.replicas} replicas of {size} GPUs", "ask for at least one"
        )
    allowed = [h for h in hosts if matches(ground.entries.get(h.name), h.name, pool.hosts)]
    if not allowed:
        raise PlanError(
            f"{where}: no host with GPUs matches {', '.join(pool.hosts)}", "see dynctl discover"
        )
    if draft.model is not None and not legal_tp(draft.model, pool.parallelism.tp):
        raise PlanError(
            f"{where}: tp {pool.parallelism.tp} does not divide the {draft.model.num_heads} attention heads "
            f"({draft.model.num_kv_heads} KV heads) of {draft.model.name}",
            "choose a power of two that does",
        )
    if fault := unstartable(draft.model, pool.parallelism) or unspreadable(pool):
        raise PlanError(f"{where}: {fault[0]}", fault[1])
    if (
        draft.model is not None
        and draft.model.num_experts
        and pool.parallelism.ep == 1 < pool.parallelism.dp
    ):
        draft.reasons.append(
            f"without ep vLLM slices experts over all ranks of a {pool.role.value} engine; priced is each rank with its own, "
            "which takes more memory and no exchange"
        )
    kinds = _fitting_kinds(draft, where, pool, ground, allowed)
    engines = _take_pool(draft, pool, kinds, allocation, allowed)
    if len(engines) < pool.replicas:
        raise _too_few(where, pool, len(engines), size, allowed)
    groups = [engine[0] for engine in engines]
    option = None
    if draft.model is not None:
        option = sizes.option_of(wish, draft.model, pool.parallelism, groups, ground.calibration)
        if pool.nodes > 1:
            option = replace(option, pace=None)
        if option.pace is not None and pool.role is Role.AGGREGATED:
            pricer = Pricer(wish, ground.fabric, ground.most_priced, ground.calibration)
            option, _ = tuned(pricer, draft.model, option)
    _add_pool(draft, ground, pool.role, pool.parallelism, groups, option, engines)


def _too_few(where: str, pool: PoolWish, got: int, size: int, hosts: Sequence[Host]) -> PlanError:
    largest = max((len(h.gpus) for h in hosts), default=0)
    if pool.nodes > 1:
        return PlanError(
            f"{where} asks for {pool.replicas} engines over {pool.nodes} hosts each, with {size} GPUs of one kind on every one; "
            f"the free ones give {got}",
            f"ask for {got} replicas" if got else "ask for fewer nodes, or smaller engines",
        )
    return PlanError(
        f"{where} asks for {pool.replicas} × {size} GPUs; the free ones give {got} such groups, each inside one host "
        f"(the largest has {largest} GPUs)",
        f"ask for {got} replicas"
        if got
        else "ask for smaller engines, or for engines over several hosts with nodes: 2 or more",
    )


def _fitting_kinds(
    draft: Draft, where: str, pool: PoolWish, ground: Ground, hosts: Sequence[Host]
) -> list[GpuKind]:
    """Kinds whose memory the model fits; all of them when its shape is unknown. What suits the role comes first."""
    kinds = list(ground.allocation.kinds(hosts))
    roles = {each.role for each in draft.wish.pools}
    if Role.PREFILL in roles:
        sign = -1 if pool.role is Role.PREFILL else 1
        kinds.sort(key=lambda kind: (sign * leaning(kind), kind.name))
    if draft.model is None:
        return kinds
    misfits, fitting = [], []
    for kind in kinds:
        asked = (draft.wish, draft.model, kind, pool.parallelism, ground.calibration)
        if sizes.fitting_batch(*asked) is not None:
            fitting.append(kind)
        else:
            misfits.append(sizes.misfit(*asked))
    if kinds and not fitting:
        error = refuse_fit(draft.wish, draft.model, misfits, ground.calibration)
        raise PlanError(f"{where}: {error.message.partition(': ')[2]}", error.hint)
    return fitting


def _take_pool(
    draft: Draft,
    pool: PoolWish,
    kinds: Sequence[GpuKind],
    allocation: Allocation,
    hosts: Sequence[Host],
) -> list[list[Group]]:
    """Take the groups of a pool's engines, one on each of an engine's hosts; of one kind if enough is there, else kind after kind."""
    share = _share(pool)
    found = {kind: sizes.groups_of(allocation, hosts, kind, share) for kind in kinds}
    enough = [kind for kind in kinds if len(found[kind]) >= pool.replicas * pool.nodes]
    engines: list[list[Group]] = []
    for kind in enough[:1] or kinds:
        while len(engines) < pool.replicas:
            groups: list[Group] = []
            for _ in range(pool.nodes):
                taken = {one.host.name for one in groups}
                able = [g for g in found[kind] if g.host.name not in taken]
                group = allocation.take_group(able, draft.wish.name, pool.role)
                if group is not None:
                    groups.append(group)
            if len(groups) < pool.nodes:
                allocation.give_back(groups, draft.wish.name, pool.role)
                break
            engines.append(groups)
    return engines


def _share(pool: PoolWish) -> Parallelism:
    """What of an engine is on each of its hosts: whole pipeline stages, or a part of one."""
    whole = pool.parallelism
    if pool.nodes == 1:
        return whole
    size = whole.num_gpus // pool.nodes
    tp = min(whole.tp, size)
    return Parallelism(tp, size // tp)


def _add_pool(
    draft: Draft,
    ground: Ground,
    role: Role,
    parallelism: Parallelism,
    groups: Sequence[Group],
    option: Option | None,
    engines: Sequence[Sequence[Group]] = (),
) -> None:
    """Make replicas of groups, and say what is worth knowing of them; `option` is what they are, None: not known.

    `engines` has, for each, all its groups where an engine is over several hosts.
    """
    name, size, allocation = draft.wish.name, parallelism.num_gpus, ground.allocation
    start = sum(len(pool.replicas) for pool in draft.pools if pool.role is role)
    replicas = tuple(
        replica_on(
            group,
            f"{name}-{role.value}-{start + i}",
            role,
            None if role is Role.AGGREGATED else allocation.side_channel_port(group.host, size),
        )
        for i, group in enumerate(groups)
    )
    if any(len(parts) > 1 for parts in engines):
        replicas = tuple(
            spread(replica, parts, allocation.rendezvous_port(parts[0].host))
            for replica, parts in zip(replicas, engines, strict=True)
        )
    draft.groups.setdefault(role, []).extend(groups)
    pool = Pool(role, parallelism, replicas)
    if option is not None and draft.model is not None:
        if role is Role.DECODE:
            option = for_decoding(draft.wish, draft.model, option, ground.calibration)
        batched = batched_tokens(draft.wish, option.kind, option.max_num_batched_tokens, role)
        pool = replace(pool, memory=option.memory, max_num_batched_tokens=batched)
    draft.pools.append(pool)
    if len({kind_of(g.gpus[0]) for g in groups}) > 1:
        draft.reasons.append(f"the {role.value} pool mixes GPU kinds, each engine on one kind")
    slow = [
        g
        for g in groups
        if parallelism.tp > 1 and not num_nvlinks(sizes.worst_link(g, Parallelism(parallelism.tp)))
    ]
    if slow:
        where = ", ".join(sorted({g.host.name for g in slow}, key=natural))
        odd = any(map(sizes.lacks_nvlink, slow))
        but = ", whose cards should have it: dynctl doctor" if odd else ""
        draft.reasons.append(f"{role.value}: tensor parallelism without NVLink on {where}{but}")
