"""Every capture of `nvidia-smi topo -m` gives exactly its facts."""

from pathlib import Path

import pytest

from dynctl.discovery.probes.nvidia_smi_topo import parse_topo
from dynctl.planner.grouping import Near, group_score, nearest, nvlink_islands, tp_groups

CASES = sorted(
    p.name for p in (Path(__file__).parent / "cases" / "nvidia_smi_topo").iterdir() if p.is_dir()
)


def links_expected(text, count):
    if isinstance(text, list):
        return [row.split() for row in text]
    label = text.removeprefix("all ") if text.startswith("all ") else None
    return [["X" if a == b else label for b in range(count)] for a in range(count)]


@pytest.fixture(params=CASES)
def sample(request, case):
    text, expected = case("nvidia_smi_topo", request.param)
    return parse_topo(text.decode()), expected


def nearest_names(facts):
    return [frozenset(facts.nic_names[k] for k in nearest(row)) for row in facts.nic_links]


def test_every_pair_has_its_link(sample):
    facts, expected = sample

    assert len(facts.gpu_indexes) == expected["gpu_count"]
    assert [list(row) for row in facts.links] == links_expected(
        expected["pair_links"], expected["gpu_count"]
    )


def test_islands_are_found(sample):
    facts, expected = sample

    assert [list(island) for island in nvlink_islands(facts.links)] == expected["nvlink_islands"]


def test_nics_and_nearest_ones_are_named(sample):
    facts, expected = sample
    names = expected.get("nics") or []

    assert list(facts.nic_names) == (list(names.values()) if isinstance(names, dict) else names)
    for i, near in enumerate(nearest_names(facts)):
        if "nic_nearest" in expected:
            assert near == set(expected["nic_nearest"][f"GPU{i}"]["nics"])


@pytest.mark.parametrize("key", ["numa_node", "cpu_affinity", "gpu_numa_id"])
def test_affinities_stand_in_their_columns(sample, key):
    facts, expected = sample
    found = {
        "numa_node": facts.numa_affinity,
        "cpu_affinity": facts.cpu_affinity,
        "gpu_numa_id": facts.gpu_numa_id,
    }[key]

    for i, value in enumerate(found):
        if key in expected:
            assert str(None if value == "" else value) == str(expected[key][f"GPU{i}"])


@pytest.mark.parametrize("size", [2, 4])
def test_groups_are_the_best_ones_up_to_ties(sample, size):
    facts, expected = sample
    numa = tuple(a or c for a, c in zip(facts.numa_affinity, facts.cpu_affinity, strict=True))
    near = Near(numa, tuple(nearest_names(facts)) if facts.nic_names else ())

    found = tp_groups(facts.links, near, size)

    wanted = expected[f"tp{size}"] or []
    assert len(found) == len(wanted)
    assert total(facts.links, near, found) == total(facts.links, near, wanted)
    if f"tp{size}_equally_good_groupings" not in expected:
        assert [list(group) for group in found] == wanted


def total(links, near, groups):
    scores = [group_score(links, near, group)[:4] for group in groups]
    return tuple(map(sum, zip(*scores, strict=True))) if scores else ()
