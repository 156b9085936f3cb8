"""Whether a plan, made before or edited by hand, still fits the cluster; and what to expect of it then.

Not here: changing anything, comparing with what runs.
Pure.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dynctl.core.hardware import GpuState, Host, Topology
from dynctl.core.inventory import DeploymentWish, Inventory
from dynctl.core.model import Model
from dynctl.core.plan import MemorySheet, Plan, PlannedDeployment, Pool, Replica, Role, Sourced
from dynctl.core.text import is_name
from dynctl.core.units import format_bytes
from dynctl.errors import PlanError
from dynctl.planner.digest import digest_of, with_digest
from dynctl.planner.engines import Need, cpu_room, need_of
from dynctl.planner.forecast import price
from dynctl.planner.limits import block_size, max_num_seqs, room_of, simulated_batched_tokens
from dynctl.planner.memory import legal_tp, sheet
from dynctl.planner.options import needed_tokens
from dynctl.planner.placement import Group, kind_of, natural, port_space
from dynctl.planner.transfer import Fabric
from dynctl.planner.verdict import judge

_MAX_SHOWN = 20
EDITED = "edited by hand since it was made: its digest was not that of its content"


@dataclass(frozen=True, slots=True)
class _Ground:
    plan: Plan
    hosts: Mapping[str, Host]
    wishes: Mapping[str, DeploymentWish]
    models: Mapping[str, Model | None]
    inventory: Inventory
    fabric: Fabric
    is_edited: bool
    """Its digest is not that of its content."""


def check_plan(
    plan: Plan, topology: Topology, inventory: Inventory, models: Mapping[str, Model | None]
) -> Plan:
    """Check a plan against the cluster and estimate it anew; a plan nobody touched comes back with the same bytes.

    Raises:
        PlanError: with everything that does not fit.
    """
    ground = _Ground(
        plan,
        {host.name: host for host in topology.hosts},
        {wish.name: wish for wish in inventory.deployments},
        models,
        inventory,
        Fabric.of(topology),
        plan.digest != digest_of(plan),
    )
    refuse_simulated(plan, topology)
    problems = list(dict.fromkeys(_problems(ground)))
    if problems:
        shown = problems[:_MAX_SHOWN]
        more = len(problems) - len(shown)
        text = "\n".join(f"  - {p}" for p in shown) + (f"\n  … and {more} more" if more else "")
        raise PlanError(
            f"the plan does not fit the cluster:\n{text}",
            "correct the plan, or make a new one with dynctl plan",
        )
    warnings = tuple(w for w in plan.warnings if w != EDITED) + (EDITED,) * ground.is_edited
    return with_digest(
        replace(
            plan,
            deployments=tuple(_priced(ground, d) for d in plan.deployments),
            warnings=warnings,
        )
    )


def refuse_simulated(plan: Plan, topology: Topology) -> None:
    """End when a plan stands on GPUs that were only declared.

    Raises:
        PlanError: naming the hosts.
    """
    declared = {
        gpu.uuid: host.name for host in topology.hosts for gpu in host.gpus if gpu.is_simulated
    }
    used = {
        declared[gpu.uuid]
        for _, _, replica in plan.replicas()
        for gpu in replica.gpus
        if gpu.uuid in declared
    }
    if used:
        raise PlanError(
            f"the GPUs of {', '.join(sorted(used, key=natural))} are simulated: this plan can be read but not started",
            "take simulated_gpus out of the inventory, or use engine kind sim",
        )


def _problems(ground: _Ground) -> Iterator[str]:
    yield from _host_problems(ground)
    yield from _name_problems(ground)
    yield from _gpu_problems(ground)
    yield from _port_problems(ground)
    for deployment in ground.plan.deployments:
        yield from _deployment_problems(ground, deployment)


def _host_problems(ground: _Ground) -> Iterator[str]:
    if ground.plan.cluster != ground.inventory.cluster:
        yield f"it is for cluster {ground.plan.cluster}, the inventory for {ground.inventory.cluster}"
    for planned in ground.plan.hosts:
        host = ground.hosts.get(planned.name)
        if host is None:
            yield f"host {planned.name} is not among the described hosts"
            continue
        if planned.machine_id != host.machine_id:
            yield f"host {planned.name} is another machine now (machine id {host.machine_id or 'unknown'})"
        if planned.data_address != host.data_address:
            yield (
                f"host {planned.name} has data address {host.data_address} now, "
                f"the plan says {planned.data_address}"
            )
    listed = {planned.name for planned in ground.plan.hosts}
    used = {d.router.host_name for d in ground.plan.deployments}
    used |= {replica.host_name for _, _, replica in ground.plan.replicas()}
    for name in sorted(used - listed):
        yield f"host {name} is used but not listed under hosts"


def _name_problems(ground: _Ground) -> Iterator[str]:
    ids = Counter(replica.id for _, _, replica in ground.plan.replicas())
    for replica_id, count in ids.items():
        if count > 1:
            yield f"replica id {replica_id} is used {count} times"
        if not is_name(replica_id):
            yield f"replica id {replica_id!r} is no name: letters, digits, dot, dash, underscore"
    names = [deployment.name for deployment in ground.plan.deployments]
    for name in sorted(set(names) - set(ground.wishes)):
        yield f"deployment {name} is not in the inventory"
    for name in sorted(set(ground.wishes) - set(names)):
        yield f"deployment {name} of the inventory is missing"


def _gpu_problems(ground: _Ground) -> Iterator[str]:
    uses = Counter(gpu.uuid for _, _, replica in ground.plan.replicas() for gpu in replica.gpus)
    for uuid, count in uses.items():
        if count > 1:
            yield f"GPU {uuid} is used {count} times"
    for _, _, replica in ground.plan.replicas():
        host = ground.hosts.get(replica.host_name)
        known = {gpu.uuid: gpu for gpu in host.gpus} if host else {}
        for planned in replica.gpus:
            gpu = known.get(planned.uuid)
            if host is not None and gpu is None:
                yield f"{replica.id}: {host.name} has no GPU {planned.uuid}"
            elif gpu is not None and gpu.state is not GpuState.FREE:
                held = f", held by {gpu.holders}" if gpu.holders else ""
                yield f"{replica.id}: GPU {gpu.index} of {replica.host_name} is {gpu.state.value}{held}"
        if len({kind_of(known[g.uuid]) for g in replica.gpus if g.uuid in known}) > 1:
            yield f"{replica.id}: GPUs of different kinds in one engine"


def _port_problems(ground: _Ground) -> Iterator[str]:
    """Ports of hosts that share an address must not meet."""
    address = {planned.name: port_space(planned.data_address) for planned in ground.plan.hosts}
    uses: dict[tuple[str, int], list[str]] = {}
    for planned in ground.plan.hosts:
        uses.setdefault((address[planned.name], planned.relay_port), []).append(
            f"relay of {planned.name}"
        )
    for _, pool, replica in ground.plan.replicas():
        if replica.side_channel_port is not None:
            for rank in range(pool.parallelism.num_gpus):
                key = (
                    address.get(replica.host_name, replica.host_name),
                    replica.side_channel_port + rank,
                )
                uses.setdefault(key, []).append(f"side channel of {replica.id}")
    for deployment in ground.plan.deployments:
        host, port = deployment.router.host_name, deployment.router.listen.rpartition(":")[2]
        if port.isdigit():
            key = address.get(host, host), int(port)
            uses.setdefault(key, []).append(f"router of {deployment.name}")
    for (where, number), users in sorted(uses.items()):
        if len(users) > 1:
            yield f"port {number} of {where} is given to {' and '.join(users)}"


def _deployment_problems(ground: _Ground, planned: PlannedDeployment) -> Iterator[str]:
    wish = ground.wishes.get(planned.name)
    if wish is None:
        return
    if (planned.model, planned.engine_kind) != (wish.model, wish.engine.kind):
        yield (
            f"{planned.name}: the inventory asks for {wish.model} on {wish.engine.kind}, "
            f"the plan has {planned.model} on {planned.engine_kind}"
        )
        return
    roles = {pool.role for pool in planned.pools if pool.replicas}
    if not roles:
        yield f"{planned.name}: no replica"
    if (Role.PREFILL in roles) != (Role.DECODE in roles):
        yield f"{planned.name}: prefill and decode replicas need each other"
    need = need_of(wish)
    model = ground.models.get(planned.name)
    for pool in planned.pools:
        for replica in pool.replicas:
            yield from _replica_problems(ground, wish, pool, replica, need)
        if need is Need.GPUS and model is not None:
            if not legal_tp(model, pool.parallelism.tp):
                yield (
                    f"{planned.name}: tp {pool.parallelism.tp} does not divide the {model.num_heads} heads of {model.name}"
                )
            yield from _memory_problems(ground, wish, pool, model)


def _replica_problems(
    ground: _Ground, wish: DeploymentWish, pool: Pool, replica: Replica, need: Need
) -> Iterator[str]:
    size = pool.parallelism.num_gpus
    if need is Need.GPUS and len(replica.gpus) != size:
        yield f"{replica.id}: {len(replica.gpus)} GPUs for parallelism of {size}"
    if need is not Need.GPUS and replica.gpus:
        yield f"{replica.id}: engine {wish.engine.kind} takes no GPUs"
    takes_port = pool.role is not Role.AGGREGATED and need is not Need.URL
    if takes_port and replica.side_channel_port is None:
        yield f"{replica.id}: a {pool.role.value} engine needs a side_channel_port"
    host = ground.hosts.get(replica.host_name)
    if need is Need.CPU_SLOTS and host is not None and not host.cpu_slots:
        yield f"{replica.id}: {host.name} declares no cpu_slots"


def _memory_problems(
    ground: _Ground, wish: DeploymentWish, pool: Pool, model: Model
) -> Iterator[str]:
    found = _sheet(ground, wish, pool, model)
    if found is not None and found.kv_capacity_tokens < needed_tokens(wish):
        yield (
            f"{wish.name}: {model.name} with tp {pool.parallelism.tp} leaves room for {found.kv_capacity_tokens} KV tokens "
            f"per engine ({format_bytes(max(0, found.kv_bytes))} per GPU), {needed_tokens(wish)} are needed"
        )


def _sheet(
    ground: _Ground, wish: DeploymentWish, pool: Pool, model: Model | None
) -> MemorySheet | None:
    if model is None:
        return None
    need = need_of(wish)
    if need is Need.CPU_SLOTS:
        hosts = [ground.hosts[r.host_name] for r in pool.replicas if r.host_name in ground.hosts]
        return cpu_room(wish, model, hosts) if hosts else None
    if need is not Need.GPUS:
        return None
    sizes = [gpu.memory_bytes for group in _groups(ground, pool) for gpu in group.gpus]
    if not sizes:
        return None
    batched = pool.max_num_batched_tokens
    tokens = None if batched is None else int(batched.value)
    return sheet(model, pool.parallelism, room_of(wish, min(sizes), tokens))


def _groups(ground: _Ground, pool: Pool) -> list[Group]:
    found = []
    for replica in pool.replicas:
        host = ground.hosts.get(replica.host_name)
        if host is not None and replica.gpus:
            where = {gpu.uuid: i for i, gpu in enumerate(host.gpus)}
            found.append(Group(host, tuple(where[g.uuid] for g in replica.gpus if g.uuid in where)))
    return found


def _priced(ground: _Ground, planned: PlannedDeployment) -> PlannedDeployment:
    """The deployment with memory, estimate and verdict as they are now; its other reasons stay."""
    wish, model = ground.wishes[planned.name], ground.models.get(planned.name)
    planned = _told_what_was_edited(planned, wish)
    pools = tuple(replace(pool, memory=_sheet(ground, wish, pool, model)) for pool in planned.pools)
    groups: dict[Role, list[Group]] = {}
    for pool in pools:
        if taken := _groups(ground, pool):
            groups.setdefault(pool.role, []).extend(taken)
    figures, reasons = price(wish, model, pools, groups, ground.fabric)
    stale = (*PRICED, *CHOSEN) if ground.is_edited else PRICED
    texts = [r for r in planned.reasons if r.startswith(PRICED) or not r.startswith(stale)]
    kept = [r for r in texts if not r.startswith(PRICED)]
    at = next((i for i, r in enumerate(texts) if r.startswith(PRICED)), len(kept))
    return replace(
        planned,
        pools=pools,
        estimate=figures,
        verdict=judge(pools),
        reasons=tuple(dict.fromkeys([*kept[:at], *reasons, *kept[at:]])),
    )


def _told_what_was_edited(planned: PlannedDeployment, wish: DeploymentWish) -> PlannedDeployment:
    """A number that the engine is not told, but that somebody changed, is meant to be told."""

    def settled(written: Sourced | None, usual: Sourced) -> Sourced | None:
        if written is None or written.is_told or written.value == usual.value:
            return written
        return Sourced(written.value, "edited")

    return replace(
        planned,
        max_num_seqs=settled(planned.max_num_seqs, max_num_seqs(wish)),
        block_size_tokens=settled(planned.block_size_tokens, block_size(wish)),
        pools=tuple(
            replace(
                pool,
                max_num_batched_tokens=settled(
                    pool.max_num_batched_tokens, simulated_batched_tokens(wish)
                ),
            )
            for pool in planned.pools
        ),
    )


CHOSEN = (
    "gain of",
    "prompts in pieces",
    "prefill and decode differ",
    "prefill and decode may not fit",
    "do not disaggregate",
    "prefill and decode apart",
    "KV of a prompt",
    "not startable yet",
)
"""How the reasons begin that speak for a layout as it was chosen: they say nothing of one that was edited."""
PRICED = ("slo.", "overloaded at", "not estimated", "bears ")
"""How the reasons begin that `price` gives: they are replaced when a plan is priced again."""
