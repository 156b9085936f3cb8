"""Where the engines of a plan stand among NVLink, PCIe and networks: what their router calls the links between them by. Pure."""

from dynctl.core.hardware import Gpu, Host, Topology
from dynctl.core.inventory import DeploymentWish
from dynctl.core.kv_links import EnginePlace
from dynctl.core.plan import PlannedDeployment, Pool, Replica
from dynctl.core.units import whole
from dynctl.router.sources.split import worker_ids
from dynctl.sim.options import USUAL_KV_BYTES


def engine_places(planned: PlannedDeployment, topology: Topology | None) -> tuple[EnginePlace, ...]:
    """Say where each engine of a deployment that hands KV over stands, by what its router calls it.

    Of one without pools nothing need be known.
    """
    hosts = {} if topology is None else {host.name: host for host in topology.hosts}
    return tuple(
        EnginePlace(
            name,
            replica.host_name,
            _island(replica, hosts.get(replica.host_name)),
            _has_rdma(replica, hosts.get(replica.host_name)),
        )
        for pool in planned.pools
        if pool.role.value != "aggregated"
        for replica in pool.replicas
        for name in worker_ids(replica.id, pool.parallelism.dp)
    )


def kv_bytes_per_token(planned: PlannedDeployment, wish: DeploymentWish) -> int:
    """What a token's KV takes on all GPUs of one engine, by the memory sheets; 0 where there is none."""
    if planned.engine_kind == "sim":
        told = whole(dict(wish.engine.args).get("kv-bytes-per-token", ""))
        return USUAL_KV_BYTES if told is None else told
    return max((_per_token(pool) for pool in planned.pools), default=0)


def _per_token(pool: Pool) -> int:
    sheet = pool.memory
    if sheet is None or sheet.kv_capacity_tokens <= 0 or sheet.kv_bytes <= 0:
        return 0
    return round(sheet.kv_bytes * pool.parallelism.num_gpus / sheet.kv_capacity_tokens)


def _island(replica: Replica, host: Host | None) -> str:
    gpus = () if host is None else _gpus(replica, host)
    if not gpus or host is None:
        return ""
    cliques = {gpu.health.fabric_clique for gpu in gpus}
    if len(cliques) == 1 and None not in cliques:
        return f"domain {cliques.pop()}"
    indexes = {gpu.index for gpu in gpus}
    for number, island in enumerate(host.nvlink_islands):
        if indexes <= set(island) and len(island) > 1:
            return f"{host.name} {number}"
    return ""


def _gpus(replica: Replica, host: Host) -> tuple[Gpu, ...]:
    uuids = {gpu.uuid for gpu in replica.gpus}
    return tuple(gpu for gpu in host.gpus if gpu.uuid in uuids)


def _has_rdma(replica: Replica, host: Host | None) -> bool:
    if replica.nics:
        return True
    nics = () if host is None else host.nics
    return any(nic.kind != "ethernet" for nic in nics)
