"""What joins two engines, by where they stand."""

import pytest

from dynctl.core.kv_links import EnginePlace, LinkClasses

PLACES = (
    EnginePlace("a0", "a", "a 0", has_rdma=True),
    EnginePlace("a1", "a", "a 0", has_rdma=True),
    EnginePlace("a2", "a", "", has_rdma=True),
    EnginePlace("b0", "b", "b 0", has_rdma=True),
    EnginePlace("c0", "c"),
    EnginePlace("c1", "c"),
    EnginePlace("r0", "rack-1", "domain 7"),
    EnginePlace("r1", "rack-2", "domain 7"),
)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("a0", "a1", "nvlink"),
        ("a0", "a2", "host"),
        ("c0", "c1", "host"),
        ("a0", "b0", "rdma"),
        ("a0", "c0", "tcp"),
        ("r0", "r1", "nvlink"),
        ("a0", "somebody", "unknown"),
    ],
)
def test_the_best_way_both_ends_have_is_named_in_both_directions(source, target, expected):
    classes = LinkClasses(PLACES)
    assert classes.of(source, target) == classes.of(target, source) == expected


def test_nothing_is_known_without_places():
    assert LinkClasses().of("a0", "a0") == "unknown"
