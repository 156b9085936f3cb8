"""What engines that come and go leave behind in what all of them know of each other: nothing."""

import math
from dataclasses import replace

import pytest

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.worker_table import WorkerTable

INFO = EngineInfo(*("e0", "e0.1", EngineState.READY, "aggregated", "d", "sim", "m"))
AGGREGATED = frozenset(("aggregated",))


def info(name, incarnation=1, **facts):
    return replace(INFO, id=name, incarnation=f"{name}.{incarnation}", **facts)


def joined(now_s=0.0):
    """A table of one engine that has served, and one that has just joined it."""
    table = WorkerTable(Settings())
    table.put(info("old"))
    table.view(AGGREGATED, None, now_s)
    table.get("old").book(64, 64, 1, now_s).release()
    table.put(info("new"))
    table.view(AGGREGATED, None, now_s)
    assert table.get("new").joined is not None
    assert table.may_limit(now_s)
    return table


@pytest.mark.parametrize("way", ["removed", "replaced", "unreachable", "draining", "unasked"])
def test_an_engine_that_leaves_while_it_starts_slowly_limits_nobody_for_longer(way):
    table = joined()
    if way == "removed":
        table.remove("new")
    elif way == "replaced":
        table.put(info("new", 2, state=EngineState.STARTING))
    else:
        # It may come back within its slow start, which then goes on.
        if way == "unreachable":
            table.set_reachable("new", is_reachable=False)
        elif way == "draining":
            table.put(info("new", state=EngineState.DRAINING))
        table.relax(29.0, PrefixIndex())
        assert table.may_limit(29.0)
        table.relax(30.0, PrefixIndex())
        assert table.get("new").joined is None
    assert not table.may_limit(30.0)


def test_an_engine_that_starts_anew_while_it_starts_slowly_begins_that_anew():
    table = joined()
    table.put(info("new", 2))
    table.view(AGGREGATED, None, 20.0)
    table.relax(30.0, PrefixIndex())
    assert table.may_limit(30.0)
    table.relax(50.0, PrefixIndex())
    assert not table.may_limit(50.0)


def test_what_is_small_is_so_by_the_engines_there_are():
    table = WorkerTable(Settings())
    facts = {"block_size_tokens": 16}
    table.put(info("large", kv_capacity_tokens=160_000, **facts))
    large_tokens = table.tally.small_tokens
    table.put(info("little", kv_capacity_tokens=1600, **facts))
    assert table.tally.small_tokens < large_tokens / 50
    table.remove("little")
    table.relax(0.0, PrefixIndex())
    assert table.tally.small_tokens == large_tokens
    table.remove("large")
    table.relax(0.0, PrefixIndex())
    assert table.tally.small_tokens == math.inf


def test_an_engine_that_goes_while_it_is_full_counts_until_its_last_request_has_ended():
    table = WorkerTable(Settings())
    table.put(info("e0", max_num_seqs=1))
    booking = table.get("e0").book(64, 64, 1)
    table.remove("e0")
    assert table.may_limit(0.0)
    booking.release()
    assert not table.may_limit(0.0)
