"""Verdicts and warnings over measurements made up for it."""

from dataclasses import replace

import pytest

from dynctl.core.links import LinkEnd, LinkKind, LinkMeasurement, LinkPoint, RoundTrip
from dynctl.linktest.judge import Verdict, rate, verdict, warnings

GBIT = 1e9 / 8
END = LinkEnd("10.0.0.1", "eth0", "eth0", "eth0", 10_000_000_000, 1500, 0.0)
QUIET = RoundTrip(64, 5000, 30e-6, 40e-6, 90e-6, 3e-6)


def link(first="a", second="b", gbit=9.4, kind=LinkKind.TCP, busy=0.1, even=0.95, **change):
    bytes_s = gbit * GBIT
    points = (
        LinkPoint(1 << 20, 1, 200, bytes_s * 0.9, bytes_s * 0.9, bytes_s * 0.9 * even, 1, busy),
        LinkPoint(1 << 20, 4, 200, bytes_s, bytes_s, bytes_s / 3, 1, busy),
    )
    made = LinkMeasurement(first, second, kind, 1.0, QUIET, points, END, END, "tcp", 0.0)
    return replace(made, **change)


def pair(there=None, back=None):
    return [link(**(there or {})), link("b", "a", **(back or {}))]


def codes(links, **more):
    return [w.code for w in warnings(links, **more)]


def test_a_good_pair_is_ok_and_says_nothing():
    assert [verdict(m) for m in pair()] == [Verdict.OK, Verdict.OK]
    assert codes(pair()) == []


def test_a_link_below_six_tenths_of_its_rate_is_slow_with_both_figures():
    links = pair({"gbit": 5.9}, {"gbit": 5.9})

    assert verdict(links[0]) is Verdict.SLOW
    assert codes(links) == ["link-slow", "link-slow"]
    assert warnings(links)[0].text == "a → b tcp: 5.9 Gb/s of 10 Gb/s negotiated (59%)"


def test_a_link_the_processors_could_not_fill_is_not_called_slow():
    links = pair({"gbit": 3, "busy": 0.9}, {"gbit": 3, "busy": 0.9})

    assert verdict(links[0]) is Verdict.PROCESSOR_BOUND
    assert codes(links) == ["link-processor-bound"] * 2
    assert "at least 3 Gb/s" in warnings(links)[0].text


def test_one_point_with_idle_processors_near_the_best_proves_the_link_slow():
    hampered = link(gbit=3, busy=0.9)
    idle = replace(hampered.points[0], busy_ratio=0.1)

    assert verdict(replace(hampered, points=(idle, hampered.points[1]))) is Verdict.SLOW
    far = replace(idle, bytes_s=idle.bytes_s / 2)
    assert verdict(replace(hampered, points=(far, hampered.points[1]))) is Verdict.PROCESSOR_BOUND


def test_nixl_that_waited_for_processors_is_not_called_slow_either():
    starved = link(gbit=1, kind=LinkKind.NIXL_DRAM, busy=0.3)

    assert verdict(starved) is Verdict.PROCESSOR_BOUND
    assert verdict(replace(starved, kind=LinkKind.TCP)) is Verdict.SLOW


def test_directions_that_differ_are_asymmetric_once_and_name_the_slower():
    found = [w for w in warnings(pair({"gbit": 9.4}, {"gbit": 6.2})) if w.code == "link-asymmetric"]

    assert [w.text for w in found] == ["b → a tcp: 6.2 Gb/s, the other way 9.4 Gb/s"]


@pytest.mark.parametrize(
    "change",
    [
        {"round_trip": RoundTrip(64, 5000, 30e-6, 400e-6, 1e-3, 50e-6)},
        {"round_trip": RoundTrip(64, 5000, 30e-6, 60e-6, 5e-3, 50e-6)},
        {"round_trip": RoundTrip(64, 5000, 10e-3, 16e-3, 18e-3, 3e-3)},
        {"even": 0.2},
    ],
    ids=["p95", "p99", "far", "messages"],
)
def test_a_jittery_link_is_told(change):
    links = pair(change)

    assert verdict(links[0]) is Verdict.JITTERY
    assert codes(links) == ["link-jittery"]


@pytest.mark.parametrize(
    "trip",
    [
        RoundTrip(64, 5000, 30e-6, 150e-6, 300e-6, 20e-6),
        RoundTrip(64, 5000, 10e-3, 10.4e-3, 11e-3, 0.1e-3),
        RoundTrip(64, 5, 30e-6, 9e-3, 9e-3, 5e-3),
    ],
    ids=["noise", "far but steady", "too few to tell"],
)
def test_noise_is_not_jitter(trip):
    assert codes(pair({"round_trip": trip}, {"round_trip": trip})) == []


def test_no_negotiated_rate_means_no_judgement():
    unrated = link(source=replace(END, rate_bits_s=None), target=None)

    assert verdict(unrated) is Verdict.UNRATED


def test_a_failed_pair_is_one_warning_with_its_cause():
    links = [
        LinkMeasurement(a, b, LinkKind.TCP, 1.0, error="no answer")
        for a, b in (("a", "b"), ("b", "a"))
    ]

    assert [verdict(m) for m in links] == [Verdict.FAILED] * 2
    assert [(w.code, w.text) for w in warnings(links)] == [("link-failed", "a ↔ b tcp: no answer")]


def test_another_interface_than_the_data_address_is_told():
    detour = replace(END, route_interface="eno1", data_interface="ib0")

    assert "link-interface" in codes(pair({"source": detour}))


def test_two_hosts_on_one_machine_are_told_and_not_called_jittery():
    local = replace(END, route_interface="lo", rate_bits_s=None)
    links = pair(
        {"source": local, "target": local, "even": 0.1}, {"source": local, "target": local}
    )

    assert codes(links) == ["link-on-one-machine"]
    assert verdict(links[0]) is Verdict.UNRATED


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"retransmit_ratio": 0.02}, "link-lossy"),
        ({"target": replace(END, mtu_bytes=9000)}, "link-mtu-differs"),
        ({"target": replace(END, other_bytes_s=2 * GBIT)}, "link-busy"),
    ],
)
def test_other_facts_that_matter(change, code):
    assert codes(pair(change)) == [code]


def nixl(gbit, transport, **more):
    return link(gbit=gbit, kind=LinkKind.NIXL_DRAM, transport=transport, **more)


def test_nixl_over_tcp_is_told_where_both_hosts_have_rdma():
    links = [nixl(9, "tcp/eth0 (software emulation)")]

    assert codes(links, rdma_hosts={"a", "b"}) == ["nixl-over-tcp"]
    assert codes(links, rdma_hosts={"a"}) == []
    assert codes([nixl(9, "rc_mlx5/mlx5_0:1")], rdma_hosts={"a", "b"}) == []


def test_nixl_far_below_plain_tcp_is_told():
    assert "nixl-slower-than-tcp" in codes([link(gbit=9), nixl(4, "tcp/eth0")])
    assert "nixl-slower-than-tcp" not in codes([link(gbit=9), nixl(8, "tcp/eth0")])


@pytest.mark.parametrize(
    ("bytes_s", "text"),
    [(1.1775e9, "9.42 Gb/s"), (25e6, "200 Mb/s"), (4000, "32 kb/s"), (10, "80 b/s"), (None, "–")],
)
def test_rates_are_written_as_networks_are_sold(bytes_s, text):
    assert rate(bytes_s) == text
