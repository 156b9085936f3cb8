"""From what there is and what is wished to a Plan: every deployment in turn, engines, ports and routers placed.

Not here: formulas (`memory`, `roofline`, `estimate`), pricing sizes (`options`), taking GPUs (`placement`).
Pure: the same cluster and wishes give the same plan, in whatever order hosts come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynctl.core.hardware import Host, Topology
from dynctl.core.inventory import DeploymentWish, HostEntry, Inventory, PoolWish
from dynctl.core.model import Model
from dynctl.core.plan import (
    Estimate,
    MemorySheet,
    Parallelism,
    Plan,
    PlannedDeployment,
    PlannedHost,
    Pool,
    Replica,
    Role,
    RouterPlan,
    Sourced,
)
from dynctl.errors import PlanError
from dynctl.planner import options as sizes
from dynctl.planner.digest import with_digest
from dynctl.planner.engines import Need, need_of, plan_free_engines
from dynctl.planner.memory import legal_tp, sheet
from dynctl.planner.placement import (
    Allocation,
    GpuKind,
    Group,
    kind_of,
    left_out,
    matches,
    natural,
    replica_on,
)
from dynctl.planner.verdict import judge, price


@dataclass(slots=True)
class _Drafted:
    """One deployment while its parts come together."""

    wish: DeploymentWish
    model: Model | None
    pools: list[Pool] = field(default_factory=list)
    groups: dict[Role, list[Group]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def make_plan(topology: Topology, inventory: Inventory, models: Mapping[str, Model | None]) -> Plan:
    """Lay out every deployment. `models` holds the shape per deployment name; None: unknown, or needed by no engine.

    Raises:
        PlanError: when a deployment cannot be laid out; one sentence with the binding limit, and the nearest change.
    """
    if not topology.hosts:
        raise PlanError("no host was described, so nothing can be planned", "see dynctl discover")
    if not inventory.deployments:
        raise PlanError("the inventory has no deployment", "add one under deployments:")
    allocation = Allocation(topology.hosts, inventory.port_base, inventory.port_count)
    entries = {entry.name: entry for entry in inventory.hosts}
    drafts = [
        _draft(wish, models.get(wish.name), allocation, entries) for wish in inventory.deployments
    ]
    deployments: list[PlannedDeployment] = []
    for draft in drafts:
        router = _router(draft.wish, allocation, deployments)
        deployments.append(_finish(draft, router, allocation))
    return with_digest(
        Plan(
            cluster=inventory.cluster,
            hosts=_hosts(deployments, allocation),
            deployments=tuple(deployments),
            warnings=_warnings(topology, deployments),
        )
    )


def _draft(
    wish: DeploymentWish,
    model: Model | None,
    allocation: Allocation,
    entries: Mapping[str, HostEntry],
) -> _Drafted:
    sizes.check_wishes(wish)
    _check_roles(wish)
    draft = _Drafted(wish, model)
    need = need_of(wish)
    if need is not Need.GPUS:
        pools, reasons = plan_free_engines(wish, model, allocation, entries, need)
        draft.pools += pools
        draft.reasons += reasons
        return draft
    hosts = _gpu_hosts(wish, allocation)
    if wish.pools:
        for number, pool in enumerate(wish.pools):
            _explicit_pool(draft, number, pool, allocation, hosts, entries)
        draft.reasons.append("pools as the inventory asks for them")
    else:
        _searched_pools(draft, allocation, hosts)
    return draft


def _check_roles(wish: DeploymentWish) -> None:
    roles = {pool.role for pool in wish.pools}
    for one, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if one in roles and other not in roles:
            raise PlanError(
                f"deployment {wish.name}: a {one.value} pool without a {other.value} pool serves nothing",
                f"add a pool with role: {other.value}, or make it role: aggregated",
            )
    if Role.AGGREGATED in roles and len(roles) > 1:
        raise PlanError(
            f"deployment {wish.name}: aggregated and prefill/decode pools cannot be mixed in one deployment",
            "split it into two deployments",
        )


def _gpu_hosts(wish: DeploymentWish, allocation: Allocation) -> tuple[Host, ...]:
    """Hosts with a free GPU.

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
        raise PlanError(
            f"deployment {wish.name}: no GPU is free: {why}",
            "free some (dynctl discover shows who holds them), or plan fewer replicas elsewhere",
        )
    return hosts


def _searched_pools(draft: _Drafted, allocation: Allocation, hosts: Sequence[Host]) -> None:
    """Let the planner decide."""
    wish = draft.wish
    model = _known_model(draft)
    options, misfits = sizes.options_for(wish, model, allocation, hosts)
    if not options:
        if misfits:
            raise sizes.refuse_fit(wish, model, misfits)
        raise PlanError(
            f"deployment {wish.name}: {model.num_heads} attention heads divide over no group of GPUs there is",
            "free more GPUs in one host",
        )
    choice, reasons = sizes.choose(wish, options)
    option = choice.option
    parallelism = Parallelism(tp=option.tp)
    roles = (
        [(Role.PREFILL, choice.num_prefill), (Role.DECODE, choice.num_decode)]
        if choice.num_decode
        else [(Role.AGGREGATED, choice.num_prefill)]
    )
    for role, count in roles:
        _take(draft, role, count, parallelism, [option.kind], allocation, hosts)
    draft.reasons += reasons
    free = allocation.num_free(hosts)
    if free:
        draft.reasons.append(
            f"{free} GPUs stay free: raise workload.rate_rps, tighten slo, or write pools: to use them"
        )


def _known_model(draft: _Drafted) -> Model:
    if draft.model is None:
        raise PlanError(
            f"deployment {draft.wish.name}: the shape of {draft.wish.model} is unknown, so no layout can be chosen",
            "write pools: with replicas and tp, which is then not checked against memory",
        )
    return draft.model


def _explicit_pool(
    draft: _Drafted,
    number: int,
    pool: PoolWish,
    allocation: Allocation,
    hosts: Sequence[Host],
    entries: Mapping[str, HostEntry],
) -> None:
    """Honour a pool exactly, or refuse it with what binds."""
    wish, size = draft.wish, pool.parallelism.num_gpus
    where = f"deployment {wish.name}: pool {number + 1} ({pool.role.value})"
    if pool.replicas < 1 or size < 1:
        raise PlanError(
            f"{where} asks for {pool.replicas} replicas of {size} GPUs", "ask for at least one"
        )
    allowed = [host for host in hosts if matches(entries.get(host.name), host.name, pool.hosts)]
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
    kinds = _fitting_kinds(draft, where, pool, allocation, allowed)
    got = _take(draft, pool.role, pool.replicas, pool.parallelism, kinds, allocation, allowed)
    if got < pool.replicas:
        largest = max((len(h.gpus) for h in allowed), default=0)
        raise PlanError(
            f"{where} asks for {pool.replicas} × {size} GPUs; the free ones give {got} such groups, each inside one host "
            f"(the largest has {largest} GPUs)",
            f"ask for {got} replicas"
            if got
            else "lower tp: engines over several hosts cannot be started yet",
        )


def _fitting_kinds(
    draft: _Drafted, where: str, pool: PoolWish, allocation: Allocation, hosts: Sequence[Host]
) -> list[GpuKind]:
    """Kinds whose memory the model fits; all of them when its shape is unknown."""
    kinds = list(allocation.kinds(hosts))
    if draft.model is None:
        return kinds
    misfits, fitting = [], []
    for kind in kinds:
        room = sizes.room_of(draft.wish, kind.memory_bytes)
        found = sheet(draft.model, pool.parallelism, room)
        if found.kv_capacity_tokens >= sizes.needed_tokens(draft.wish):
            fitting.append(kind)
        else:
            misfits.append(sizes.misfit(draft.wish, draft.model, kind, pool.parallelism, found))
    if kinds and not fitting:
        error = sizes.refuse_fit(draft.wish, draft.model, misfits)
        raise PlanError(f"{where}: {error.message.partition(': ')[2]}", error.hint)
    return fitting


def _take(
    draft: _Drafted,
    role: Role,
    count: int,
    parallelism: Parallelism,
    kinds: Sequence[GpuKind],
    allocation: Allocation,
    hosts: Sequence[Host],
) -> int:
    """Take groups for a pool, of one kind if enough of it is there, else kind after kind; return how many were had."""
    name, size = draft.wish.name, parallelism.num_gpus
    counts = {kind: len(allocation.all_groups(hosts, kind, size)) for kind in kinds}
    enough = [kind for kind in kinds if counts[kind] >= count]
    groups: list[Group] = []
    for kind in enough[:1] or kinds:
        while len(groups) < count:
            group = allocation.take_group(hosts, kind, size, name, role)
            if group is None:
                break
            groups.append(group)
    if not groups:
        return 0
    start = sum(len(pool.replicas) for pool in draft.pools if pool.role is role)
    replicas = tuple(
        replica_on(
            group,
            f"{name}-{role.value}-{start + i}",
            role,
            None
            if role is Role.AGGREGATED
            else allocation.side_channel_port(group.host, parallelism.num_gpus),
        )
        for i, group in enumerate(groups)
    )
    draft.groups.setdefault(role, []).extend(groups)
    draft.pools.append(Pool(role, parallelism, replicas, _sheet(draft, parallelism, groups)))
    if len({kind_of(g.gpus[0]) for g in groups}) > 1:
        draft.reasons.append(f"the {role.value} pool mixes GPU kinds, each engine on one kind")
    slow = [g for g in groups if size > 1 and not g.is_on_nvlink()]
    if slow:
        where = ", ".join(sorted({g.host.name for g in slow}, key=natural))
        draft.reasons.append(f"{role.value}: tensor parallelism without NVLink on {where}")
    return len(groups)


def _sheet(
    draft: _Drafted, parallelism: Parallelism, groups: Sequence[Group]
) -> MemorySheet | None:
    """The sheet of the smallest GPU of a pool."""
    if draft.model is None:
        return None
    smallest = min(gpu.memory_bytes for group in groups for gpu in group.gpus)
    return sheet(draft.model, parallelism, sizes.room_of(draft.wish, smallest))


def _router(
    wish: DeploymentWish, allocation: Allocation, before: Sequence[PlannedDeployment]
) -> RouterPlan:
    """Where the entrance runs: as wished, else on a host without GPUs if there is one."""
    wanted = wish.router.host
    if wanted is not None:
        found = [host for host in allocation.hosts if host.name == wanted]
        if not found:
            raise PlanError(
                f"deployment {wish.name}: router.host {wanted} is not among the described hosts",
                "see dynctl discover, or leave router.host out",
            )
        host = found[0]
    else:
        host = allocation.router_host(allocation.hosts)
    for other in before:
        if (other.router.host_name, other.router.listen) == (host.name, wish.router.listen):
            raise PlanError(
                f"deployments {other.name} and {wish.name} both listen on {wish.router.listen} of {host.name}",
                f"give {wish.name} another router.listen",
            )
    return RouterPlan(host.name, wish.router.listen, wish.router.policy)


def _finish(draft: _Drafted, router: RouterPlan, allocation: Allocation) -> PlannedDeployment:
    wish = draft.wish
    memory = next((pool.memory for pool in draft.pools if pool.memory is not None), None)
    figures: Estimate | None
    figures, priced = price(wish, draft.model, draft.pools, draft.groups)
    verdict = judge(draft.pools)
    reasons = [*draft.reasons, *priced, *left_out(allocation.hosts if draft.groups else ())]
    host = next(h for h in allocation.hosts if h.name == router.host_name)
    if wish.router.host is None and len(allocation.hosts) > 1:
        reasons.append(_why_router(host, allocation))
    limit = wish.limits.max_num_seqs
    return PlannedDeployment(
        name=wish.name,
        model=wish.model,
        engine_kind=wish.engine.kind,
        pools=tuple(draft.pools),
        router=router,
        max_model_len_tokens=sizes.max_model_len(wish, draft.model, memory),
        max_num_seqs=None if limit is None else Sourced(limit, "declared in the inventory"),
        estimate=figures,
        verdict=verdict,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _why_router(host: Host, allocation: Allocation) -> str:
    if not host.gpus and any(h.gpus for h in allocation.hosts):
        return f"router on {host.name}: it has no GPUs"
    if not allocation.num_engines(host):
        return f"router on {host.name}: it runs no engine"
    return f"router on {host.name}: every host runs engines, it the fewest"


def _hosts(
    deployments: Sequence[PlannedDeployment], allocation: Allocation
) -> tuple[PlannedHost, ...]:
    """The hosts that run something, by name."""
    used = {d.router.host_name for d in deployments}
    used |= {r.host_name for d in deployments for p in d.pools for r in p.replicas}
    return tuple(
        PlannedHost(host.name, host.machine_id, host.data_address, allocation.relay_port(host))
        for host in allocation.hosts
        if host.name in used
    )


def _warnings(topology: Topology, deployments: Sequence[PlannedDeployment]) -> tuple[str, ...]:
    """What a reader of the plan must know beside it."""
    used: set[str] = set()
    for deployment in deployments:
        replicas: list[Replica] = [r for pool in deployment.pools for r in pool.replicas]
        used |= {gpu.uuid for replica in replicas for gpu in replica.gpus}
    found = [
        f"{host.name}: the GPUs are simulated; this plan can be read but not started"
        for host in sorted(topology.hosts, key=lambda h: natural(h.name))
        if any(gpu.is_simulated and gpu.uuid in used for gpu in host.gpus)
    ]
    if topology.failures:
        names = ", ".join(sorted((f.name for f in topology.failures), key=natural))
        found.append(f"planned without {names}: not described")
    return tuple(found)
