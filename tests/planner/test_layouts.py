"""Layouts over several GPU kinds, cells of hosts, and searches that end early."""

from dynctl.core.inventory import Limits
from dynctl.core.plan import Role
from dynctl.core.workload import Slo, Workload
from dynctl.planner.grouping import num_nvlinks
from dynctl.planner.search import make_plan
from dynctl.planner.text import to_yaml


def test_kinds_share_a_rate_none_bears_alone_each_in_a_pool_of_its_own(build):
    hosts = [build.host("a", 8, "a100", "NV12"), build.host("h", 8, "h100")]

    def plan_at(rate):
        work = Workload(2048, 256, rate)
        return make_plan(*build.cluster(hosts, build.wish("llama-70b", workload=work, slo=Slo(ttft_ms=8000))))  # fmt: skip

    few = plan_at(2.0)
    rate = 2.0
    while len({p.parallelism for p in few.deployments[0].pools}) < 2 and rate < 40:
        rate += 0.5
        few = plan_at(rate)
        if any(pool.role is Role.PREFILL for pool in few.deployments[0].pools):
            continue
        kinds = [
            {gpu.uuid.split("-")[1] for r in pool.replicas for gpu in r.gpus}
            for pool in few.deployments[0].pools
        ]
        if len(kinds) == 2:
            break

    assert kinds == [{"h"}, {"a"}]
    assert few.deployments[0].estimate.goodput_rps.expected == rate


def test_decode_gets_the_gpu_its_prefill_is_bridged_to(build):
    matrix = "X SYS NV4 SYS\nSYS X SYS NV4\nNV4 SYS X SYS\nSYS NV4 SYS X"
    whole = Limits(max_num_batched_tokens=8192)  # in pieces, one aggregated engine would do
    wish = build.wish(
        "llama-8b", workload=Workload(1024, 128, 2.0), slo=Slo(2000, 50), limits=whole
    )
    host = build.host("ws", 4, "a6000", matrix)
    plan = make_plan(*build.cluster([host], wish))

    where = {pool.role: pool.replicas[0].gpus[0].index for pool in plan.deployments[0].pools}
    assert set(where) == {Role.PREFILL, Role.DECODE}
    assert num_nvlinks(host.gpu_links[where[Role.PREFILL]][where[Role.DECODE]]) == 4


def test_a_search_that_is_cut_short_says_so_and_is_still_the_same_twice(build, monkeypatch):
    monkeypatch.setattr("dynctl.planner.search.MOST_PRICED", 50)
    monkeypatch.setattr("dynctl.planner.search.LEAST_PRICED", 50)
    hosts = [build.host(f"g{i}", 8, nics=True) for i in range(8)]
    ground = build.cluster(
        hosts, build.wish("llama-8b", workload=Workload(4096, 256, 30.0), slo=Slo(3000, 100))
    )

    plan = make_plan(*ground)

    assert "the search was cut short for chat: these layouts are the best so far" in plan.warnings
    assert to_yaml(make_plan(*ground)) == to_yaml(plan)


def test_a_better_wired_host_beside_a_badly_wired_one_keeps_its_speed(build):
    wish = build.wish("llama-70b", workload=Workload(2048, 256, 1.0), slo=Slo(1500, 200))
    alone = make_plan(*build.cluster([build.host("good", 8)], wish))
    both = make_plan(
        *build.cluster([build.host("good", 8), build.host("bad", 8, link="SYS")], wish)
    )

    assert [r.host_name for _, _, r in both.replicas()] == ["good"] * len(alone.replicas())
    assert both.deployments[0].estimate == alone.deployments[0].estimate


def test_steps_that_overshoot_the_room_do_not_end_the_search(build):
    hosts = [build.host(f"gpu-{i}", 8, nics=True) for i in range(1, 5)]
    work = Workload(4096, 256, 6.0)
    trails: dict = {}

    make_plan(*build.cluster(hosts, build.wish("llama-70b", workload=work, slo=Slo(3000, 40))), trails)  # fmt: skip

    assert not trails["chat"].is_cut_short
