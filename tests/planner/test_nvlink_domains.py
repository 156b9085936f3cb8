"""Hosts that NVLink joins: one domain for layouts that are had by asking, single hosts for what is chosen."""

from dataclasses import replace

import pytest

from dynctl.core.hardware import Topology
from dynctl.core.links import LinkKind, LinkMeasurement, LinkPoint
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError
from dynctl.planner.placement import Group
from dynctl.planner.search import make_plan
from dynctl.planner.spanning import nvlink_domains
from dynctl.planner.transfer import Fabric

CLIQUE = "1f0f5a3e-6f2b-4c1d-9c57-3d0a8a6e2b11/1"


def trays(b, num, kind="h100", clique=CLIQUE):
    return [b.host(f"tray-{i}", 4, kind, nics=True, clique=clique) for i in range(1, num + 1)]


def test_hosts_of_one_clique_are_a_domain_and_a_host_alone_or_torn_is_none(build):
    torn = build.host("torn", 4, clique=CLIQUE)
    first = replace(torn.gpus[0], health=replace(torn.gpus[0].health, fabric_clique="other/2"))
    torn = replace(torn, gpus=(first, *torn.gpus[1:]))
    alone = build.host("alone", 4, clique="other/3")
    hosts = [*trays(build, 2), torn, alone, build.host("plain", 4), build.host("cpu")]

    (domain,) = nvlink_domains(hosts)

    assert domain.clique == CLIQUE
    assert [host.name for host in domain.hosts] == ["tray-1", "tray-2"]


def test_a_model_too_large_for_a_host_is_shown_over_the_domain_and_refused(build):
    with pytest.raises(PlanError) as caught:
        make_plan(*build.cluster(trays(build, 6), build.wish("deepseek-v3")))

    assert "tp16 over tray-1, tray-2, tray-3, tray-4 of one NVLink domain" in caught.value.hint


def test_without_a_clique_a_pipeline_over_hosts_comes_first(build):
    with pytest.raises(PlanError) as caught:
        make_plan(*build.cluster(trays(build, 6, clique=None), build.wish("deepseek-v3")))

    assert "NVLink domain" not in caught.value.hint
    assert "tp4 pp3 over tray-1, tray-2, tray-3 (" in caught.value.hint


def test_a_rack_is_planned_host_by_host_and_names_what_its_domain_would_bear(build):
    wish = build.wish("deepseek-v3", workload=Workload(2048, 256, 8.0), slo=Slo(2000, 50))
    plan = make_plan(*build.cluster(trays(build, 18, "gb200"), wish))
    reasons = plan.deployments[0].reasons

    assert all(pool.parallelism.num_gpus <= 4 for pool in plan.deployments[0].pools)
    (idea,) = [r for r in reasons if r.startswith("not startable yet")]
    assert "over several of the 18 hosts of one NVLink domain would bear" in idea
    (about,) = [r for r in reasons if "one NVLink domain (clique" in r]
    assert about.startswith("18 hosts from tray-1 to tray-18")


def test_what_was_measured_inside_a_domain_is_not_capped_by_the_nics(build):
    def speed(clique):
        one, other = trays(build, 2, clique=clique)
        point = LinkPoint(1 << 20, 8, 100, 6e11, 6e11, 6e11, 6e11)
        link = LinkMeasurement("tray-1", "tray-2", LinkKind.NIXL_VRAM, 0.0, points=(point,))
        fabric = Fabric.of(Topology((one, other), links=(link,)))
        return fabric.pair(Group(one, (0,)), Group(other, (0,))).bytes_s

    assert speed(CLIQUE) == 6e11
    assert speed(None) == 50e9


def test_kv_moves_no_faster_over_hosts_than_between_cards_beside_each_other(build):
    pcie, nvlink = (build.host(kind, 8, kind, link, nics=True) for kind, link in (("l40s", "PIX"), ("h100", "NV18")))  # fmt: skip
    fabric = Fabric()

    assert fabric.outside(Group(pcie, (0,))).bytes_s == 50e9
    assert fabric.reach(Group(pcie, (0,))).bytes_s == 16e9
    assert fabric.reach(Group(nvlink, (0,))).bytes_s == 50e9
    # A group that fills its host has no counterpart there.
    assert fabric.reach(Group(pcie, tuple(range(8)))).bytes_s == 400e9
