"""`dynctl linktest` on booted hosts: a throttled host's pairs are found slow, the others not, nothing is left."""

import json

import pytest
from hostlab import network
from hostlab.lab import HostSpec, Lab

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.timeout(600)]

SLOW_BITS_S = 200_000_000


@pytest.fixture(scope="module")
def hosts(make_lab) -> Lab:
    lab = make_lab(HostSpec("one"), HostSpec("two"), HostSpec("three"))
    lab.write_inventory([])
    return lab


def linktest(lab: Lab, *args: str, code: int = 0):
    done = lab.dynctl("linktest", "-o", "json", *args)
    assert done.returncode == code, done.stderr
    said = json.loads(done.stdout)
    return said, {(link["source"], link["target"]): link for link in said["links"]}


def test_the_throttled_host_is_found_slow_and_its_figure_is_right(hosts: Lab) -> None:
    network.throttle(hosts.hub, hosts["three"].namespace, hosts["three"].address, SLOW_BITS_S)
    try:
        said, links = linktest(hosts)
    finally:
        network.throttle(hosts.hub, hosts["three"].namespace, hosts["three"].address, None)

    assert len(links) == 6
    for (source, target), link in links.items():
        assert link["error"] is None
        assert link["nominal_bytes_s"] == 10e9 / 8
        assert link["source_end"]["route_interface"] == "eth0"
        if "three" in {source, target}:
            assert link["verdict"] == "slow"
            assert 0.6 < link["bytes_s"] * 8 / SLOW_BITS_S < 1.15
        else:
            assert link["verdict"] != "slow"
            assert link["bytes_s"] * 8 > 2 * SLOW_BITS_S
    slow = {w["text"].split(" tcp:")[0] for w in said["warnings"] if w["code"] == "link-slow"}
    assert slow == {"one → three", "two → three", "three → one", "three → two"}


def test_a_link_that_is_cut_fails_alone_and_the_rest_is_measured(hosts: Lab) -> None:
    one, two = hosts["one"], hosts["two"]
    network.drop_packets(one.namespace, (two.address,))
    try:
        said, links = linktest(hosts, "--quick", code=3)
    finally:
        network.allow_again(one.namespace)

    failed = {pair for pair, link in links.items() if link["verdict"] == "failed"}
    assert failed == {("one", "two"), ("two", "one")}
    assert "no answer from 10.88.0." in links["one", "two"]["error"]
    assert [w["code"] for w in said["warnings"] if w["code"] == "link-failed"] == ["link-failed"]


def test_nothing_is_left_on_the_hosts_and_no_port_is_open(hosts: Lab) -> None:
    linktest(hosts, "--quick", "--limit", "one,two")

    assert hosts.left_on_hosts() == {}
    for name in ("one", "two"):
        assert [port for _, port in hosts[name].listening() if port != 22] == []
    assert (hosts.home / ".dynctl").is_dir()


def test_too_few_hosts_are_refused(hosts: Lab) -> None:
    done = hosts.dynctl("linktest", "--limit", "one")

    assert done.returncode == 4
    assert "a link has two ends" in done.stderr
