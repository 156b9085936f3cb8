"""Two network namespaces and a cable that is slowed, mis-set or cut: are the figures right, and the verdicts? (root)"""

import asyncio
from dataclasses import replace

import pytest

from dynctl.core.links import LinkKind
from dynctl.linktest.judge import Verdict, verdict, warnings
from dynctl.linktest.run import FULL, measure, tcp

MBIT = 1e6 / 8


def directions(seats, ports, pace=FULL):
    links = asyncio.run(measure(["a", "b"], [tcp(seats)], pace, ports))
    return {(m.source_name, m.target_name): m for m in links}


def codes(found, *pair):
    text = f"{pair[0]} → {pair[1]} "
    return {w.code for w in warnings(list(found.values())) if w.text.startswith(text)}


@pytest.mark.parametrize("mbit", [50, 400])
def test_one_slowed_direction_is_found_and_measured_right(cable, ports, mbit):
    burst = str(mbit * 125)  # one millisecond
    cable.shape(cable.b, "tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "100ms")

    found = directions(cable.seats(), ports)

    slow = found["b", "a"]
    assert slow.kind is LinkKind.TCP
    # What tc lets through is counted with headers: TCP's payload is 0.94 to 0.97 of it.
    assert 0.7 * mbit < slow.bytes_s / MBIT < 1.1 * mbit
    assert slow.nominal_bytes_s == 10_000 * MBIT
    assert verdict(slow) is Verdict.SLOW
    assert {"link-slow", "link-asymmetric"} <= codes(found, "b", "a")
    assert verdict(found["a", "b"]) is not Verdict.SLOW
    assert found["a", "b"].bytes_s > 2 * slow.bytes_s
    assert (
        slow.source.interface == slow.source.route_interface == slow.source.data_interface == "eth0"
    )
    assert {p.message_bytes for p in slow.points} <= {size for size, _ in FULL.points}


def test_a_pair_on_a_slow_link_is_measured_without_sending_all_that_a_fast_one_would_carry(
    cable, ports
):
    cable.shape(cable.b, "tbf", "rate", "5mbit", "burst", "5000", "latency", "200ms")
    cable.shape(cable.a, "tbf", "rate", "5mbit", "burst", "5000", "latency", "200ms")

    links = list(directions(cable.seats(), ports).values())

    assert [m.error for m in links] == [None, None]
    assert all(3 < m.bytes_s / MBIT < 6 for m in links)
    # 16 MiB would take 27 s here.
    assert all(p.message_bytes < 16 * 2**20 for m in links for p in m.points)


def test_a_port_that_negotiated_less_shows_in_the_negotiated_rate(cable, ports, short):
    """veth says 10 Gb/s whatever it does; a bridge's rate is that of its ports, so here it is simply read."""
    found = directions(cable.seats(), ports, short)

    assert found["a", "b"].source.rate_bits_s == 10_000_000_000
    assert found["a", "b"].source.mtu_bytes == 1500


def test_different_mtus_and_another_way_out_are_told(cable, ports, short):
    cable.run("ip", "-n", cable.a, "link", "set", "eth0", "mtu", "9000")
    cable.run("ip", "-n", cable.a, "link", "add", "data0", "type", "bridge")
    cable.run("ip", "-n", cable.a, "addr", "add", "10.77.0.1/24", "dev", "data0")
    cable.run("ip", "-n", cable.a, "link", "set", "data0", "up")
    cable.run("ip", "-n", cable.b, "route", "add", "10.77.0.1/32", "via", cable.address_a)
    seats = cable.seats()
    host = replace(seats["a"].host, data_address="10.77.0.1")
    seats["a"] = replace(seats["a"], host=host)

    found = directions(seats, ports, short)

    assert found["a", "b"].error is None
    assert found["a", "b"].source.route_interface == "eth0"
    assert found["a", "b"].source.data_interface == "data0"
    said = {w.code for w in warnings(list(found.values()))}
    assert {"link-interface", "link-mtu-differs"} <= said


def test_a_cut_cable_is_a_failed_pair_with_its_cause(cable, ports, short):
    cable.run("ip", "-n", cable.a, "link", "set", "eth0", "down")

    found = directions(cable.seats(), ports, short)

    assert {verdict(m) for m in found.values()} == {Verdict.FAILED}
    error = found["a", "b"].error
    assert error.startswith("a to b: ")
    assert "unreachable" in error or "no answer from 10.99.1.2:" in error


def test_a_firewall_that_drops_is_named_as_no_answer(cable, ports, short):
    rules = "add table inet cut; add chain inet cut out { type filter hook output priority 0; }; "
    cable.run(
        "ip",
        "netns",
        "exec",
        cable.a,
        "nft",
        rules + "add rule inet cut out ip daddr 10.99.1.2 drop",
    )

    found = directions(cable.seats(), ports, short)

    assert "no answer from 10.99.1.2:" in found["a", "b"].error
