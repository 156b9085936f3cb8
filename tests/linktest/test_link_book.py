"""Measurements that are kept: the newest of each, and only of machines that are still the same."""

from dataclasses import replace

import pytest

from dynctl import store
from dynctl.core.hardware import Host, Topology
from dynctl.core.links import (
    LinkBook,
    LinkEnd,
    LinkHost,
    LinkKind,
    LinkMeasurement,
    LinkPoint,
    RoundTrip,
)


def link(source, target, kind=LinkKind.TCP, at_s=1.0, bytes_s=1e9, **more):
    point = LinkPoint(1 << 20, 1, 100, bytes_s, bytes_s, bytes_s * 0.9, bytes_s * 0.8, 0.1)
    trip = RoundTrip(64, 1000, 30e-6, 40e-6, 60e-6, 5e-6)
    end = LinkEnd("10.0.0.1", "eth0", "eth0", "eth0", 10_000_000_000, 9000, 0.0)
    return LinkMeasurement(source, target, kind, at_s, trip, (point,), end, end, "tcp", 0.0, **more)


def host(name, machine="m", address="10.0.0.1"):
    return LinkHost(name, f"{machine}-{name}", address)


OLD = LinkBook((host("a"), host("b"), host("c")), (link("a", "b"), link("b", "a"), link("a", "c")))


def test_a_newer_measurement_replaces_the_older_one_and_leaves_others():
    newer = LinkBook((host("a"), host("b")), (link("a", "b", at_s=2.0),))

    book = OLD.updated(newer)

    assert [(m.source_name, m.target_name, m.measured_unix_s) for m in book.links] == [
        ("a", "b", 2.0),
        ("a", "c", 1.0),
        ("b", "a", 1.0),
    ]
    assert [h.name for h in book.hosts] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "changed", [host("a", machine="new"), host("a", address="10.9.9.9")], ids=["machine", "address"]
)
def test_a_name_that_means_something_else_now_loses_its_links(changed):
    book = OLD.updated(LinkBook((changed, host("b")), (link("a", "b", at_s=2.0),)))

    assert [(m.source_name, m.target_name) for m in book.links] == [("a", "b")]
    assert OLD.matching([changed, host("b"), host("c")]) == ()


def test_a_book_survives_the_file(tmp_path):
    path = tmp_path / "links.json"
    failed = LinkMeasurement("c", "a", LinkKind.NIXL_DRAM, 3.0, error="no answer")
    book = replace(OLD, links=(*OLD.links, failed))

    store.save(path, book)

    assert store.load(path, LinkBook) == book


def test_a_topology_takes_the_links_of_its_hosts_and_names_what_is_unmeasured():
    hosts = [
        Host(n, n, "10.0.0.1", python="/usr/bin/python3", machine_id=f"m-{n}")
        for n in ("a", "b", "d")
    ]

    topology = Topology(tuple(hosts)).with_links(OLD)

    assert topology.link("a", "b", LinkKind.TCP) == link("a", "b")
    assert topology.link("a", "c", LinkKind.TCP) is None
    assert topology.link("a", "b", LinkKind.NIXL_DRAM) is None
    assert topology.unmeasured() == (("a", "d"), ("b", "d"), ("d", "a"), ("d", "b"))


def test_a_failed_measurement_counts_as_unmeasured():
    hosts = tuple(Host(n, n, "10.0.0.1", machine_id=f"m-{n}") for n in ("a", "b"))
    failed = LinkMeasurement("a", "b", LinkKind.TCP, 1.0, error="refused")
    book = LinkBook((host("a"), host("b")), (failed, link("b", "a")))

    assert Topology(hosts).with_links(book).unmeasured() == (("a", "b"),)


def test_a_jittery_link_ranks_below_a_steady_one_of_equal_rate():
    steady = LinkPoint(1 << 20, 1, 100, 1e9, 1e9, 0.95e9, 0.9e9)
    uneven = LinkPoint(1 << 20, 1, 100, 1e9, 1e9, 0.2e9, 0.1e9)
    one, other = (replace(link("a", "b"), points=(point,)) for point in (steady, uneven))

    assert one.bytes_s == other.bytes_s
    assert one.steady_bytes_s > 2 * other.steady_bytes_s


def test_the_negotiated_rate_is_that_of_the_slower_end():
    fast = LinkEnd("", "eth0", rate_bits_s=400_000_000_000)
    slow = LinkEnd("", "eth0", rate_bits_s=100_000_000_000)
    unknown = LinkEnd("", "eth0")

    assert replace(link("a", "b"), source=fast, target=slow).nominal_bytes_s == 12.5e9
    assert replace(link("a", "b"), source=fast, target=unknown).nominal_bytes_s == 50e9
    assert replace(link("a", "b"), source=None, target=unknown).nominal_bytes_s is None
