"""What every policy keeps to, and what each one is for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl import registry
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.choosing import Need
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placed, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.workers import Worker, WorkerTable

POLICIES = registry.names("dynctl.router.policies")
SETTINGS = Settings()


def info(name, role="aggregated", state=EngineState.READY, **facts):
    defaults = {"block_size_tokens": 16, "kv_capacity_tokens": 100_000, "max_num_seqs": 8}
    return EngineInfo(name, f"{name}.1", state, role, "d", "sim", "m", **(defaults | facts))


def worker(name, active=0, pending=0):
    made = Worker(info(name), SETTINGS)
    made.active_requests = active
    made.pending_prefill_tokens = pending
    return made


WORKERS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10_000)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", POLICIES)
@given(loads=WORKERS, seed=st.integers(0, 100), prompt=st.integers(1, 5000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_choice_is_a_candidate_changes_nothing_and_is_repeatable(name, loads, seed, prompt, data):
    policy = load_policy(name)
    workers = [worker(f"e{i}", *load) for i, load in enumerate(loads)]
    overlaps = [data.draw(st.integers(0, prompt)) for _ in workers]
    need = Need(prompt, 100, seed)
    before = [(w.active_requests, w.pending_prefill_tokens, w.active_tokens) for w in workers]

    first = policy.choose(need, workers, overlaps, random.Random(seed))
    second = policy.choose(need, workers, overlaps, random.Random(seed))

    assert first == second
    assert 0 <= first.position < len(workers)
    assert not first.terms or len(first.terms) == len(workers)
    assert before == [
        (w.active_requests, w.pending_prefill_tokens, w.active_tokens) for w in workers
    ]


@given(st.integers(0, 5000), st.integers(0, 50), st.integers(0, 20_000), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_kv_costs_grow_with_each_burden(overlap, active, pending, more):
    policy = load_policy("kv")
    need = Need(5000, 100, 0)

    def cost(overlap, active, pending):
        return sum(
            policy.choose(need, [worker("e", active, pending)], [overlap], random.Random(0)).terms[
                0
            ]
        )

    base = cost(overlap, active, pending)
    assert cost(max(overlap - more, 0), active, pending) >= base
    assert cost(overlap, active + more, pending) >= base
    assert cost(overlap, active, pending + more) >= base


def test_kv_prefers_the_cache_until_the_load_costs_more():
    policy = load_policy("kv")
    need = Need(2000, 100, 0)
    holder, idle = worker("holder"), worker("idle")
    assert policy.choose(need, [idle, holder], [0, 1900], random.Random(0)).position == 1

    holder.pending_prefill_tokens = 10_000
    assert policy.choose(need, [idle, holder], [0, 1900], random.Random(0)).position == 0


@pytest.mark.parametrize("name", ["kv", "least_loaded", "prefix", "random"])
def test_ties_are_broken_at_random_not_always_the_first(name):
    policy = load_policy(name)
    rng = random.Random(1)
    workers = [worker(f"e{i}") for i in range(4)]

    counts = [0] * 4
    for i in range(800):
        counts[policy.choose(Need(100, 10, i), workers, [0] * 4, rng).position] += 1

    assert min(counts) > 120


def test_round_robin_takes_turns():
    policy = load_policy("round_robin")
    workers = [worker(f"e{i}") for i in range(3)]

    chosen = [
        policy.choose(Need(1, 1, i), workers, [0] * 3, random.Random(0)).position for i in range(6)
    ]

    assert chosen == [0, 1, 2, 0, 1, 2]


def test_prefix_yields_when_the_holder_is_much_busier():
    policy = load_policy("prefix")
    workers = [worker("holder", 2), worker("other", 1)]
    assert policy.choose(Need(100, 1, 0), workers, [64, 0], random.Random(0)).position == 0

    workers[0].active_requests = 20
    assert policy.choose(Need(100, 1, 0), workers, [64, 0], random.Random(0)).position == 1


STATES = st.sampled_from(list(EngineState))
ROLES = st.sampled_from(["prefill", "decode", "aggregated"])
FLEETS = st.lists(
    st.tuples(ROLES, STATES, st.booleans(), st.integers(0, 8), st.booleans()),
    min_size=0,
    max_size=6,
)


@pytest.mark.parametrize("name", POLICIES)
@given(fleet=FLEETS, is_single=st.booleans(), seed=st.integers(0, 50))
@settings(max_examples=80, deadline=None)
def test_only_eligible_engines_are_booked_whatever_the_policy(name, fleet, is_single, seed):
    table, index = WorkerTable(SETTINGS), PrefixIndex()
    excluded = set()
    for i, (role, state, is_reachable, active, is_excluded) in enumerate(fleet):
        table.put(info(f"e{i}", role, state))
        made = table.get(f"e{i}")
        made.is_reachable = is_reachable
        made.active_requests = active
        index.begin(Source(made.id, made.incarnation))
        if is_excluded:
            excluded.add(made.key)
    placement = Placement(table, index, load_policy(name), SETTINGS, random.Random(seed))
    hashers = Hashers("s")
    reason = "" if is_single else "many_sequences"
    order = Order("r", Prompt.known(hashers, range(100)), None, 50, reason, frozenset(excluded))

    placed = placement.place(order, now_s=1.0)

    if not isinstance(placed, Placed):
        return
    for booking, roles in ((placed.main, {"decode", "aggregated"}), (placed.prefill, {"prefill"})):
        if booking is None:
            continue
        chosen = booking.worker
        assert chosen.info.role in roles
        assert chosen.info.state is EngineState.READY
        assert chosen.is_reachable
        assert chosen.key not in excluded
        assert chosen.active_requests <= chosen.slots
        booking.release()
    assert [w.active_requests for w in table.all()] == [active for _, _, _, active, _ in fleet]
    assert all(w.pending_prefill_tokens == 0 and w.active_tokens == 0 for w in table.all())


def test_one_long_request_counts_as_many_short_ones():
    table = WorkerTable(SETTINGS)
    for name in ("a", "b"):
        table.put(info(name))
    placement = Placement(table, PrefixIndex(), load_policy("kv"), SETTINGS, random.Random(0))
    hashers = Hashers("s")
    long = placement.place(Order("r", Prompt.known(hashers, range(60_000)), None, 1), 0.0)

    others = {
        placement.place(
            Order("r", Prompt.known(hashers, range(i, i + 200)), None, 1), 0.0
        ).main.worker.id
        for i in range(5)
    }

    assert others == {"a", "b"} - {long.main.worker.id}


def test_a_restarted_engine_holds_nothing_of_its_former_life():
    table, index = WorkerTable(SETTINGS), PrefixIndex()
    table.put(info("a"))
    index.begin(Source("a", "a.1"))
    index.store(Source("a", "a.1"), [1, 2, 3])
    booking = table.get("a").book(100, 100, 10)
    import dataclasses

    fresh = dataclasses.replace(info("a"), incarnation="a.2")

    assert table.put(fresh)
    index.drop("a")
    assert not index.store(Source("a", "a.1"), [4])
    assert index.match([1, 2, 3]) == {}
    assert table.get("a").active_requests == 0
    booking.release()
    assert table.get("a").active_requests == 0
