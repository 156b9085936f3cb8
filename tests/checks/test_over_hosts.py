"""What doctor makes of an engine over several hosts: each of them has a part of it, and ports for that."""

from dataclasses import replace

from checkcases.build import audited, evidence, planned, split_plan

from dynctl.checks.ports import is_planned, planned_ports
from dynctl.cli.doctor_evidence import _reaches
from dynctl.core.audit import Listener
from dynctl.core.plan import Member, Parallelism, PlannedGpu, Pool, Replica, Role


def over_two(kind="vllm"):
    """The plan with one engine over both of its hosts."""
    plan = split_plan()
    (chat, *_) = plan.deployments
    replica = Replica(
        "chat-aggregated-0",
        Role.AGGREGATED,
        "a",
        (PlannedGpu("GPU-a", 0),),
        others=(Member("b", (PlannedGpu("GPU-b", 0),)),),
        rendezvous_port=18805,
    )
    pool = Pool(Role.AGGREGATED, Parallelism(pp=2), (replica,))
    return replace(plan, deployments=(replace(chat, engine_kind=kind, pools=(pool,)),))


def test_a_part_is_on_its_host_and_on_its_gpus():
    seen = evidence(plan=over_two())

    assert [r.id for r in seen.replicas_on("b")] == ["chat-aggregated-0"]
    gpu = replace(seen.topology.hosts[1].gpus[0], uuid="GPU-b")
    assert seen.uses_gpu(gpu) == ["chat-aggregated-0.1"]
    assert all(seen.may_run(host, seen.inventory.deployments[0]) for host in seen.topology.hosts)


def test_the_place_where_parts_meet_and_the_relays_of_all_are_planned():
    ports = {(p.host_name, p.port, p.what) for p in planned_ports(over_two())}

    assert ("a", 18805, "rendezvous of chat-aggregated-0") in ports
    assert {host for host, _, what in ports if what == "relay"} == {"a", "b"}


def test_what_parts_open_to_each_other_is_theirs_on_the_data_address_alone():
    seen = evidence(plan=over_two())
    address = seen.address_of("b")

    assert is_planned(seen, "b", Listener(address, 40404))
    assert not is_planned(seen, "b", Listener("0.0.0.0", 40404))
    assert not is_planned(evidence(plan=over_two("sim")), "b", Listener(address, 40404))
    assert not is_planned(planned(), "b", Listener(address, 40404))
    assert audited(plan=over_two()).is_spread("a")


def test_hosts_of_one_engine_have_to_reach_each_others_relays():
    def relays(name):
        return [(r.target, r.host_name) for r in _reaches(over_two(), name, ("a", "b"))]

    assert ("relay", "b") in relays("a")
    assert ("relay", "a") in relays("b")
