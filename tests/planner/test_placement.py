"""Where replicas, ports and routers land."""

from dataclasses import replace

from dynctl.core.hardware import Gpu, Host
from dynctl.core.inventory import HostEntry, PoolWish
from dynctl.core.plan import Parallelism, PlannedGpu, Pool, Replica, Role
from dynctl.discovery.view import groups_of
from dynctl.planner.grouping import Near, near_of, nvlink_islands, tp_groups
from dynctl.planner.placement import replica_groups
from dynctl.planner.search import make_plan


def places(plan, role=None):
    return [
        (r.host_name, [g.index for g in r.gpus])
        for _, _, r in plan.replicas()
        if role is None or r.role is role
    ]


def aggregated(count, tp):
    return (PoolWish(Role.AGGREGATED, count, Parallelism(tp)),)


def test_groups_of_a_plan_and_of_the_drawing_break_ties_alike():
    """No link tells anything, the NUMA node is unknown: the CPUs near each GPU decide."""
    cpus = ("0-15", "16-31", "0-15", "16-31")
    links = tuple(tuple("X" if a == b else "SYS" for b in range(4)) for a in range(4))
    gpus = tuple(Gpu(i, f"GPU-{i}", "L40S", 1, cpu_affinity=cpus[i]) for i in range(4))
    host = Host("h", "h", "10.0.0.1", gpus=gpus, gpu_links=links)

    assert tp_groups(links, near_of(host), 2) == ((0, 2), (1, 3))
    assert groups_of(host)["2"] == [[0, 2], [1, 3]]
    assert near_of(host, (3, 1)).numa == ("16-31", "16-31")


def test_replicas_of_a_pool_go_to_different_hosts(build):
    hosts = [build.host("a", 8), build.host("b", 8)]

    plan = make_plan(*build.cluster(hosts, build.wish(pools=aggregated(2, 4))))

    assert {name for name, _ in places(plan)} == {"a", "b"}


def test_decode_lands_beside_its_prefill(build):
    hosts = [build.host("a", 8), build.host("b", 8)]
    pools = (PoolWish(Role.PREFILL, 1, Parallelism(4)), PoolWish(Role.DECODE, 1, Parallelism(4)))

    plan = make_plan(*build.cluster(hosts, build.wish(pools=pools)))

    assert len({name for name, _ in places(plan)}) == 1


def test_an_nvlink_island_is_preferred_over_an_emptier_host(build):
    hosts = [build.host("pcie", 8, link="SYS"), build.host("pair", 2, link="NV4")]

    plan = make_plan(*build.cluster(hosts, build.wish("llama-70b", pools=aggregated(1, 2))))

    assert places(plan) == [("pair", [0, 1])]


def test_tensor_parallel_groups_follow_the_bridges(build):
    matrix = "X SYS NV4 SYS\nSYS X SYS NV4\nNV4 SYS X SYS\nSYS NV4 SYS X"
    hosts = [build.host("ws", 4, "a6000", matrix)]

    plan = make_plan(*build.cluster(hosts, build.wish(pools=aggregated(2, 2))))

    assert sorted(gpus for _, gpus in places(plan)) == [[0, 2], [1, 3]]


def test_pools_are_held_to_their_hosts_and_groups(build):
    hosts = [build.host(f"gpu-{i}", 4) for i in (1, 2, 10)]
    wanted = (
        PoolWish(Role.PREFILL, 1, Parallelism(2), hosts=("gpu-10",)),
        PoolWish(Role.DECODE, 2, Parallelism(2), hosts=("fast",)),
    )
    topology, inventory, models = build.cluster(hosts, build.wish(pools=wanted))
    entries = [
        replace(entry, groups=("fast",) if entry.name != "gpu-10" else ())
        for entry in inventory.hosts
    ]

    plan = make_plan(topology, replace(inventory, hosts=tuple(entries)), models)

    assert [name for name, _ in places(plan, Role.PREFILL)] == ["gpu-10"]
    assert {name for name, _ in places(plan, Role.DECODE)} == {"gpu-1", "gpu-2"}


def test_the_router_goes_to_the_host_without_gpus_unless_told(build):
    hosts = [build.host("a", 8), build.host("z")]
    wish = build.wish(pools=aggregated(1, 1))

    free = make_plan(*build.cluster(hosts, wish))
    told = make_plan(*build.cluster(hosts, replace(wish, router=replace(wish.router, host="a"))))

    assert free.deployments[0].router.host_name == "z"
    assert told.deployments[0].router.host_name == "a"


def test_hosts_at_one_address_get_ports_of_their_own(build):
    hosts = [build.host(n, cpu_slots=1, data_address="127.0.0.1") for n in ("a", "b", "c")]
    wish = build.wish(
        "sim", kind="sim", pools=(PoolWish(Role.PREFILL, 1), PoolWish(Role.DECODE, 2))
    )

    plan = make_plan(*build.cluster(hosts, wish))

    ports = [host.relay_port for host in plan.hosts]
    ports += [r.side_channel_port for _, _, r in plan.replicas()]
    assert len(set(ports)) == 6


def test_simulated_engines_prefer_slots_then_gpu_hosts_then_any(build):
    wish = build.wish("sim", kind="sim", pools=(PoolWish(Role.AGGREGATED, 2),))

    slots = make_plan(*build.cluster([build.host("a", 8), build.host("b", cpu_slots=2)], wish))
    gpus = make_plan(
        *build.cluster([build.host("a", 8), build.host("b", 8), build.host("c")], wish)
    )
    bare = make_plan(*build.cluster([build.host("a"), build.host("b")], wish))

    assert {name for name, _ in places(slots)} == {"b"}
    assert {name for name, _ in places(gpus)} == {"a", "b"}
    assert gpus.deployments[0].router.host_name == "c"
    assert {name for name, _ in places(bare)} == {"a", "b"}


def test_plans_on_declared_gpus_say_so(build):
    host = build.host("a", 8)
    host = replace(host, gpus=tuple(replace(gpu, is_simulated=True) for gpu in host.gpus))

    plan = make_plan(*build.cluster([host], build.wish()))

    assert "simulated" in plan.warnings[0]


def test_large_hosts_are_grouped_within_a_moment():
    links = tuple(tuple("X" if a == b else "NV6" for b in range(16)) for a in range(16))
    near = Near(tuple(i // 8 for i in range(16)))

    assert tp_groups(links, near, 8) == (tuple(range(8)), tuple(range(8, 16)))
    assert len(tp_groups(links, Near(), 2)) == 8
    assert nvlink_islands(links) == (tuple(range(16)),)


def test_a_gpu_left_over_stays_out_of_groups():
    row = {(0, 1), (1, 0), (2, 3), (3, 2)}
    links = [
        ["X" if a == b else "NV4" if (a, b) in row else "SYS" for b in range(5)] for a in range(5)
    ]

    assert tp_groups(links, Near(), 2) == ((0, 1), (2, 3))
    assert tp_groups(links, Near(), 8) == ()


def test_an_entry_missing_from_the_inventory_matches_by_name(build):
    topology, inventory, models = build.cluster(
        [build.host("a", 2)], build.wish(pools=aggregated(1, 1))
    )

    plan = make_plan(topology, replace(inventory, hosts=(HostEntry("other", "x"),)), models)

    assert places(plan) == [("a", [0])]


def test_a_replicas_gpus_are_found_on_its_host_in_the_plans_order(build):
    host = build.host("a", 4)
    taken = tuple(PlannedGpu(host.gpus[i].uuid, i) for i in (3, 1))
    gone = PlannedGpu("GPU-gone", 9)
    replicas = tuple(
        Replica(name, Role.AGGREGATED, where, gpus)
        for name, where, gpus in (
            ("both", "a", taken),
            ("one-gone", "a", (gone, taken[1])),
            ("all-gone", "a", (gone,)),
            ("no-host", "b", taken),
            ("no-gpus", "a", ()),
        )
    )

    found = replica_groups(Pool(Role.AGGREGATED, Parallelism(2), replicas), {"a": host})

    assert {name: group.positions for name, group in found.items()} == {
        "both": (3, 1),
        "one-gone": (1,),
    }
