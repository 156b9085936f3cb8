"""A planned deployment as simulated engines: each replica with its pace, cache and limits.

Not here: replaying (`simulate`).
Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

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
    if any(pool.nodes > 1 for pool in planned.pools):
        raise PlanError(
            f"deployment {planned.name}: nothing is known of how fast engines over several hosts are",
            "simulate deployments of engines inside one host",
        )
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
        paced(pace if dp == 1 else RankPace(pace, dp), wish.workload, step_tokens),
        num_blocks=max(2, tokens // block_tokens + 1),
        block_size=block_tokens,
        max_num_seqs=_whole(planned.max_num_seqs, MAX_NUM_SEQS),
        max_num_batched_tokens=step_tokens,
        kv_bytes_per_token=pace.kv_bytes_per_token,
    )
    return [replace(one, id=name) for name in worker_ids(replica_id, dp)]


def _whole(limit: Sourced | None, default: int) -> int:
    return default if limit is None else int(limit.value)


@dataclass(frozen=True, slots=True)
class PacedCosts(StepCosts):
    """What steps cost by a pace, at the workload's own lengths: no straight lines, which steps of experts do not keep to."""

    seconds: Callable[[int, int], float] = lambda *_: 0.0
    """Of a step with so many sequences and tokens of prompts."""

    def duration_s(
        self,
        num_prefill_tokens: int,
        num_starts: int,  # noqa: ARG002 - what a step costs whatever is in it is in the pace
        num_decodes: int,
        num_loaded_tokens: int = 0,  # noqa: ARG002 - these engines load nothing
    ) -> float:
        """Ask the pace."""
        return self.seconds(num_decodes, num_prefill_tokens)


def paced(pace: Pace, work: Workload, step_tokens: int) -> PacedCosts:
    """The costs of an engine that keeps a pace; a step's piece of a prompt stands in its middle."""
    context = work.isl_tokens + work.osl_tokens / 2
    new = work.isl_tokens * (1 - work.shared_prefix_ratio)

    @lru_cache(maxsize=65_536)
    def seconds(num_decodes: int, num_prefill_tokens: int) -> float:
        if not num_prefill_tokens:
            return pace.decode_s(num_decodes, context) if num_decodes else 0.0
        past = work.isl_tokens - new + max(0.0, new - min(new, step_tokens)) / 2
        return pace.mixed_s(num_decodes, context, num_prefill_tokens, past)

    return PacedCosts(seconds=seconds)


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
