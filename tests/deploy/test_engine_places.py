"""What a router is told of where engines stand, and what a token's KV takes."""

from dataclasses import replace

import msgspec
import pytest

from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.kv_links import LinkClasses
from dynctl.core.machine import GpuHealth
from dynctl.core.plan import MemorySheet, Parallelism, PlannedGpu
from dynctl.deploy.engine_places import engine_places, kv_bytes_per_token
from dynctl.deploy.slices import make_slices
from dynctl.router.config import parse_config

RDMA = Nic("mlx5_0", "infiniband", "up")
PLAIN = Nic("eth0", "ethernet", "up")


def host(name, *, islands=(), nics=(), clique=None):
    gpus = tuple(
        Gpu(i, f"{name}{i}", "H100", 80, health=GpuHealth(fabric_clique=clique)) for i in range(4)
    )
    return Host(name, f"{name}.example", "10.0.0.1", gpus=gpus, nvlink_islands=islands, nics=nics)


def seated(plan, gpus):
    """The plan with its engines on GPUs; `gpus` by engine."""
    (planned,) = plan.deployments
    pools = tuple(
        replace(
            pool,
            replicas=tuple(
                replace(one, gpus=tuple(PlannedGpu(uuid, int(uuid[1:])) for uuid in gpus[one.id]))
                for one in pool.replicas
            ),
        )
        for pool in planned.pools
    )
    return replace(planned, pools=pools)


GPUS = {
    "chat-prefill-0": ("a0", "a1"),
    "chat-decode-0": ("a2", "a3"),
    "chat-decode-1": ("b0",),
}


def classes(planned, *hosts):
    found = LinkClasses(engine_places(planned, Topology(hosts=hosts)))
    return [found.of("chat-prefill-0", f"chat-decode-{number}") for number in (0, 1)]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"islands": ((0, 1, 2, 3),)}, {}, ["nvlink", "tcp"]),
        ({"islands": ((0, 1), (2, 3))}, {}, ["host", "tcp"]),
        ({"nics": (RDMA,)}, {"nics": (PLAIN, RDMA)}, ["host", "rdma"]),
        ({"nics": (RDMA,)}, {"nics": (PLAIN,)}, ["host", "tcp"]),
        ({"clique": "rack 7"}, {"clique": "rack 7"}, ["nvlink", "nvlink"]),
        ({"clique": "rack 7"}, {"clique": "rack 8"}, ["nvlink", "tcp"]),
    ],
)
def test_links_are_named_by_what_discovery_saw(plan, a, b, expected):
    assert classes(seated(plan, GPUS), host("a", **a), host("b", **b)) == expected


def test_engines_without_gpus_are_told_apart_by_host_and_network(plan):
    (planned,) = plan.deployments
    assert classes(planned, host("a"), host("b")) == ["host", "tcp"]


def test_data_parallel_ranks_stand_where_their_engine_does(plan):
    (planned,) = plan.deployments
    pools = tuple(replace(pool, parallelism=Parallelism(dp=2)) for pool in planned.pools)
    places = engine_places(replace(planned, pools=pools), Topology(hosts=(host("a"), host("b"))))
    assert [place.id for place in places][:4] == [
        "chat-prefill-0_dp0",
        "chat-prefill-0_dp1",
        "chat-decode-0_dp0",
        "chat-decode-0_dp1",
    ]
    assert LinkClasses(places).of("chat-prefill-0_dp1", "chat-decode-1_dp0") == "tcp"


def test_what_a_token_takes_is_by_the_memory_sheet_or_the_simulation(plan, inventory):
    (planned,) = plan.deployments
    (wish,) = inventory.deployments
    assert kv_bytes_per_token(planned, wish) == 131_072
    own = replace(wish, engine=replace(wish.engine, args=(("kv-bytes-per-token", "4096"),)))
    assert kv_bytes_per_token(planned, own) == 4096

    real = replace(planned, engine_kind="vllm")
    assert kv_bytes_per_token(real, wish) == 0
    sheet = MemorySheet(80, 0, 0, 0, kv_bytes=1_000_000, kv_capacity_tokens=1000, source="modelled")
    pools = tuple(replace(pool, memory=sheet, parallelism=Parallelism(tp=2)) for pool in real.pools)
    assert kv_bytes_per_token(replace(real, pools=pools), wish) == 2000


def test_a_router_is_told_both_and_an_inventory_may_say_otherwise(plan, inventory, ground):
    ground = replace(ground, topology=Topology(hosts=(host("a", nics=(RDMA,)), host("b"))))
    unit = make_slices(plan, inventory, ground)["a"].routers[0]
    config = parse_config(msgspec.json.encode(unit.config))
    assert [place.id for place in config.places] == [
        "chat-prefill-0",
        "chat-decode-0",
        "chat-decode-1",
    ]
    assert config.settings.kv_bytes_per_token == 131_072
    assert config.decision_log == "/r/a/state/decisions/chat-router"

    wish = inventory.deployments[0]
    wish = replace(wish, router=replace(wish.router, settings=(("kv_bytes_per_token", 7),)))
    unit = make_slices(plan, replace(inventory, deployments=(wish,)), ground)["a"].routers[0]
    assert unit.config["settings"] == {"kv_bytes_per_token": 7}
