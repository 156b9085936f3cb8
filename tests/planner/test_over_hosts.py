"""Engines over several hosts: laid out as pools ask for them, kept through plan.yaml, and checked part by part."""

import re
from dataclasses import replace

import pytest

from dynctl.core.inventory import EngineSpec, PoolWish
from dynctl.core.plan import Member, Parallelism, Role
from dynctl.core.workload import Workload
from dynctl.errors import PlanError
from dynctl.planner.check import check_plan
from dynctl.planner.faults import PlanFaultsError
from dynctl.planner.search import make_plan
from dynctl.planner.text import from_yaml, to_yaml
from dynctl.planner.virtual_plan import virtual_deployment

AGG = Role.AGGREGATED


def asked(build, hosts, *pools, model="llama-70b", **fields):
    return build.cluster(hosts, build.wish(model, pools=pools, **fields))


def pool(tp, pp, nodes, count=1, role=AGG, **fields):
    return PoolWish(role, count, Parallelism(tp, pp, **fields), nodes=nodes)


@pytest.fixture
def two(build):
    return [build.host("a", 4), build.host("b", 4)]


def test_a_pipeline_has_whole_stages_on_each_host(build, two):
    plan = make_plan(*asked(build, two, pool(4, 2, 2)))
    ((_, found, replica),) = plan.replicas()

    assert found.nodes == 2
    assert [m.host_name for m in replica.members] == ["a", "b"]
    assert [sorted(gpu.index for gpu in m.gpus) for m in replica.members] == [[0, 1, 2, 3]] * 2
    assert replica.rendezvous_port == plan.hosts[0].relay_port + 1
    assert [host.name for host in plan.hosts] == ["a", "b"]
    assert found.memory.kv_bytes > 0
    assert plan.deployments[0].estimate is None
    assert any(r.startswith("not estimated: engines over") for r in plan.deployments[0].reasons)


def test_tensor_parallel_ranks_may_be_on_several_hosts(build, two):
    plan = make_plan(*asked(build, two, pool(8, 1, 2)))
    ((_, _, replica),) = plan.replicas()

    assert [len(m.gpus) for m in replica.members] == [4, 4]


def test_engines_over_hosts_share_hosts_where_there_is_room(build, two):
    plan = make_plan(*asked(build, two, pool(2, 2, 2, 2)))
    first, second = (replica for _, _, replica in plan.replicas())

    uuids = [gpu.uuid for r in (first, second) for m in r.members for gpu in m.gpus]
    assert len(set(uuids)) == 8
    assert (
        {m.host_name for m in first.members} == {m.host_name for m in second.members} == {"a", "b"}
    )
    places = {(r.host_name, r.rendezvous_port) for r in (first, second)}
    assert len(places) == 2


def test_a_plan_comes_back_from_its_file_as_it_was(build, two):
    topology, inventory, models = asked(build, two, pool(4, 2, 2))
    plan = make_plan(topology, inventory, models)

    assert from_yaml(to_yaml(plan)) == plan
    assert to_yaml(check_plan(plan, topology, inventory, models)) == to_yaml(plan)


def test_plans_without_such_engines_have_the_digest_they_always_had(build, two):
    topology, inventory, models = asked(build, two, pool(4, 1, 1))
    plan = make_plan(topology, inventory, models)

    assert "others" not in to_yaml(plan)
    assert "rendezvous" not in to_yaml(plan)


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (pool(4, 1, 3), "do not divide over 3 hosts"),
        (pool(2, 1, 2, dp=2), "dp 2 over several hosts"),
        (pool(8, 2, 2), "with 8 GPUs of one kind on every one; the free ones give 0"),
        (pool(4, 2, 2, 2), "the free ones give 1"),
        (pool(2, 4, 4), "over 4 hosts each"),
    ],
)
def test_what_cannot_be_had_is_refused_with_why(build, two, wish, why):
    with pytest.raises(PlanError, match=why):
        make_plan(*asked(build, two, wish))


def test_only_aggregated_engines_may_be_over_several_hosts(build, two):
    pools = (pool(1, 2, 2, role=Role.PREFILL), pool(1, 1, 1, role=Role.DECODE))
    with pytest.raises(PlanError, match="a prefill engine cannot be over several hosts"):
        make_plan(*asked(build, two, *pools, model="llama-8b"))


def test_what_a_refusal_says_to_write_is_a_plan(build):
    hosts = [build.host(f"a-{i}", 4, "a100-40", "NV4") for i in (1, 2)]
    work = Workload(16384, 1024, 1.0)
    with pytest.raises(PlanError) as caught:
        make_plan(*asked(build, hosts, workload=work))

    said = re.search(r"pools: with tp: (\d), pp: (\d), nodes: (\d)", caught.value.hint)
    plan = make_plan(*asked(build, hosts, pool(*map(int, said.groups())), workload=work))
    assert [host.name for host in plan.hosts] == ["a-1", "a-2"]


def edited(plan, **fields):
    (chat,) = plan.deployments
    (found,) = chat.pools
    (replica,) = found.replicas
    pools = (replace(found, replicas=(replace(replica, **fields),)),)
    return replace(plan, deployments=(replace(chat, pools=pools),))


def test_each_part_of_an_edited_plan_is_checked(build, two):
    topology, inventory, models = asked(build, two, pool(4, 2, 2))
    plan = make_plan(topology, inventory, models)
    ((_, _, replica),) = plan.replicas()
    (other,) = replica.others

    def faults(**fields):
        with pytest.raises(PlanFaultsError) as caught:
            check_plan(edited(plan, **fields), topology, inventory, models)
        return [fault.text for fault in caught.value.faults]

    name = replica.id
    assert faults(rendezvous_port=None) == [
        f"{name}: an engine over several hosts needs a rendezvous_port"
    ]
    assert faults(others=()) != []
    assert f"{name}: 3 GPUs for parallelism of 8 over 2 hosts" in faults(
        others=(replace(other, gpus=other.gpus[:3]),)
    )
    assert "host c is used but not listed under hosts" in faults(
        others=(replace(other, host_name="c"),)
    )
    assert any(
        "used 2 times" in text for text in faults(others=(replace(other, gpus=replica.gpus),))
    )
    assert any("is given to" in text for text in faults(rendezvous_port=plan.hosts[0].relay_port))
    assert any(
        f"{name}: host a is used 2 times" in t for t in faults(others=(Member("a", other.gpus),))
    )


def test_simulated_engines_go_over_hosts_without_gpus_too(build):
    hosts = [build.host(name, 0) for name in "abc"]
    sim = EngineSpec(kind="sim")
    plan = make_plan(*asked(build, hosts, pool(1, 2, 2), model="sim", engine=sim))
    ((_, _, replica),) = plan.replicas()

    assert len({m.host_name for m in replica.members}) == 2
    assert replica.rendezvous_port is not None
    with pytest.raises(PlanError, match="over 4 hosts each and may use 3"):
        make_plan(*asked(build, hosts, pool(1, 4, 4), model="sim", engine=sim))


def test_engines_over_hosts_are_not_simulated_as_if_they_were_inside_one(build, two):
    topology, inventory, models = asked(build, two, pool(4, 2, 2))
    (planned,) = make_plan(topology, inventory, models).deployments

    with pytest.raises(PlanError, match="how fast engines over several hosts are"):
        virtual_deployment(planned, inventory.deployments[0], models[planned.name], topology)
