"""A planned deployment as table rows for a terminal. Pure."""

from dynctl.core.plan import Figure, Parallelism, PlannedDeployment, Pool, Replica
from dynctl.core.units import format_bytes, format_count, format_seconds


def replica_rows(planned: PlannedDeployment) -> list[list[str]]:
    """One row per engine: id, role, host, parallelism, GPU indexes, side channel."""
    return [
        [
            replica.id,
            pool.role.value,
            " + ".join(member.host_name for member in replica.members),
            parallelism_text(pool.parallelism),
            _indexes(replica),
            str(replica.side_channel_port or "–"),
        ]
        for pool in planned.pools
        for replica in pool.replicas
    ]


def _indexes(replica: Replica) -> str:
    """GPUs of each of its parts; a dash where it has none."""
    parts = [",".join(str(gpu.index) for gpu in member.gpus) for member in replica.members]
    return " + ".join(parts) if any(parts) else "–"


def parallelism_text(parallelism: Parallelism) -> str:
    """`tp4` or `tp4 pp2`; sizes of one are left out."""
    sizes = (("tp", parallelism.tp), ("pp", parallelism.pp), ("dp", parallelism.dp), ("ep", parallelism.ep))  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"


def memory_rows(planned: PlannedDeployment) -> list[list[str]]:
    """One row per pool with a memory sheet."""
    return [
        [
            _pool_name(planned, pool),
            *(
                format_bytes(value)
                for value in (
                    pool.memory.total_bytes,
                    pool.memory.reserve_bytes,
                    pool.memory.weight_bytes,
                    pool.memory.activation_bytes,
                    pool.memory.kv_bytes,
                )
            ),
            format_count(pool.memory.kv_capacity_tokens),
        ]
        for pool in planned.pools
        if pool.memory is not None
    ]


def _pool_name(planned: PlannedDeployment, pool: Pool) -> str:
    """The role, with the parallelism where other pools have it too."""
    is_only = sum(each.role is pool.role for each in planned.pools) == 1
    return pool.role.value if is_only else f"{pool.role.value} {parallelism_text(pool.parallelism)}"


def limit_rows(planned: PlannedDeployment) -> list[list[str]]:
    """The limits engines are started with, each with how it was got; those of a role carry its name."""
    shared = (
        ("max-model-len", planned.max_model_len_tokens),
        ("max-num-seqs", planned.max_num_seqs),
        ("gpu-memory-utilization", planned.gpu_memory_utilization),
        ("block-size", planned.block_size_tokens),
    )
    steps = [
        (f"max-num-batched-tokens, {_pool_name(planned, pool)}", pool.max_num_batched_tokens)
        for pool in planned.pools
    ]
    return [
        [name, f"{limit.value:g}" if limit.value < 1 else str(int(limit.value)), limit.source]
        for name, limit in (*steps, *shared)
        if limit is not None
    ]


def estimate_rows(planned: PlannedDeployment) -> list[list[str]]:
    """TTFT, ITL and throughput with their bands."""
    if planned.estimate is None:
        return []
    found = planned.estimate
    rows = [
        ["TTFT", *_milliseconds(found.ttft_ms)],
        ["ITL", *_milliseconds(found.itl_ms)],
        ["tok/s at most", *_counts(found.out_tokens_s)],
    ]
    if found.goodput_rps is not None:
        rows.append(["goodput req/s", *_counts(found.goodput_rps)])
    return rows


def _milliseconds(figure: Figure) -> list[str]:
    return [
        *(format_seconds(v / 1e3) for v in (figure.low, figure.expected, figure.high)),
        figure.source,
    ]


def _counts(figure: Figure) -> list[str]:
    return [*(format_count(v) for v in (figure.low, figure.expected, figure.high)), figure.source]
