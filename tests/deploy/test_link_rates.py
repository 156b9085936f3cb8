"""What a router is told of links that were measured, or whose devices say what they carry."""

from dataclasses import replace

import msgspec
import pytest

from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.kv_links import LinkRate
from dynctl.core.links import LinkEnd, LinkKind, LinkMeasurement, LinkPoint, RoundTrip
from dynctl.core.machine import GpuHealth
from dynctl.core.plan import MemorySheet, Parallelism, PlannedGpu
from dynctl.deploy.link_rates import link_rates
from dynctl.deploy.slices import make_slices
from dynctl.router.config import parse_config

GB = 10**9
H100 = "NVIDIA H100 80GB HBM3"
BYTES = 100_000
"""Of a token's KV."""


def host(name, label="SYS", nics=(), clique=None):
    gpus = tuple(
        Gpu(i, f"{name}{i}", H100, 80 * GB, health=GpuHealth(fabric_clique=clique))
        for i in range(4)
    )
    links = tuple(tuple("X" if a == b else label for b in range(4)) for a in range(4))
    near = tuple((i, tuple(nic.name for nic in nics)) for i in range(4))
    islands = ((0, 1, 2, 3),) if label.startswith("NV") else ()
    return Host(
        name,
        f"{name}.example",
        "10.0.0.1",
        gpus=gpus,
        gpu_links=links,
        gpu_nics=near,
        nvlink_islands=islands,
        nics=nics,
    )


def rdma(*bits_s):
    return tuple(
        Nic(f"mlx5_{i}", "infiniband", "up", rate_bits_s=rate) for i, rate in enumerate(bits_s)
    )


def point(bytes_s, streams=1, busy=0.0, messages=10):
    return LinkPoint(1 << 20, streams, messages, bytes_s, bytes_s, bytes_s, bytes_s, busy)


def measured(source_name, target_name, kind, *points, trip_s=0.0, **more):
    trip = RoundTrip(8, 100, trip_s, trip_s, trip_s, 0.0) if trip_s else None
    return LinkMeasurement(
        source_name, target_name, kind, 0.0, round_trip=trip, points=points, **more
    )


SEATS = {
    "chat-prefill-0": ("a0", "a1"),
    "chat-decode-0": ("a2", "a3"),
    "chat-decode-1": ("b0", "b1"),
}


def seated(plan, seats=SEATS, tp=2):
    """The plan with vLLM engines on GPUs; without seats on none."""
    (planned,) = plan.deployments
    pools = tuple(
        replace(
            pool,
            parallelism=Parallelism(tp=tp),
            memory=MemorySheet(
                *(80, 0, 0, 0), kv_bytes=BYTES, kv_capacity_tokens=tp, source="modelled"
            ),
            replicas=tuple(
                replace(
                    one,
                    gpus=tuple(PlannedGpu(uuid, int(uuid[1:])) for uuid in seats.get(one.id, ())),
                )
                for one in pool.replicas
            ),
        )
        for pool in planned.pools
    )
    return replace(planned, engine_kind="vllm", pools=pools)


def between(plan, a, b, *links, **how):
    """What is told of the link from host a to host b."""
    rates = link_rates(seated(plan, **how), Topology((a, b), links=links), BYTES)
    return [rate for rate in rates if (rate.source_host, rate.target_host) == ("a", "b")]


def test_a_measured_rate_becomes_the_time_of_a_token_at_the_share_transfers_reach(plan):
    link = measured("a", "b", LinkKind.TCP, point(1.25 * GB), trip_s=0.0004)
    # 100 kB at 1.25 GB/s, of which a transfer reaches 0.8: 0.1 ms.
    told = [LinkRate("a", "b", "tcp", 0.1, 0.4, "measured")]
    assert between(plan, host("a"), host("b"), link) == told
    assert between(plan, host("a"), host("b"), link, seats={}) == told, "engines without GPUs too"
    back = replace(link, source_name="b", target_name="a")
    assert between(plan, host("a"), host("b"), back) == [], "nothing is sent that way"


@pytest.mark.parametrize(("tp", "bytes_s"), [(1, 1.0), (2, 2.0), (4, 3.0)])
def test_an_engine_uses_as_many_streams_as_it_has_ranks(plan, tp, bytes_s):
    points = (point(1 * GB), point(2 * GB, 2), point(3 * GB, 4), point(4 * GB, 8))
    link = measured("a", "b", LinkKind.TCP, *points)
    (rate,) = between(plan, host("a"), host("b"), link, seats={}, tp=tp)
    assert rate.ms_per_token == float(f"{BYTES / (bytes_s * GB * 0.8) * 1e3:.2g}")


def test_no_more_is_told_than_the_devices_carry(plan):
    end = LinkEnd("10.0.0.1", "eth0", rate_bits_s=10 * GB)
    link = measured("a", "b", LinkKind.TCP, point(5 * GB), source=end)
    (rate,) = between(plan, host("a"), host("b"), link)
    assert rate.ms_per_token == 0.1, "10 Gb/s are 1.25 GB/s, whatever was seen over a few moments"

    # 100 GB/s between the hosts, of which the devices near these GPUs carry 50 at the one end and 25 at the other.
    a, b = host("a", nics=rdma(200 * GB, 200 * GB)), host("b", nics=rdma(200 * GB))
    link = measured("a", "b", LinkKind.NIXL_VRAM, point(100 * GB))
    assert between(plan, a, b, link) == [LinkRate("a", "b", "rdma", 0.005)]


def test_only_what_is_measured_of_that_class_of_link_is_told(plan):
    tcp = measured("a", "b", LinkKind.TCP, point(1.25 * GB))
    nics = rdma(200 * GB)
    assert between(plan, host("a", nics=nics), host("b", nics=nics), tcp) == [], "KV goes by RDMA"
    rack = [host(name, "NV18", clique="rack 7") for name in "ab"]
    dram = measured("a", "b", LinkKind.NIXL_DRAM, point(20 * GB))
    assert between(plan, *rack, tcp, dram) == [], "KV goes by NVLink"
    vram = measured("a", "b", LinkKind.NIXL_VRAM, point(250 * GB))
    assert between(plan, *rack, tcp, dram, vram) == [LinkRate("a", "b", "nvlink", 0.0005)]


def test_a_measurement_that_processors_held_up_is_none(plan):
    busy = measured("a", "b", LinkKind.TCP, point(0.1 * GB, busy=0.9))
    assert between(plan, host("a"), host("b"), busy) == []
    failed = measured("a", "b", LinkKind.TCP, error="no route")
    assert between(plan, host("a"), host("b"), failed) == []


@pytest.mark.parametrize("bytes_s", [0.0, 1e-305, 1e5])
def test_a_link_of_no_rate_is_none_and_refuses_no_router_its_configuration(plan, bytes_s):
    stalled = LinkPoint(1 << 20, 1, 20, GB, GB, bytes_s, bytes_s)
    link = measured("a", "b", LinkKind.NIXL_DRAM, stalled)
    assert between(plan, host("a"), host("b"), link, seats={}) == []


@pytest.mark.parametrize(
    ("label", "link", "bytes_s"), [("NV18", "nvlink", 2 * 450 * GB), ("SYS", "host", 64 * GB)]
)
def test_inside_a_host_links_are_told_by_what_they_are_rated_at(plan, label, link, bytes_s):
    rates = link_rates(seated(plan), Topology((host("a", label), host("b"))), BYTES)
    ms = float(f"{BYTES / (bytes_s * 0.8) * 1e3:.2g}")
    assert rates == (LinkRate("a", "a", link, ms, 0.0, "nominal"),)


def test_of_unlike_engines_between_two_hosts_the_slower_counts(plan):
    planned = seated(plan)
    decode = planned.pools[1]
    narrow = replace(decode, parallelism=Parallelism(), replicas=(decode.replicas[1],))
    wide = replace(decode, parallelism=Parallelism(tp=4), replicas=(decode.replicas[1],))
    prefill = replace(planned.pools[0], parallelism=Parallelism())
    link = measured("a", "b", LinkKind.TCP, point(1 * GB), point(4 * GB, 4))
    topology = Topology((host("a"), host("b")), links=(link,))
    for pools in ((prefill, narrow, wide), (prefill, wide, narrow)):
        (rate,) = link_rates(replace(planned, pools=pools), topology, BYTES)
        assert rate.ms_per_token == 0.12


def test_nothing_is_told_where_it_would_mean_nothing(plan):
    link = measured("a", "b", LinkKind.TCP, point(1.25 * GB))
    topology = Topology((host("a"), host("b")), links=(link,))
    assert link_rates(seated(plan), topology, 0) == ()
    assert link_rates(seated(plan), None, BYTES) == ()
    assert link_rates(replace(seated(plan), engine_kind="sim"), topology, BYTES) == ()


def test_a_router_gets_the_rates_by_its_bytes_per_token_and_no_more_digits_than_mean_something(
    plan, inventory, ground
):
    plan = replace(plan, deployments=(seated(plan),))
    wish = inventory.deployments[0]
    ownwise = replace(
        wish, router=replace(wish.router, settings=(("kv_bytes_per_token", 200_000),))
    )

    def told(bytes_s, wish=wish):
        link = measured("a", "b", LinkKind.TCP, point(bytes_s))
        stands = replace(ground, topology=Topology((host("a"), host("b")), links=(link,)))
        unit = make_slices(plan, replace(inventory, deployments=(wish,)), stands)["a"].routers[0]
        config = parse_config(msgspec.json.encode(unit.config))
        return unit.config, {rate.target_host: rate.ms_per_token for rate in config.link_rates}

    config, rates = told(1.25 * GB)
    assert rates["b"] == 0.1
    assert config == told(1.252 * GB)[0]
    assert config != told(1.5 * GB)[0]
    assert told(1.25 * GB, ownwise)[1]["b"] == 0.2
