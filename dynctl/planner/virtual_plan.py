"""A planned deployment as simulated engines: each replica with its pace, cache and limits.

Not here: replaying (`simulate`).
Pure.
"""

from dataclasses import dataclass, replace

from dynctl.core.hardware import Topology
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import PlannedDeployment, Pool, Role, Sourced
from dynctl.core.workload import Workload
from dynctl.errors import PlanError
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.engines import sim_options
from dynctl.planner.estimate import ETA_TRANSFER, Pace, RankPace
from dynctl.planner.memory import BLOCK_TOKENS, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, rank_tokens
from dynctl.planner.options import pace_on
from dynctl.planner.placement import kind_of, replica_groups
from dynctl.planner.transfer import Fabric, rank_bytes_s
from dynctl.planner.virtual import VirtualEngineSpec
from dynctl.router.sources.split import worker_ids
from dynctl.sim.scheduler import StepCosts

_BATCH = 32
"""Sequences at which a step's growth is taken."""


@dataclass(frozen=True, slots=True)
class VirtualDeployment:
    """What a replay needs of a plan."""

    engines: tuple[VirtualEngineSpec, ...]
    transfer_bytes_s: float
    host_s: float | None
    """HTTP, tokenizing and scheduling of the engine; None: as measured for simulated ones."""
    how: str


def virtual_deployment(
    planned: PlannedDeployment,
    wish: DeploymentWish,
    model: Model | None,
    topology: Topology,
    calibration: Calibration | None = None,
) -> VirtualDeployment:
    """The engines of a plan, their speed by a calibration; None: the shipped one.

    Raises:
        PlanError: when nothing is known of how fast they are.
    """
    if wish.engine.kind == "sim":
        return _declared(planned, wish)
    hosts = {host.name: host for host in topology.hosts}
    groups = {k: g for pool in planned.pools for k, g in replica_groups(pool, hosts).items()}
    num = sum(len(pool.replicas) for pool in planned.pools)
    if wish.engine.kind != "vllm" or model is None or not 0 < num == len(groups):
        raise PlanError(
            f"deployment {planned.name}: nothing is known of its engines' speed, so it cannot be simulated",
            "simulate deployments of GPU engines with a known model, or of simulated engines",
        )
    engines: list[VirtualEngineSpec] = []
    host_s = 0.0
    for pool in planned.pools:
        for replica in pool.replicas:
            group = groups[replica.id]
            pace = pace_on(
                model, kind_of(group.gpus[0]), pool.parallelism, [group], calibration or shipped()
            )
            if pace is None:
                raise PlanError(
                    f"deployment {planned.name}: no figures for {group.gpus[0].name}, so it cannot be simulated",
                    "calibrate it, or simulate on a GPU of the table",
                )
            host_s = max(host_s, pace.host_s)
            engines += _specs(replica.id, planned, pool, pace, wish)
    by_role = {
        role: [groups[r.id] for p in planned.pools if p.role is role for r in p.replicas]
        for role in (Role.PREFILL, Role.DECODE)
    }
    speed = Fabric.of(topology).worst(by_role[Role.PREFILL], by_role[Role.DECODE])
    bytes_s = rank_bytes_s(speed, planned.pools) * ETA_TRANSFER
    return VirtualDeployment(tuple(engines), bytes_s, host_s, "modelled engines")


def _specs(
    replica_id: str, planned: PlannedDeployment, pool: Pool, pace: Pace, wish: DeploymentWish
) -> list[VirtualEngineSpec]:
    """An engine as the router sees it: one per data-parallel rank."""
    dp = pool.parallelism.dp
    tokens = rank_tokens(pool.memory, pool.parallelism) if pool.memory else 0
    block_tokens = _whole(planned.block_size_tokens, BLOCK_TOKENS)
    step_tokens = _whole(pool.max_num_batched_tokens, MAX_BATCHED_TOKENS)
    one = VirtualEngineSpec(
        replica_id,
        pool.role,
        step_costs(pace if dp == 1 else RankPace(pace, dp), wish.workload, pool.role, step_tokens),
        num_blocks=max(2, tokens // block_tokens + 1),
        block_size=block_tokens,
        max_num_seqs=_whole(planned.max_num_seqs, MAX_NUM_SEQS),
        max_num_batched_tokens=step_tokens,
        kv_bytes_per_token=pace.kv_bytes_per_token,
    )
    return [replace(one, id=name) for name in worker_ids(replica_id, dp)]


def _whole(limit: Sourced | None, default: int) -> int:
    return default if limit is None else int(limit.value)


def step_costs(pace: Pace, work: Workload, role: Role, step_tokens: int) -> StepCosts:
    """A pace as the simulated engine's four numbers: straight lines through the workload's own lengths.

    What a prompt's token costs is taken where it is computed: beside running sequences, but in prefill engines.
    """
    context = work.isl_tokens + work.osl_tokens / 2
    one, many = pace.decode_s(1, context), pace.decode_s(_BATCH, context)
    per_sequence = max(0.0, (many - one) / (_BATCH - 1))
    beside = 0.0 if role is Role.PREFILL else float(min(_BATCH, step_tokens // 2))
    new = max(64.0, work.isl_tokens * (1 - work.shared_prefix_ratio))
    piece = min(new, step_tokens - beside)
    past = max(0.0, work.isl_tokens - new) + (new - piece) / 2
    whole = pace.mixed_s(beside, context, piece, past)
    if beside:
        per_token = (whole - pace.decode_s(beside, context)) / piece
    else:
        per_token = (whole - pace.prefill_s(piece / 2, past)) / (piece / 2)
    per_token = max(0.0, per_token)
    # What a step costs whatever is in it, steps beside running sequences take anyway.
    base_s = 0.0 if beside else max(0.0, whole - per_token * piece)
    return StepCosts(
        prefill_us_per_token=per_token * 1e6,
        prefill_base_ms=base_s * 1e3,
        decode_ms=max(0.0, one - per_sequence) * 1e3,
        decode_us_per_seq=per_sequence * 1e6,
    )


def _declared(planned: PlannedDeployment, wish: DeploymentWish) -> VirtualDeployment:
    """Simulated engines, by their flags as the plan would start them."""
    options = sim_options(wish.engine.args)
    engines = tuple(
        VirtualEngineSpec(
            name,
            pool.role,
            StepCosts(
                options.prefill_us_per_token,
                options.prefill_base_ms,
                options.decode_ms,
                options.decode_us_per_seq,
            ),
            num_blocks=options.num_cache_blocks,
            block_size=_whole(planned.block_size_tokens, options.block_size),
            max_num_seqs=_whole(planned.max_num_seqs, options.max_num_seqs),
            max_num_batched_tokens=_whole(
                pool.max_num_batched_tokens, options.max_num_batched_tokens
            ),
            kv_bytes_per_token=options.kv_bytes_per_token,
        )
        for pool in planned.pools
        for replica in pool.replicas
        for name in worker_ids(replica.id, pool.parallelism.dp)
    )
    bytes_s = options.kv_transfer_mbytes_s * 1e6
    return VirtualDeployment(engines, bytes_s, None, "the simulated engine's flags")
