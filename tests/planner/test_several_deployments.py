"""What a deployment's reasons say of the GPUs that other deployments of the plan took, whichever was placed first."""

from dataclasses import replace

import pytest

from dynctl.core.inventory import PoolWish, RouterWish
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.planner.search import make_plan

MOE = {"workload": Workload(2048, 256, 1.0), "slo": Slo(8000, 400)}
ELSEWHERE = RouterWish(listen="127.0.0.1:8001")


def pool(tp, replicas=1):
    return (PoolWish(Role.AGGREGATED, replicas, Parallelism(tp)),)


def reasons_of(plan, name, begin):
    (found,) = (d.reasons for d in plan.deployments if d.name == name)
    return [reason for reason in found if begin in reason]


@pytest.mark.parametrize("is_first", [True, False], ids=["before the other", "after it"])
def test_no_layout_is_advised_on_gpus_another_deployment_has(build, monkeypatch, is_first):
    monkeypatch.setattr("dynctl.planner.spanning.WORTH", 0.0)
    moe = build.wish("qwen3-235b-fp8", name="moe", **MOE)
    small = build.wish("llama-8b", name="small", pools=pool(2, 3), router=ELSEWHERE)
    host = build.host("h", 8, "h200")
    wishes = (moe, small) if is_first else (small, moe)

    alone = make_plan(*build.cluster([host], moe))
    plan = make_plan(*build.cluster([host], *wishes))

    (idea,) = reasons_of(alone, "moe", "only if asked for")
    assert "dp4 ep4 on NVIDIA H200" in idea
    taken = sum(len(r.gpus) for _, _, r in plan.replicas() if r.id.startswith("small"))
    assert taken == 6
    for idea in reasons_of(plan, "moe", "only if asked for"):
        assert "dp2 ep2 on NVIDIA H200" in idea


def test_gpus_stay_free_that_no_deployment_takes(build):
    first = build.wish("llama-8b", name="first", workload=Workload(512, 64, 1.0))
    second = build.wish("llama-70b", name="second", pools=pool(4), router=ELSEWHERE)
    plan = make_plan(*build.cluster([build.host("h", 8)], first, second))

    (told,) = reasons_of(plan, "first", "stay free")
    assert told.startswith("3 GPUs stay free")


def test_gpus_of_a_kind_that_holds_no_engine_are_not_said_to_be_of_use(build):
    wish = build.wish("llama-70b", workload=Workload(1024, 128, 0.5), slo=Slo(8000, 200))
    hosts = [build.host("big", 4), build.host("old", 2, "4090", "PHB")]
    plan = make_plan(*build.cluster(hosts, wish))

    used = {gpu.uuid for _, _, replica in plan.replicas() for gpu in replica.gpus}
    assert all(uuid.startswith("GPU-big") for uuid in used)
    left = 4 - len(used)
    assert reasons_of(plan, "chat", "stay free") == (
        [
            f"{left} GPUs stay free: raise workload.rate_rps, tighten slo, or write pools: to use them"
        ]
        if left
        else []
    )


def test_hosts_whose_rdma_is_down_are_told_where_kv_would_move(build):
    def down(name):
        host = build.host(name, 8, nics=True)
        nics = (replace(nic, state="down") if nic.kind != "ethernet" else nic for nic in host.nics)
        return replace(host, nics=tuple(nics))

    plan = make_plan(*build.cluster([down("a"), build.host("b", 8, nics=True)], build.wish()))
    (told,) = reasons_of(plan, "chat", "RDMA port is down")
    assert told.startswith("a: every RDMA port is down, so KV to and from other hosts")

    alone = make_plan(*build.cluster([down("a")], build.wish()))
    assert not reasons_of(alone, "chat", "RDMA port is down")
