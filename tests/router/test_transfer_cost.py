"""Copy or recompute: what forbids a transfer, what it is expected to cost, and that costs decide."""

import math
import random
from collections import Counter

import pytest

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv_links import EnginePlace, LinkClasses, LinkRate
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.transfer_cost import Links, TransferFacts, can_transfer
from dynctl.router.worker_table import WorkerTable

CASES = [
    (TransferFacts(100, None), ""),
    (TransferFacts(100, 100), ""),
    (TransferFacts(100, 99), "no_memory"),
    (TransferFacts(100, 0, is_pair_usable=False), "no_memory"),
    (TransferFacts(100, 1000, is_pair_usable=False), "link_down"),
    (TransferFacts(100, 1000, bytes_per_token=10, max_bytes=999), "too_large"),
    (TransferFacts(100, 1000, bytes_per_token=10, max_bytes=1000), ""),
    (TransferFacts(100, 1000, bytes_per_token=0, max_bytes=1), ""),
]


@pytest.mark.parametrize(("facts", "reason"), CASES)
def test_the_first_reason_against_a_transfer_is_named(facts, reason):
    assert can_transfer(facts) == reason


def transfer(links, tokens, took_s, now_s, pair=("p", "d")):
    move = links.book(*pair, tokens, now_s, now_s)
    move.took(now_s, now_s + took_s)


def test_set_up_and_bandwidth_are_learned_per_pair():
    links = Links(2.0, 0.005)
    rng = random.Random(1)
    now_s = 0.0
    for _ in range(250):
        tokens = rng.randrange(100, 8000)
        transfer(links, tokens, 0.010 + tokens * 0.5e-3, now_s)
        transfer(links, tokens, 0.001 + tokens * 0.01e-3, now_s + 6.0, ("p", "near"))
        now_s += 10.0

    assert links.cost("p", "d", 1000, now_s, now_s).move_ms == pytest.approx(510, rel=0.1)
    assert links.cost("p", "near", 1000, now_s, now_s).move_ms == pytest.approx(11, rel=0.2)


@pytest.mark.parametrize("tokens", [9, 15, 16])
def test_less_than_a_block_tells_nothing_of_a_link(tokens):
    """A decode engine's first step takes as long, whatever was moved."""
    links = Links(2.0, 0.005)
    for i in range(5):
        transfer(links, tokens, 0.015, float(i))
    move_ms = links.cost("p", "d", 1000, 5.0, 5.0).move_ms
    assert (move_ms == pytest.approx(7.0)) == (tokens < 16)
    assert links.moved_tokens["unknown"] == 5 * tokens


def test_a_link_slower_than_declared_by_any_factor_takes_no_longer_to_set_up():
    links = Links(3.0, 0.005)
    for i in range(20):
        tokens = 400 * (i % 5 + 1)
        transfer(links, tokens, 0.003 + tokens * 1.3e-3, 10.0 * i)
        now_s = 10.0 * i + 5.0
        short = links.cost("p", "d", 1, now_s, now_s).move_ms
        assert short == pytest.approx(4.3, rel=0.3), i


def test_a_transfer_waits_for_those_at_either_end():
    links = Links(0.0, 1.0)
    links.book("p1", "d1", 1000, 0.0, 0.0)

    assert links.cost("p1", "d2", 10, 0.0, 0.0).wait_ms == pytest.approx(1000, rel=0.01)
    assert links.cost("p2", "d1", 10, 0.5, 0.0).wait_ms == pytest.approx(500, rel=0.01)
    assert links.cost("p2", "d2", 10, 0.0, 0.0).wait_ms == 0.0


def test_a_late_transfer_makes_others_dearer_before_it_ends():
    links = Links(0.0, 0.001)
    links.book("p", "d", 1000, 0.0, 0.0)
    early = links.cost("p", "d", 1000, 0.0005, 0.0005)
    late = links.cost("p", "d", 1000, 3.0, 3.0)

    assert early.wait_ms + early.move_ms < 3.0
    assert late.move_ms > 2000.0


def known_links():
    links = Links(0.0, 0.001)
    for i in range(20):
        transfer(links, 8000, 0.005, float(i))
    return links


def test_a_late_transfer_over_a_known_link_is_its_own_trouble():
    links = known_links()
    links.book("p", "d", 8000, 100.0, 100.0)
    late = links.cost("p", "d", 8000, 101.0, 101.0)

    assert 900 < late.wait_ms < 1500
    assert late.move_ms < 100


def test_no_link_is_blamed_for_a_decode_engine_that_computes():
    links = known_links()
    before = links.cost("p", "d", 8000, 99.0, 99.0)
    move = links.book("p", "d", 8000, 100.0, 100.0)
    links.hold("d", 101.0, 100.0)
    assert links.cost("p", "d", 8000, 101.0, 100.9) == pytest.approx((0.0, before.move_ms), abs=0.1)
    move.took(100.0, 101.003)

    assert links.cost("p", "d", 8000, 102.0, 102.0) == pytest.approx(before, rel=0.02)


def test_a_slow_link_is_learned_beside_a_decode_engine_that_computes():
    links = Links(0.0, 0.001)
    now_s = 0.0
    for _ in range(30):
        move = links.book("p", "d", 8000, now_s, now_s)
        links.hold("d", now_s + 0.1, now_s)
        move.took(now_s, now_s + 4.0)
        now_s += 10.0

    assert links.cost("p", "d", 8000, now_s, now_s).move_ms == pytest.approx(3900, rel=0.05)


def test_a_dropped_transfer_leaves_no_trace_in_the_queue():
    links = Links(0.0, 1.0)
    links.book("p", "d", 1000, 0.0, 0.0).dropped()

    assert links.cost("p", "d", 10, 0.0, 0.0).wait_ms == pytest.approx(0.0, abs=1e-6)


def test_a_pair_that_fails_three_times_rests_and_others_do_not():
    links = Links(2.0, 0.005)
    for i in range(3):
        assert links.is_usable("p", "d", 1.0)
        links.book("p", "d", 10, 0.0, float(i)).failed(1.0)

    assert not links.is_usable("p", "d", 2.0)
    assert links.is_usable("p", "other", 2.0)
    assert links.is_usable("p", "d", 40.0), "one attempt tells"
    links.book("p", "d", 10, 40.0, 40.0).failed(40.0)
    assert not links.is_usable("p", "d", 41.0)
    transfer(links, 10, 0.01, 80.0)
    assert links.is_usable("p", "d", 81.0)


def pools(engines=(("p", "prefill"), ("d", "decode")), **settings):
    made = Settings(**settings)
    table, index = WorkerTable(made), PrefixIndex()
    for name, role in engines:
        table.put(
            EngineInfo(
                *(name, f"{name}.1", EngineState.READY, role, "d", "sim", "m"),
                block_size_tokens=16,
                kv_capacity_tokens=100_000,
            )
        )
        index.begin(Source(name, f"{name}.1"))
    return index, Placement(table, index, load_policy("kv"), made, random.Random(0))


def place(placement, tokens, now_s=0.0):
    placed = placement.place(Order("r", Prompt.known(Hashers("s"), tokens), None, 50), now_s)
    for booking in (placed.main, placed.prefill):
        if booking is not None:
            booking.release()
    return placed


def test_a_cold_prompt_is_copied_and_a_cached_one_is_not():
    index, placement = pools()
    long = list(range(8000))
    placed = place(placement, long)
    assert placed.prefill is not None
    assert {d.leg for d in placed.decisions} == {"decode", "prefill"}
    assert placed.decisions[0].costs.copy_ms < placed.decisions[0].costs.recompute_ms
    placed.move.dropped()
    assert placement.links.num_booked == 0

    index.store(Source("d", "d.1"), Hashers("s").of(16).prompt(long).hashes())
    assert place(placement, long).local_reason == "cheaper"


def test_a_prompt_computed_where_it_is_generated_is_told_of_as_that():
    _, placement = pools(transfer_ms_per_token=10.0)
    placed = place(placement, list(range(1000)))

    (decision,) = placed.decisions
    assert (decision.leg, decision.path_reason) == ("whole", "cheaper")
    shown = decision.to_json()
    assert shown["is_reproduced"]
    assert shown["predicted"].keys() == {"queue_ms", "prefill_ms"}
    # The transfer would have taken ten seconds. What the prefill holds up there is not this request's own wait.
    assert shown["predicted"]["prefill_ms"] == pytest.approx(decision.costs.recompute_ms / 2, 0.01)


def test_the_crossover_moves_with_bandwidth():
    def copies(ms_per_token):
        _, placement = pools(transfer_ms_per_token=ms_per_token)
        return [
            n for n in (64, 256, 1024, 4096) if place(placement, list(range(n))).prefill is not None
        ]

    fast, slow = copies(0.001), copies(0.5)
    assert slow == []
    assert len(fast) >= 3


def test_turns_come_round_on_both_sides_of_a_hand_over():
    names = [(f"{role[0]}{i}", role) for i in "12" for role in ("prefill", "decode")]
    _, placement = pools(names)
    placement.policy = load_policy("round_robin")
    found = [place(placement, [i] * 1000) for i in range(8)]

    assert [placed.prefill.worker.id for placed in found] == ["p1", "p2"] * 4
    assert [placed.main.worker.id for placed in found] == ["d1", "d2"] * 4


def weighed(busy, prompt_tokens=4000):
    """Which way a prompt goes when something is busy for ten seconds, and what both ways were said to cost."""
    _, placement = pools(transfer_ms_per_token=0.05)
    if busy in ("p", "d"):
        placement.workers.get(busy).book(0, 100_000, 1, 0.0)
    elif busy == "link":
        placement.links.book("p", "d", 200_000, 0.0, 0.0)
    placed = place(placement, list(range(prompt_tokens)))
    return placed.local_reason, placed.decisions[0].costs


def test_who_waits_for_what_decides_between_copying_and_computing():
    reason, idle = weighed("nobody")
    assert reason == ""
    reason, costs = weighed("d")
    assert reason == ""
    assert costs.recompute_ms > idle.recompute_ms + 9000
    assert costs.copy_ms == pytest.approx(idle.copy_ms)
    for busy in ("p", "link"):
        reason, costs = weighed(busy)
        assert reason == "cheaper", busy
        assert costs.copy_ms > idle.copy_ms + 9000
        assert costs.recompute_ms == pytest.approx(idle.recompute_ms)


@pytest.mark.parametrize("is_local", ["by cost", "unasked"])
def test_a_prompt_computed_in_place_holds_up_what_arrives_there_and_no_link_is_blamed(is_local):
    _, placement = pools()
    links, ms = placement.links, 5000.0 if is_local == "by cost" else 5.0
    for i in range(60):
        transfer(links, 8000, ms / 1e3, 10.0 * i)
    before = links.cost("p", "d", 8000, 1000.0, 1000.0)
    reason = "" if is_local == "by cost" else "many_sequences"
    order = Order("r", Prompt.known(Hashers("s"), range(8000)), None, 50, reason)

    placed = placement.place(order, 1000.0)
    links.book("p", "d", 1, 1000.0, 1000.0)

    assert placed.prefill is None
    assert placed.main.worker.free_at_s > 1000.75
    after = links.cost("p", "d", 8000, 1000.7, 1000.7)
    assert after.move_ms == pytest.approx(before.move_ms, rel=0.01)
    assert after.wait_ms < 10.0


def test_a_transfer_that_cannot_be_is_never_chosen():
    _, placement = pools(kv_bytes_per_token=1000, transfer_max_bytes=1_000_000)
    assert place(placement, list(range(8000))).local_reason == "too_large"
    _, placement = pools()
    for i in range(3):
        placement.links.book("p", "d", 10, 0.0, float(i)).failed(0.0)
    assert place(placement, list(range(8000)), 1.0).local_reason == "link_down"


def two_hosts():
    """A prefill and a decode engine on each of two hosts: what crosses between them takes 10 times as long."""
    index, placement = pools(
        [(f"{role[0]}{i}", role) for i in "12" for role in ("prefill", "decode")]
    )
    for number in range(30):
        for pair in (("p1", "d1"), ("p2", "d2"), ("p1", "d2"), ("p2", "d1")):
            near = pair[0][1] == pair[1][1]
            transfer(placement.links, 4000, 0.02 if near else 0.2, 2.0 * number, pair)
    return index, placement


def test_kv_goes_over_the_faster_link_until_load_costs_more():
    _, placement = two_hosts()
    pairs = []
    for number in range(60):
        placed = place(placement, [number] * 4000, 60.0 + number / 10)
        pairs.append((placed.prefill.worker.id, placed.main.worker.id))
        (decision,) = [one for one in placed.decisions if one.leg == "decode"]
        assert decision.recompute() == decision.position
        predicted = [sum(decision.predicted_ms(at).values()) for at in range(2)]
        assert predicted[decision.position] == min(predicted) < 30.0
        assert max(predicted) > 150.0
        placed.move.dropped()
    assert set(pairs) == {("p1", "d1"), ("p2", "d2")}, "each with its neighbour, and both are used"

    # What is under way at the near one costs more than the far link.
    busy = [placement.workers.get("d1").book(100, 0, 400, 70.0) for _ in range(150)]
    placed = place(placement, [7] * 4000, 70.0)
    while placed.prefill.worker.id != "p1":
        placed.move.dropped()
        placed = place(placement, [7] * 4000, 70.0)
    assert placed.main.worker.id == "d2"
    for booking in busy:
        booking.release()


def test_a_pair_that_rests_leads_to_another_one_and_not_to_a_prefill_in_place():
    _, placement = two_hosts()
    for number in range(3):
        placement.links.book("p1", "d1", 10, 5000.0, 5000.0 + number).failed(5000.0)
    for number in range(20):
        placed = place(placement, [number] * 16_000, 5001.0)
        assert placed.local_reason == ""
        assert (placed.prefill.worker.id, placed.main.worker.id) != ("p1", "d1")
        placed.move.dropped()


def test_policies_without_costs_always_copy():
    _, placement = pools()
    placement.policy = load_policy("round_robin")
    assert place(placement, [7] * 20).prefill is not None


def test_a_transfer_of_which_only_the_answers_end_is_known_teaches_nothing_but_that_the_pair_works():
    links = known_links()
    before = links.cost("p", "d", 8000, 99.0, 99.0)
    counted = links.moved_tokens["unknown"]
    for _ in range(2):
        links.book("p", "d", 10, 100.0, 100.0).failed(100.0)
    links.book("p", "d", 8000, 100.0, 100.0).arrived()
    links.book("p", "d", 10, 160.0, 160.0).failed(160.0)

    assert links.is_usable("p", "d", 160.0)
    assert links.num_booked == 0
    assert links.cost("p", "d", 8000, 200.0, 200.0) == pytest.approx(before, rel=0.02)
    assert links.moved_tokens["unknown"] == counted + 8000


def test_what_was_handed_over_is_counted_by_class_of_link_and_in_bytes_where_they_are_known():
    places = [EnginePlace("p", "a", "a 0"), EnginePlace("d", "a", "a 0"), EnginePlace("e", "b")]
    links = Links(2.0, 0.005, LinkClasses(places))
    transfer(links, 1000, 0.01, 1.0)
    transfer(links, 500, 0.01, 2.0)
    transfer(links, 70, 0.01, 3.0, ("p", "e"))
    transfer(links, 3, 0.01, 4.0, ("p", "nobody"))
    failed, dropped = (links.book("p", "d", 10_000, 5.0, 5.0) for _ in range(2))
    failed.failed(6.0)
    dropped.dropped()

    assert links.moved_tokens == {"nvlink": 1500, "host": 0, "rdma": 0, "tcp": 70, "unknown": 3}
    assert "moved_nvlink_bytes" not in links.sums(0)
    assert links.sums(10) | {"moved_nvlink_bytes": 15_000, "moved_tcp_tokens": 70} == links.sums(10)
    text = "\n".join(links.exposition(10))
    assert 'kv_moved_bytes_total{link="nvlink"} 15000' in text
    assert 'kv_moved_tokens_total{link="rdma"} 0' in text
    assert "kv_moved_bytes" not in "\n".join(links.exposition(0))


PLACES = [
    EnginePlace(name, host)
    for name, host in (("p", "a"), ("p2", "a"), ("d", "b"), ("d2", "b"), ("c", "c"), ("n", "a"))
]


def told_links():
    """From host a to b 0.2 ms a token were measured; inside a the devices' names say 0.001."""
    rates = [
        LinkRate("a", "b", "tcp", 0.2, latency_ms=0.5),
        LinkRate("a", "a", "host", 0.001, basis="nominal"),
    ]
    return Links(2.0, 0.005, LinkClasses(PLACES, rates))


def test_a_link_costs_what_was_measured_until_more_is_known_and_others_what_is_assumed():
    links = told_links()
    assert links.price("p", "d", 0.0, 0.0) == (2.5, 0.2)
    assert links.price("p", "n", 0.0, 0.0) == (2.0, 0.001)
    # Nothing was measured the other way, to a third host, or of engines nobody knows the places of.
    for pair in (("d", "p"), ("p", "c"), ("p", "nobody")):
        assert links.price(*pair, 0.0, 0.0) == (2.0, 0.005)
        assert links.basis(*pair, 0.0) == "assumed"
    assert links.basis("p", "d", 0.0) == "measured"
    assert links.basis("p", "n", 0.0) == "nominal"


def test_what_is_seen_replaces_what_was_measured_and_is_forgotten_towards_it():
    links = told_links()
    transfer(links, 4000, 0.0025 + 4000 * 0.6e-3, 0.0, ("p2", "d2"))
    for i in range(20):
        transfer(links, 4000, 0.0025 + 4000 * 0.6e-3, 10.0 * i)
    assert links.basis("p", "d", 200.0) == "learned"
    assert links.cost("p", "d", 1000, 200.0, 200.0).move_ms == pytest.approx(602, rel=0.05)
    # Its neighbours between the same hosts are taken to be like it, whether they were never used or long ago.
    for pair in (("p2", "d"), ("p2", "d2")):
        assert links.cost(*pair, 1000, 200.0, 200.0).move_ms == pytest.approx(602, rel=0.05)
        assert links.basis(*pair, 200.0) == "learned"
    # A link that was measured says nothing of one with a rate of its own, and all there is of one without.
    assert links.cost("p", "n", 1000, 200.0, 200.0).move_ms == pytest.approx(3.0)
    assert links.cost("p", "c", 1000, 200.0, 200.0).move_ms == pytest.approx(602, rel=0.05)

    once = told_links()
    transfer(once, 4000, 0.0025 + 4000 * 0.6e-3, 0.0)
    assert once.basis("p", "d", 3.0) == "learned"
    assert once.cost("p", "d", 1000, 300.0, 300.0).move_ms == pytest.approx(202.5, rel=0.01)
    assert once.basis("p", "d", 300.0) == "measured"


def test_other_links_teach_nothing_of_one_that_was_measured():
    links = told_links()
    for i in range(20):
        transfer(links, 4000, 4.0, 10.0 * i, ("p", "c"))
    assert links.price("p", "d", 200.0, 200.0) == (2.5, 0.2)
    assert links.basis("p", "c", 200.0) == "learned"


def test_the_first_request_takes_the_link_that_was_measured_to_be_fast():
    engines = [("p1", "prefill"), ("d1", "decode"), ("d2", "decode")]
    slow, fast = (LinkRate("a", host, "tcp", ms) for host, ms in (("b", 0.5), ("c", 0.002)))
    for rates, taken, requests in (([slow, fast], "d2", 3), ([], None, 12)):
        _, placement = pools(engines)
        places = [EnginePlace("p1", "a"), EnginePlace("d1", "b"), EnginePlace("d2", "c")]
        placement.links = Links(2.0, 0.005, LinkClasses(places, rates))
        names = set()
        for number in range(requests):
            placed = place(placement, [number] * 4000)
            names.add(placed.main.worker.id)
            placed.move.dropped()
            shown = [decision.to_json()["link_price"] for decision in placed.decisions]
            assert shown == ["measured" if rates else "assumed"] * 2
        assert names == ({taken} if taken else {"d1", "d2"})


def test_what_is_computed_in_place_says_too_what_the_move_was_priced_by():
    _, placement = pools(local_prefill_max_tokens=16)
    places, rate = [EnginePlace("p", "a"), EnginePlace("d", "b")], LinkRate("a", "b", "tcp", 10.0)
    placement.links = Links(2.0, 0.005, LinkClasses(places, [rate]))
    placed = place(placement, list(range(1000)))
    (decision,) = placed.decisions
    assert (decision.path_reason, decision.link_price) == ("cheaper", "measured")
    assert decision.costs.copy_ms > 10_000
    unasked = place(placement, list(range(10)))
    assert (unasked.local_reason, unasked.decisions[0].link_price) == ("short", "")


def stepped(links, tokens, moving_ms, now_s, *, step_ms, rng, pair=("p", "d")):
    """A transfer to an engine that looks at what has come between two steps, and takes one for the first token."""
    step_s = step_ms / 1e3
    begun_s = math.ceil(now_s / step_s) * step_s
    first_s = math.ceil((begun_s + moving_ms / 1e3) / step_s) * step_s + step_s
    move = links.book(*pair, tokens, now_s, now_s)
    move.took(now_s, first_s, step_ms * rng.uniform(0.9, 1.0))


@pytest.mark.parametrize("step_ms", [10.0, 40.0])
def test_what_a_decode_engines_steps_take_is_not_the_links(step_ms):
    links, rng = Links(2.0, 0.005), random.Random(5)
    now_s = 0.0
    for _ in range(200):
        tokens = rng.randrange(16, 200)
        stepped(links, tokens, 2.0 + tokens * 0.005, now_s, step_ms=step_ms, rng=rng)
        now_s += rng.uniform(0.2, 0.5)
    # 8,000 tokens take 42 ms, and two steps: not 0.1 to 1 ms a token as the times to the first tokens look like.
    assert links.cost("p", "d", 8000, now_s, now_s).move_ms == pytest.approx(
        42.0 + 2 * step_ms, rel=0.1
    )


@pytest.mark.parametrize("step_ms", [10.0, 40.0])
def test_a_slow_link_is_learned_beside_steps_as_it_is_without(step_ms):
    links, rng = Links(2.0, 0.005), random.Random(5)
    now_s = 0.0
    for _ in range(60):
        tokens = rng.randrange(16, 4000)
        stepped(links, tokens, 2.0 + tokens * 0.5, now_s, step_ms=step_ms, rng=rng)
        now_s += 5.0
    assert links.cost("p", "d", 2000, now_s, now_s).move_ms == pytest.approx(
        1002.0 + 2 * step_ms, rel=0.1
    )


def test_a_transfer_is_late_only_after_all_the_steps_it_may_wait_for():
    links, rng = Links(2.0, 0.005), random.Random(5)
    stepped(links, 100, 2.5, 0.0, step_ms=20.0, rng=rng)
    links.book("p", "d", 100, 10.0, 10.0)
    in_time = links.cost("p", "d", 100, 10.055, 10.055)
    late = links.cost("p", "d", 100, 10.2, 10.2)
    assert in_time.wait_ms == 0.0
    assert in_time.move_ms < 45.0
    assert late.wait_ms + late.move_ms > 100.0


@pytest.mark.parametrize("policy", ["kv", "least_loaded"])
def test_engines_that_compute_in_place_are_chosen_by_that_and_not_by_links_nobody_uses(policy):
    names = [("p", "prefill"), ("d1", "decode"), ("d2", "decode")]
    _, placement = pools(names)
    placement.policy = load_policy(policy)
    rates = [LinkRate("a", "b", "tcp", 50.0), LinkRate("a", "c", "tcp", 5.0)]
    places = [EnginePlace("p", "a"), EnginePlace("d1", "b"), EnginePlace("d2", "c")]
    placement.links = Links(2.0, 0.005, LinkClasses(places, rates))
    found = [place(placement, [number] * 400, 0.1 * number) for number in range(40)]
    sent = Counter(placed.main.worker.id for placed in found)
    assert min(sent["d1"], sent["d2"]) >= 15
    for placed in found:
        decision = placed.decisions[0]
        assert decision.to_json()["is_reproduced"]
        # Who copies always is told what that takes.
        is_in_place = placed.local_reason == "cheaper"
        assert is_in_place == (policy == "kv")
        assert is_in_place == (max(load.move_ms_per_token for load in decision.loads) < 1.0)


def test_of_two_decode_engines_the_one_behind_the_fast_link_is_copied_to():
    names = [("p", "prefill"), ("d1", "decode"), ("d2", "decode")]
    _, placement = pools(names)
    rates = [LinkRate("a", "b", "tcp", 50.0), LinkRate("a", "c", "tcp", 0.001)]
    places = [EnginePlace("p", "a"), EnginePlace("d1", "b"), EnginePlace("d2", "c")]
    placement.links = Links(2.0, 0.005, LinkClasses(places, rates))
    placed = place(placement, [1] * 4000)
    assert (placed.main.worker.id, placed.local_reason) == ("d2", "")
    decision = next(one for one in placed.decisions if one.leg == "decode")
    in_place, copied = decision.loads
    assert copied.move_ms_per_token == 0.001
    assert in_place.move_ms_per_token > in_place.prefill_ms_per_token, "and what that holds up"
