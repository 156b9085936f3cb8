"""The inventory of this machine alone, for `--local` and the demo. Pure."""

from dynctl.core.inventory import (
    DeploymentWish,
    EngineSpec,
    HostEntry,
    Inventory,
    PoolWish,
    RouterWish,
)
from dynctl.core.plan import Role
from dynctl.core.workload import Slo, Workload


def local_inventory(listen: str = "127.0.0.1:8000") -> Inventory:
    """Describe one host `local` and one deployment `sim`: a prefill and two decode engines, simulated.

    `listen` is where the router listens.
    """
    pools = (PoolWish(Role.PREFILL, 1), PoolWish(Role.DECODE, 2))
    sim = DeploymentWish(
        name="sim",
        model="sim",
        engine=EngineSpec(kind="sim"),
        pools=pools,
        workload=Workload(isl_tokens=512, osl_tokens=64, rate_rps=4.0, shared_prefix_ratio=0.5),
        slo=Slo(ttft_ms=500.0, itl_ms=50.0),
        router=RouterWish(host="local", listen=listen),
    )
    host = HostEntry(name="local", address="local", cpu_slots=3)
    return Inventory(cluster="local", hosts=(host,), deployments=(sim,), path="(--local)")
