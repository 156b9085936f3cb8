"""Whether a plan, made before or edited by hand, still fits the cluster; and what to expect of it then.

Not here: changing anything, comparing with what runs.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynctl.core.hardware import Topology
from dynctl.core.inventory import DeploymentWish, Inventory, Limits
from dynctl.core.model import Model
from dynctl.core.plan import Plan, PlannedDeployment, Role, Sourced
from dynctl.errors import PlanError
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.digest import digest_of, with_digest
from dynctl.planner.faults import Ground, PlanFaultsError, faults_of, sheet_of
from dynctl.planner.forecast import price
from dynctl.planner.limits import block_size, max_num_seqs, simulated_batched_tokens
from dynctl.planner.placement import Group, natural, replica_groups
from dynctl.planner.transfer import Fabric
from dynctl.planner.verdict import judge

EDITED = "edited by hand since it was made: its digest was not that of its content"


def check_plan(
    plan: Plan,
    topology: Topology,
    inventory: Inventory,
    models: Mapping[str, Model | None],
    policies: Sequence[str] | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """Check a plan against the cluster and estimate it anew; a plan nobody touched comes back with the same bytes.

    `calibration` None: the shipped one.

    Raises:
        PlanFaultsError: with everything that does not fit.
    """
    ground = Ground(
        plan,
        {host.name: host for host in topology.hosts},
        {wish.name: wish for wish in inventory.deployments},
        models,
        inventory,
        Fabric.of(topology),
        plan.digest != digest_of(plan),
        policies,
        calibration or shipped(),
    )
    refuse_simulated(plan, topology)
    if faults := tuple(dict.fromkeys(faults_of(ground))):
        raise PlanFaultsError(faults)
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
        for member in replica.members
        for gpu in member.gpus
        if gpu.uuid in declared
    }
    if used:
        raise PlanError(
            f"the GPUs of {', '.join(sorted(used, key=natural))} are simulated: this plan can be read but not started",
            "take simulated_gpus out of the inventory, or use engine kind sim",
        )


def _priced(ground: Ground, planned: PlannedDeployment) -> PlannedDeployment:
    """The deployment with memory, estimate and verdict as they are now; its other reasons stay."""
    wish, model = ground.wishes[planned.name], ground.models.get(planned.name)
    planned = _told_what_was_edited(planned, wish)
    pools = tuple(
        replace(pool, memory=sheet_of(ground, wish, pool, model)) for pool in planned.pools
    )
    groups: dict[Role, list[Group]] = {}
    for pool in pools:
        if taken := replica_groups(pool, ground.hosts):
            groups.setdefault(pool.role, []).extend(taken.values())
    figures, reasons = price(wish, model, pools, groups, ground.fabric, ground.calibration)
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
    """A number that the engine is not told, but that somebody changed, is meant to be told.

    One that only the inventory gives another way was not changed here; told to the engine it would start it anew.
    """
    bare = replace(wish, limits=Limits(), engine=replace(wish.engine, args=()))

    def settled(written: Sourced | None, usual: Sourced) -> Sourced | None:
        if written is None or written.is_told or written.value == usual.value:
            return written
        return Sourced(written.value, "edited")

    return replace(
        planned,
        max_num_seqs=settled(planned.max_num_seqs, max_num_seqs(bare)),
        block_size_tokens=settled(planned.block_size_tokens, block_size(bare)),
        pools=tuple(
            replace(
                pool,
                max_num_batched_tokens=settled(
                    pool.max_num_batched_tokens, simulated_batched_tokens(bare)
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
    "only if asked for",
    "without ep",
)
"""How the reasons begin that speak for a layout as it was chosen: they say nothing of one that was edited."""
UNPRICED = ("overloaded at", "not estimated")
"""How the reason begins why there is no estimate."""
PRICED = ("slo.", *UNPRICED, "bears ")
"""How the reasons begin that `price` gives: they are replaced when a plan is priced again."""
