"""What every policy keeps to, and what each one is for."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl import registry
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.choosing import Load, Need
from dynctl.router.config import Settings
from dynctl.router.decisions import Decision
from dynctl.router.desk import load_policy
from dynctl.router.fallback import RoutingBreaker
from dynctl.router.forks import Forks
from dynctl.router.placement import Order, Placed, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.rates import OutputLengths
from dynctl.router.worker_table import WorkerTable

POLICIES = registry.names("dynctl.router.policies")
SETTINGS = Settings()


def info(name, role="aggregated", state=EngineState.READY, **facts):
    defaults = {"block_size_tokens": 16, "kv_capacity_tokens": 100_000, "max_num_seqs": 8}
    return EngineInfo(name, f"{name}.1", state, role, "d", "sim", "m", **(defaults | facts))


def load(name, active=0, pending=0, recent=1.0, tokens=0):
    """An engine that prefills 10,000 tokens a second."""
    return Load(
        engine=name,
        prefill_ms_per_token=0.1,
        prefill_base_ms=5.0,
        free_at_s=pending * 1e-4,
        decode_ms_per_token=0.1 * active,
        recent=recent,
        room_tokens=70_000.0 - tokens,
        capacity_tokens=100_000,
        active_requests=active,
        pending_prefill_tokens=pending,
        uncached_ms_per_token=0.1,
    )


LOADS = st.lists(
    st.builds(
        load, st.just("e"), st.integers(0, 20), st.integers(0, 10_000), st.floats(0.0, 100.0)
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", POLICIES)
@given(
    loads=LOADS,
    ordinal=st.integers(0, 100),
    draw=st.floats(0, 0.999999),
    prompt=st.integers(1, 5000),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_choice_is_a_candidate_and_repeatable(name, loads, ordinal, draw, prompt, data):
    policy = load_policy(name)
    overlaps = [data.draw(st.integers(0, prompt - 1)) for _ in loads]
    need = Need(prompt, 100, ordinal)

    first = policy.choose(need, loads, overlaps, draw)

    assert first == policy.choose(need, loads, overlaps, draw)
    assert 0 <= first < len(loads)
    terms = policy.terms(need, loads, overlaps)
    assert [len(term) for term in terms] == [len(policy.term_names)] * len(loads)


def cost(prompt=5000, overlap=0, other=None, **facts):
    """What the kv policy counts against an engine beside an idle one."""
    loads = [load("e", **facts), other or load("idle")]
    return sum(load_policy("kv").terms(Need(prompt, 100, 0), loads, [overlap, 0])[0])


@given(
    st.integers(0, 4999),
    st.integers(0, 50),
    st.integers(0, 20_000),
    st.floats(0, 50),
    st.integers(1, 400),
)
@settings(max_examples=100, deadline=None)
def test_kv_costs_grow_with_each_burden(overlap, active, pending, recent, more):
    facts = {"active": active, "pending": pending, "recent": recent}
    base = cost(overlap=overlap, **facts)
    assert cost(overlap=max(overlap - more, 0), **facts) >= base
    assert cost(overlap=overlap, **facts | {"active": active + more}) >= base
    assert cost(overlap=overlap, **facts | {"pending": pending + more}) >= base
    assert cost(overlap=overlap, **facts | {"recent": recent + more}) >= base


@given(loads=LOADS, prompt=st.integers(1, 200_000), data=st.data())
@settings(max_examples=100, deadline=None)
def test_kv_chooses_the_lowest_sum_of_the_terms_it_shows(loads, prompt, data):
    policy = load_policy("kv")
    overlaps = [data.draw(st.integers(0, prompt - 1)) for _ in loads]
    need = Need(prompt, 100, 0, near_ms=0.0, near_ratio=0.0)

    position = policy.choose(need, loads, overlaps, 0.5)

    sums = [sum(term) for term in policy.terms(need, loads, overlaps)]
    assert sums[position] <= min(sums) * (1 + 1e-9)


@given(loads=LOADS, prompt=st.integers(1, 20_000), draw=st.floats(0, 0.999999), data=st.data())
@settings(max_examples=300, deadline=None)
def test_kv_finds_a_sure_engine_only_where_a_look_at_all_finds_the_same(loads, prompt, draw, data):
    loads = [
        one._replace(
            prefill_ms_per_token=(rate := data.draw(st.floats(0.001, 1.0))),
            uncached_ms_per_token=rate * data.draw(st.floats(1.0, 1.5)),
            prefill_base_ms=data.draw(st.floats(0.0, 50.0)),
        )
        for one in loads
    ]
    overlaps = [data.draw(st.sampled_from((0, prompt // 2, prompt - 1))) for _ in loads]
    bounds = {
        "least_prefill_ms": min(one.prefill_base_ms for one in loads),
        "least_ms_per_token": min(one.prefill_ms_per_token for one in loads),
    }
    need = Need(prompt, 100, 0, popularity=data.draw(st.sampled_from((0.0, 0.7, math.inf))))

    sure = load_policy("kv").choose(need._replace(**bounds), loads, overlaps, draw)

    # With no bounds known nothing is ever sure.
    assert sure == load_policy("kv").choose(need, loads, overlaps, draw)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5000), st.floats(0.1, 5000.0)), max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_no_engine_prefills_cheaper_than_the_bounds_say(steps):
    table = WorkerTable(SETTINGS)
    for i in range(3):
        table.put(info(f"e{i}"))
    for number, (which, tokens, ms) in enumerate(steps):
        if which == 3:
            table.put(info("e0", max_num_seqs=number + 1))
            table.relax(100.0 * number, PrefixIndex())
        else:
            table.get(f"e{which}").prefill_took(tokens, ms)
        for worker in table.all():
            load = worker.load()
            assert load.prefill_base_ms >= table.tally.least_prefill_ms
            assert load.prefill_ms_per_token >= table.tally.least_ms_per_token


def test_kv_spreads_a_hot_prefix_before_a_rare_one():
    holder, idle = load("holder", recent=12.0), load("idle", recent=5.0)
    policy, need = load_policy("kv"), Need(1200, 20, 0)

    def choice(popularity):
        return policy.choose(need._replace(popularity=popularity), [holder, idle], [1000, 0], 0.5)

    assert choice(popularity=0.0) == 0, "a conversation stays"
    assert choice(popularity=0.2) == 0, "a copy of a rare prefix would take little load off"
    assert choice(popularity=2.0) == 1


def test_kv_takes_the_one_that_had_less_of_two_drawn_among_equals():
    policy, need = load_policy("kv"), Need(1200, 20, 0)
    loads = [load("more", recent=2.0), load("less", recent=1.0), load("most", recent=3.0)]
    loads.append(load("busy", recent=30.0))
    chosen = [policy.choose(need, loads, [0] * 4, draw / 60) for draw in range(60)]
    assert [chosen.count(position) for position in range(4)] == [20, 40, 0, 0]


def test_in_full_caches_a_copy_of_a_prefix_costs_the_room_too():
    table, index, placement = fleet_of(2)
    rng, shared = random.Random(1), list(range(800))
    for name in ("e0", "e1"):
        source = Source(name, f"{name}.1")
        blocks = [rng.getrandbits(64) for _ in range(4000)]
        index.store(source, blocks[:2000])
        assert index.turnover(name) == 0.0
        for at in range(2000, 4000, 100):
            index.store(source, blocks[at : at + 100])
            index.remove(source, blocks[at - 2000 : at - 1900])
        assert index.turnover(name) > 0.6
    placement.place(order([*shared, 1]), 0.0).main.release()
    before = placement.place(order([*shared, 2]), 0.0).decisions[0]

    table.relax(0.0, index)
    after = placement.place(order([*shared, 3]), 0.0).decisions[0]

    named = [
        dict(
            zip(
                d.asked.term_names,
                d.asked.terms(d.need, d.loads, d.overlaps_tokens)[0],
                strict=True,
            )
        )
        for d in (before, after)
    ]
    assert named[0]["room_ms"] == 0.0
    assert named[1]["room_ms"] > 0.0
    assert after.recompute() == after.position


def test_how_popular_a_prefix_is_is_counted_in_fair_shares_of_an_engine():
    forks = Forks()
    assert forks.popularity(1, 4, 1e6) == 0.0, "nobody has ended there before: a next turn"
    for _ in range(60):
        hot = forks.popularity(1, 4, 1e6)
    for block in range(2, 22):
        forks.popularity(block, 4, 1e6)
        rare = forks.popularity(block, 4, 1e6)
    assert hot > 3.0
    assert rare < 0.3


def test_what_was_popular_before_says_nothing_of_what_is_now():
    forks = Forks()
    for _ in range(200):
        forks.popularity(1, 4, 1e6)
    later_s = 1e6 + 60.0
    forks.popularity(2, 4, later_s)
    found = [forks.popularity(2, 4, later_s + i) for i in range(8)]
    assert found[-1] > 2.0
    assert forks.popularity(1, 4, later_s + 8) < 0.7


def test_kv_prefers_the_cache_until_the_load_costs_more():
    policy = load_policy("kv")
    need = Need(2000, 100, 0)
    assert policy.choose(need, [load("idle"), load("holder")], [0, 1900], 0.5) == 1
    busy = load("holder", pending=10_000)
    assert policy.choose(need, [load("idle"), busy], [0, 1900], 0.5) == 0


def test_kv_lets_a_cached_prefix_yield_to_an_unfair_share():
    policy = load_policy("kv")
    need = Need(2000, 100, 0)
    others = [load(f"e{i}", recent=10.0) for i in range(3)]

    shares = [
        policy.choose(need, [load("holder", recent=float(n)), *others], [1000, 0, 0, 0], 0.5) == 0
        for n in range(0, 60, 5)
    ]

    assert shares[0]
    assert not shares[-1]
    assert shares == sorted(shares, reverse=True)


def test_kv_memory_pressure_rises_smoothly_from_the_watermark():
    def memory(tokens):
        loads = [load("e", tokens=tokens)]
        policy = load_policy("kv")
        return policy.terms(Need(1000, 1, 0), loads, [0])[0][policy.term_names.index("memory_ms")]

    costs = [memory(tokens) for tokens in range(0, 110_000, 5000)]
    assert costs == sorted(costs)
    assert memory(69_000) == 0.0
    assert 0.0 < memory(71_000) < 10.0
    assert memory(99_000) == pytest.approx(0.2 * 1001 * 0.1)


def kept_up_to(stickiness):
    """Requests the holder of most of a prompt may have had lately, beside 10 of each other engine, before it loses it."""
    policy = load_policy("kv")
    for recent in range(10, 400):
        loads = [
            load("holder", recent=float(recent)),
            *(load(f"e{i}", recent=10.0) for i in range(3)),
        ]
        need = Need(1000, 10, 0, stickiness=stickiness)
        if policy.choose(need, loads, [900, 0, 0, 0], 0.5) != 0:
            return recent
    return 400


def test_excess_load_ends_sticking_to_a_cache_and_the_sooner_the_less_sticky():
    limits = [kept_up_to(stickiness) for stickiness in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)]

    assert limits == sorted(set(limits)), "each holds on longer than the one before"
    assert limits[0] <= 11, "caches ignored: any excess moves it"
    assert limits[-1] < 400, "none holds on for ever"


@given(loads=LOADS, draw=st.floats(0, 0.999999), data=st.data())
@settings(max_examples=60, deadline=None)
def test_without_stickiness_caches_make_no_difference(loads, draw, data):
    policy = load_policy("kv")
    overlaps = [data.draw(st.integers(0, 999)) for _ in loads]
    need = Need(1000, 100, 0, stickiness=0.0)

    assert policy.choose(need, loads, overlaps, draw) == policy.choose(
        need, loads, [0] * len(loads), draw
    )


@pytest.mark.parametrize("name", ["kv", "least_loaded", "prefix", "random"])
def test_o9_ties_are_broken_at_random_not_always_the_first(name):
    policy = load_policy(name)
    rng = random.Random(1)
    loads = [load(f"e{i}") for i in range(4)]

    counts = [0] * 4
    for i in range(800):
        counts[policy.choose(Need(100, 10, i), loads, [0] * 4, rng.random())] += 1

    assert min(counts) > 120


def test_round_robin_takes_turns():
    policy = load_policy("round_robin")
    loads = [load(f"e{i}") for i in range(3)]

    assert [policy.choose(Need(1, 1, i), loads, [0] * 3, 0.5) for i in range(6)] == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]


def test_prefix_yields_when_the_holder_is_much_busier():
    policy = load_policy("prefix")
    need = Need(100, 1, 0)
    assert policy.choose(need, [load("holder", 2), load("other", 1)], [64, 0], 0.5) == 0
    assert policy.choose(need, [load("holder", 20), load("other", 1)], [64, 0], 0.5) == 1


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
        for _ in range(active):
            made.book(0, 0, 0)
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
    prompt = Hashers("s").of(2).prompt([1, 2, 3, 4, 5, 6])
    index.store(Source("a", "a.1"), prompt.hashes())
    booking = table.get("a").book(100, 100, 10)

    assert table.put(dataclasses.replace(info("a"), incarnation="a.2"))
    index.drop("a")
    assert not index.store(Source("a", "a.1"), [4])
    assert index.match(prompt) == {}
    assert table.get("a").active_requests == 0
    booking.release()
    assert table.get("a").active_requests == 0


def fleet_of(num, name="kv", seed=0):
    table, index = WorkerTable(SETTINGS), PrefixIndex()
    for i in range(num):
        table.put(info(f"e{i}", max_num_seqs=1000))
        index.begin(Source(f"e{i}", f"e{i}.1"))
    return table, index, Placement(table, index, load_policy(name), SETTINGS, random.Random(seed))


def order(tokens, request_id="r"):
    return Order(request_id, Prompt.known(Hashers("s"), tokens), None, 16)


def test_an_engine_beside_one_that_only_answered_the_router_itself_does_not_join_slowly():
    table, index, placement = fleet_of(1)
    for _ in range(4):
        table.get("e0").book(64, 64, 1, 0.0, unit=0.0).release()
    table.put(info("new"))
    index.begin(Source("new", "new.1"))
    placement.place(order(list(range(200))), 1.0)
    assert table.get("new").joined is None


def test_of_two_full_caches_room_is_dearer_where_more_is_stored():
    table, index, _ = fleet_of(2)
    rng = random.Random(1)
    for name, number in (("e0", 6000), ("e1", 2000)):
        blocks = [rng.getrandbits(64) for _ in range(number)]
        for at in range(0, number, 100):
            index.store(Source(name, f"{name}.1"), blocks[at : at + 100])
            index.remove(Source(name, f"{name}.1"), blocks[at : at + 100])
    table.relax(0.0, index)
    dear, cheap = (table.get(name).load() for name in ("e0", "e1"))
    assert dear.prefill_ms_per_token == cheap.prefill_ms_per_token
    assert dear.uncached_ms_per_token > 1.5 * cheap.uncached_ms_per_token > 0
    for second in range(60):  # nothing more is stored: soon they are alike
        table.relax(1.0 + second, index)
    dear, cheap = (table.get(name).load() for name in ("e0", "e1"))
    assert dear.uncached_ms_per_token == pytest.approx(cheap.uncached_ms_per_token, rel=0.02)


def test_a_conversation_stays_with_an_engine_whose_memory_is_nearly_full_but_a_start_does_not_go_there():
    policy, need = load_policy("kv"), Need(12_000, 100, 0, popularity=0.0)
    loads = [load("nearly full", tokens=83_000), load("empty")]
    assert policy.choose(need, loads, [11_000, 0], 0.5) == 0
    assert policy.choose(need._replace(popularity=math.inf), loads, [0, 0], 0.5) == 1


@pytest.mark.parametrize("slower", ["e0", "e1"])
def test_long_prompts_nobody_has_cached_fill_caches_alike_though_prefills_look_unlike(slower):
    """Five of the eight would not fit one cache once they have grown, and what is pushed out then is wanted again."""
    table, index, placement = fleet_of(2)
    rng = random.Random(1)
    placed = []
    for i in range(8):
        prompt = order([rng.randrange(1000) for _ in range(19_200)])
        chosen = placement.place(prompt, 20.0 * i).main
        placed.append(chosen.worker.id)
        chosen.prefill_ended(20.0 * i + 2.0)
        chosen.worker.prefill_took(19_200, 2200.0 if chosen.worker.id == slower else 2000.0)
        chosen.release()
        index.store(Source(placed[-1], f"{placed[-1]}.1"), prompt.prompt.blocks(16).hashes())
        for second in range(3, 20):
            table.relax(20.0 * i + second, index)
    assert placed.count("e0") == 4


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_that_joins_gets_at_most_two_fair_shares_at_first(name):
    table, index, placement = fleet_of(4, name)
    rng, up_s = random.Random(3), 1e6  # clocks count from a host's start
    for i in range(200):
        placement.place(order([rng.randrange(1000) for _ in range(200)]), up_s + i * 0.05)
    table.put(info("new", max_num_seqs=1000))
    index.begin(Source("new", "new.1"))

    taken = 0
    for i in range(500):
        now_s = up_s + 10.0 + i * 0.05
        assert not i or table.get("new").joined is not None
        placed = placement.place(order([rng.randrange(1000) for _ in range(200)]), now_s)
        taken += placed.main.worker.id == "new"
        if not i:  # it is not taken for one that had less than its share
            others = [table.get(f"e{n}").recent for n in range(4)]
            assert table.get("new").recent >= 0.9 * sum(others) / 4
        assert taken <= 2 + 2 * i / 5

    assert taken > 0


def test_a_burst_with_one_prefix_spreads_only_as_load_asks():
    _, _, placement = fleet_of(4)
    shared = list(range(2000))

    first = placement.place(order([*shared, 1]), 0.0)
    second = placement.place(order([*shared, 2]), 0.5)

    assert second.overlap_tokens >= 1700
    assert second.main.worker is first.main.worker
    counts = dict.fromkeys(("e0", "e1", "e2", "e3"), 0)
    for i in range(200):
        placed = placement.place(order([*shared, 3 + i]), 0.5 + i * 0.005)
        counts[placed.main.worker.id] += 1
    assert max(counts.values()) <= 1.5 * 200 / 4


def test_a_policy_that_fails_never_fails_a_request_and_is_tried_again(caplog):
    _, _, placement = fleet_of(3)
    broken = placement.policy

    class Breaks:
        uses_index, term_names, is_well = True, (), False
        num_asked = 0

        def choose(self, *args):
            self.num_asked += 1
            if not self.is_well:
                raise ValueError("a fault of ours")
            return broken.choose(*args)

    placement.policy = policy = Breaks()
    placed = [placement.place(order(range(i, 100 + i)), i * 0.1) for i in range(50)]
    assert {one.main.worker.id for one in placed} == {"e0", "e1", "e2"}
    assert all(decision.is_fallback for one in placed for decision in one.decisions)
    asked = policy.num_asked
    assert asked < 50, "the breaker opened"
    assert caplog.text.count("routing failed in 20 of the last 20 choices") == 1

    policy.is_well = True
    (decision,) = placement.place(order(range(100)), 100.0).decisions
    assert policy.num_asked == asked + 1
    assert not decision.is_fallback


def test_the_plain_rule_takes_over_beyond_five_in_a_hundred_for_ten_seconds():
    def failing(every, number):
        breaker = RoutingBreaker()
        opened = [
            at
            for at in range(number)
            if not breaker.is_open(0.0)
            and not breaker.record(0.0, is_failure=at % every == every - 1)
            and breaker.is_open(0.0)
        ]
        return breaker, opened

    assert failing(20, 1000)[1] == [], "5 %"
    assert failing(1, 1000)[1] == [19], "too few say nothing"
    breaker, opened = failing(15, 1000)
    assert len(opened) == 1
    assert breaker.is_open(9.9)
    assert not breaker.is_open(10.0)
    for _ in range(19):
        breaker.record(10.0, is_failure=True)
    assert not breaker.is_open(10.0), "what was before is forgotten"


@pytest.mark.source
@pytest.mark.parametrize(("every", "is_opened"), [(25, False), (10, True)])
def test_an_index_that_fails_costs_those_requests_their_prefix_and_too_often_all_for_a_while(
    every, is_opened
):
    _, _, placement = fleet_of(3)
    look, asked = placement.overlaps.of, []

    def fails(*args, **options):
        asked.append(args)
        if len(asked) % every == 0:
            raise ValueError("a fault of ours")
        return look(*args, **options)

    placement.overlaps.of = fails
    placed = [placement.place(order(range(i, 100 + i)), 1.0) for i in range(100)]
    fallbacks = sum(one.decisions[0].is_fallback for one in placed)
    assert fallbacks == 100 - len(asked) + len(asked) // every
    assert (len(asked) < 100) == is_opened
    (decision,) = placement.place(order(range(100)), 20.0).decisions
    assert not decision.is_fallback, "it is asked again"


def test_the_same_choice_is_computed_again_from_what_was_recorded():
    _, _, placement = fleet_of(5)
    rng = random.Random(4)
    for i in range(60):
        placed = placement.place(order([rng.randrange(3) for _ in range(300)]), i * 0.01)
        (decision,) = placed.decisions
        assert decision.recompute() == decision.position
        shown = decision.to_json()
        assert shown["is_reproduced"]
        assert len(shown["candidates"]) == 5
        assert shown["counterfactual"]["engine"] != shown["engine"]
        if i % 3 == 0:
            placed.main.release()


def test_a_choice_that_its_inputs_do_not_give_is_told_as_that():
    loads = [load("idle"), load("busy", pending=10_000)]
    need, policy = Need(2000, 100, 0), load_policy("kv")
    told = [
        Decision("r", "whole", True, need, loads, [0, 0], 0.5, at, policy).to_json()
        for at in range(2)
    ]
    assert [one["is_reproduced"] for one in told] == [True, False]


def test_expected_output_is_learned_per_route_key():
    lengths = OutputLengths()
    rng = random.Random(1)
    for _ in range(300):
        lengths.learn("short", rng.randrange(8, 13))
        lengths.learn("long", rng.randrange(900, 1101))

    assert 9 <= lengths.expected("short", None) <= 11
    assert 950 <= lengths.expected("long", None) <= 1050
    assert lengths.expected("long", 64) == 64
    assert 300 <= lengths.expected("unknown", None) <= 700


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.6, 0.99])
def test_a_prompt_nobody_has_goes_where_nobody_waits_for_it(draw):
    policy = load_policy("kv")
    busy, idle = (
        load(name, active)._replace(decode_ms_per_token=0.0)
        for name, active in (("b", 2), ("i", 0))
    )
    need = Need(2000, 100, 0, near_ms=0.0, near_ratio=0.0)

    assert policy.choose(need, [busy, idle, busy], [0, 0, 0], draw) == 1
    one, other = map(sum, policy.terms(need, [busy, idle], [0, 0]))
    assert one - other == pytest.approx(0.3 * 2 * 205.0)
    # Somebody has it: where it is less work is what counts.
    one, other = map(sum, policy.terms(need, [busy, idle], [16, 0]))
    assert one - other == pytest.approx(-1.6)
    # Where there is only prefill, nobody is answered.
    one, other = map(sum, policy.terms(need._replace(output_tokens=1), [busy, idle], [0, 0]))
    assert one == other


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.6, 0.99])
def test_of_near_equals_the_one_with_fewer_requests_under_way_is_taken(draw):
    busy = load("b", 2, recent=0.9)._replace(decode_ms_per_token=0.0)
    need = Need(64, 100, 0, near_ms=1.0)
    assert load_policy("kv").choose(need, [busy, load("i")], [16, 16], draw) == 1
