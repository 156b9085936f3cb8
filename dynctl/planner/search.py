"""From what there is and what is wished to a Plan: every deployment in turn, engines, ports and routers placed.

Not here: formulas (`memory`, `roofline`, `estimate`), pricing and choosing layouts (`options`, `layouts`, `choosing`),
taking GPUs (`pools`, `placement`).
Pure: the same cluster and wishes give the same plan, in whatever order hosts come.
"""

from collections.abc import Mapping, Sequence

from dynctl.core.hardware import Host, Topology
from dynctl.core.inventory import DeploymentWish, Inventory
from dynctl.core.model import Model
from dynctl.core.plan import (
    Estimate,
    Plan,
    PlannedDeployment,
    PlannedHost,
    Replica,
    Role,
    RouterPlan,
)
from dynctl.errors import PlanError
from dynctl.planner import options as sizes
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.choosing import Trail
from dynctl.planner.digest import with_digest
from dynctl.planner.engines import Need, need_of, plan_free_engines
from dynctl.planner.forecast import price
from dynctl.planner.limits import (
    about_length,
    block_size,
    declared,
    max_model_len,
    max_num_seqs,
    memory_share,
    refuse_length,
)
from dynctl.planner.memory import rank_tokens
from dynctl.planner.placement import Allocation, left_out, natural
from dynctl.planner.pools import (
    Draft,
    Ground,
    about_the_rest,
    explicit_pools,
    gpu_hosts,
    searched_pools,
)
from dynctl.planner.transfer import Fabric, about_rdma
from dynctl.planner.verdict import judge

MOST_PRICED = 120_000
"""Layouts priced for one plan, shared by its deployments: a bound in work, not in time, so that plans do not depend on
the machine. About 5 s on one core."""
LEAST_PRICED = 1_500


def make_plan(
    topology: Topology,
    inventory: Inventory,
    models: Mapping[str, Model | None],
    trails: dict[str, Trail] | None = None,
    calibration: Calibration | None = None,
    *,
    advanced: bool = False,
) -> Plan:
    """Lay out every deployment. `models` holds the shape per deployment name; None: unknown, or needed by no engine.

    `trails` takes in how each layout was found; `calibration` None: the shipped one; `advanced` opens pipelines also where nothing needs them.

    Raises:
        PlanError: when a deployment cannot be laid out; one sentence with the binding limit, and the nearest change.
    """
    if not topology.hosts:
        raise PlanError("no host was described, so nothing can be planned", "see dynctl discover")
    if not inventory.deployments:
        raise PlanError("the inventory has no deployment", "add one under deployments:")
    ground = Ground(
        Allocation(topology.hosts, inventory.port_base, inventory.port_count),
        {entry.name: entry for entry in inventory.hosts},
        Fabric.of(topology),
        max(LEAST_PRICED, MOST_PRICED // len(inventory.deployments)),
        calibration or shipped(),
        advanced,
    )
    allocation = ground.allocation
    drafts = [_draft(wish, models.get(wish.name), ground) for wish in inventory.deployments]
    for draft in drafts:
        draft.reasons += about_the_rest(draft, ground)
    if trails is not None:
        trails.update({draft.wish.name: draft.trail for draft in drafts})
    deployments: list[PlannedDeployment] = []
    for draft in drafts:
        router = _router(draft.wish, allocation, deployments)
        deployments.append(_finish(draft, router, ground))
    return with_digest(
        Plan(
            cluster=inventory.cluster,
            hosts=_hosts(deployments, allocation),
            deployments=tuple(deployments),
            warnings=_warnings(topology, deployments, drafts),
        )
    )


def _draft(wish: DeploymentWish, model: Model | None, ground: Ground) -> Draft:
    sizes.check_wishes(wish)
    refuse_length(wish, model)
    _check_roles(wish)
    draft = Draft(wish, model)
    need = need_of(wish)
    if need is not Need.GPUS:
        pools, reasons = plan_free_engines(wish, model, ground.allocation, ground.entries, need)
        draft.pools += pools
        draft.reasons += reasons
        return draft
    hosts = gpu_hosts(wish, ground.allocation)
    if wish.pools:
        explicit_pools(draft, ground, hosts)
    else:
        searched_pools(draft, ground, hosts)
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


def _finish(draft: Draft, router: RouterPlan, ground: Ground) -> PlannedDeployment:
    wish, allocation = draft.wish, ground.allocation
    # All engines of a deployment take requests of one length, so the one that holds least decides it.
    room = min(
        (rank_tokens(p.memory, p.parallelism) for p in draft.pools if p.memory is not None),
        default=None,
    )
    figures: Estimate | None
    figures, priced = price(
        wish, draft.model, draft.pools, draft.groups, ground.fabric, ground.calibration
    )
    verdict = judge(draft.pools)
    reasons = [*draft.reasons, *priced, *about_length(wish, draft.model)]
    considered = allocation.hosts if draft.groups else ()
    reasons += [*left_out(considered), *about_rdma(considered)]
    host = next(h for h in allocation.hosts if h.name == router.host_name)
    if wish.router.host is None and len(allocation.hosts) > 1:
        reasons.append(_why_router(host, allocation))
    is_known = (bool(draft.groups) and room is not None) or wish.engine.kind == "sim"
    return PlannedDeployment(
        name=wish.name,
        model=wish.model,
        engine_kind=wish.engine.kind,
        pools=tuple(draft.pools),
        router=router,
        max_model_len_tokens=max_model_len(wish, draft.model, room),
        max_num_seqs=max_num_seqs(wish) if is_known else declared(wish, "max_num_seqs"),
        gpu_memory_utilization=memory_share(wish) if draft.groups else None,
        block_size_tokens=block_size(wish) if is_known else declared(wish, "block_size_tokens"),
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
    replicas = [r for d in deployments for p in d.pools for r in p.replicas]
    used |= {member.host_name for replica in replicas for member in replica.members}
    return tuple(
        PlannedHost(host.name, host.machine_id, host.data_address, allocation.relay_port(host))
        for host in allocation.hosts
        if host.name in used
    )


def _warnings(
    topology: Topology, deployments: Sequence[PlannedDeployment], drafts: Sequence[Draft]
) -> tuple[str, ...]:
    """What a reader of the plan must know beside it."""
    used: set[str] = set()
    for deployment in deployments:
        replicas: list[Replica] = [r for pool in deployment.pools for r in pool.replicas]
        used |= {gpu.uuid for r in replicas for member in r.members for gpu in member.gpus}
    found = [
        f"{host.name}: the GPUs are simulated; this plan can be read but not started"
        for host in sorted(topology.hosts, key=lambda h: natural(h.name))
        if any(gpu.is_simulated and gpu.uuid in used for gpu in host.gpus)
    ]
    if topology.failures:
        names = ", ".join(sorted((f.name for f in topology.failures), key=natural))
        found.append(f"planned without {names}: not described")
    short = [draft.wish.name for draft in drafts if draft.trail.is_cut_short]
    if short:
        found.append(
            f"the search was cut short for {', '.join(short)}: these layouts are the best so far"
        )
    return tuple(found)
