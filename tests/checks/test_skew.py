"""Why engines are loaded unevenly: recorded decisions in, one diagnosis out."""

import math
import random

import msgspec
import pytest

from dynctl.checks.skew import diagnose
from dynctl.router.choosing import Load, Need
from dynctl.router.decisions import Decision
from dynctl.router.desk import load_policy
from dynctl.router.merging import add_answers
from dynctl.router.skew import SkewSums, add_up

FLEET = ("e0", "e1", "e2", "e3")


def load(engine, **facts):
    usual = Load(engine, 0.1, 5.0, 0.0, 0.1, 0.0, 50_000.0, 100_000, 1, 0, 0.1)
    return usual._replace(**facts)


def decision(position, *, tokens=1000, overlaps=None, popularity=math.inf, key="chat", **loads):
    """One request of a fleet; `loads` are facts of engines that differ from the usual."""
    return Decision(
        request_id="r",
        leg="whole",
        is_tokenized=True,
        need=Need(tokens, 100, 0, popularity=popularity),
        loads=[load(engine, **loads.get(engine, {})) for engine in FLEET],
        overlaps_tokens=overlaps or [0] * len(FLEET),
        draw=0.0,
        position=position,
        asked=load_policy("kv"),
        route_key=key,
        policy="kv",
    )


def judged(decisions):
    (pool,) = add_up(decisions).pools.values()
    return diagnose(pool)


def spread_of(diagnosis, measure):
    return next(spread for spread in diagnosis.spreads if spread.measure == measure)


def held(diagnosis):
    return {cause.name for cause in diagnosis.causes if cause.holds}


def test_requests_drawn_by_one_shared_prefix_are_the_policys_doing():
    hot = [decision(0, overlaps=[900, 0, 0, 0], popularity=3.0, key="support") for _ in range(300)]
    others = [decision(i % 4, key="search") for i in range(300)]
    found = judged([one for pair in zip(hot, others, strict=True) for one in pair])

    assert found.verdict == "policy"
    assert held(found) == {"routing policy"}
    requests = spread_of(found, "requests")
    assert (requests.engine, requests.ratio, requests.in_turn) == ("e0", 2.5, 1.0)
    assert "prompts with a shared prefix of route key support" in found.step
    assert "what no cache draws went there 1.00 times its share" in found.step
    assert "dynctl policy --stickiness 0.5" in found.remedy
    assert [cause.name for cause in found.causes] == [
        "routing policy",
        "parallel layout",
        "KV memory",
    ], "in the order in which operators meet them"


def test_turns_of_conversations_are_told_from_shared_prefixes():
    turns = [decision(1, overlaps=[0, 900, 0, 0], popularity=0.0) for _ in range(200)]
    found = judged(turns + [decision(i % 4) for i in range(200)])

    assert found.verdict == "policy"
    assert "turns of conversations of route key chat" in found.step


def test_a_slow_engine_that_load_steers_away_from_is_the_layouts_doing():
    slow = {"e3": {"prefill_ms_per_token": 0.2}}
    # Conversations follow where they began, so most requests of a sound engine are drawn by its cache.
    starts = [decision(i % 3, **slow) for i in range(300)]
    turns = [
        decision(i % 3, overlaps=[500 * (i % 3 == p) for p in range(4)], popularity=0.0, **slow)
        for i in range(600)
    ]
    found = judged(starts + turns)

    assert spread_of(found, "requests").ratio == pytest.approx(4 / 3)
    assert found.verdict == "layout"
    assert held(found) == {"parallel layout"}
    assert "e3 computes 1024 tokens in 209.8 ms, the others in 107.4" in found.step
    assert "dynctl drain e3" in found.remedy


def test_an_engine_that_takes_long_is_found_by_the_time_it_took_where_no_prefill_was_before_it():
    decisions = [decision(i % 4) for i in range(200)]
    for one in decisions:
        is_slow = one.engine == "e3"
        one.ttft_ms = 260.0 if is_slow else 105.0
        one.loads = [now._replace(active_requests=9 * (now.engine == "e3")) for now in one.loads]
    found = judged(decisions)
    assert found.verdict == "layout"
    assert "e3 takes 2.48 times as long as the others for the same prefill" in found.step

    # Behind other prefills the same times say nothing of an engine.
    for one in decisions:
        one.loads = [now._replace(free_at_s=1.0) for now in one.loads]
    assert judged(decisions).verdict == "engine"


def test_an_engine_that_gets_little_for_no_known_reason_is_what_is_named():
    found = judged([decision(i % 3) for i in range(600)])

    assert (found.verdict, held(found)) == ("engine", set())
    assert "e3 has 0.00 times its share; the others beside each other are even (1.00)" in found.step
    assert "dynctl logs e3" in found.remedy


def test_an_engine_without_what_all_others_hold_is_left_out_by_the_policy():
    drawn = [decision(i % 3, overlaps=[500, 500, 500, 0], popularity=3.0) for i in range(600)]
    found = judged(drawn)

    assert (found.verdict, held(found)) == ("policy", {"routing policy"})


def test_an_engine_with_fewer_blocks_that_lags_behind_is_its_memorys_doing():
    small = {"e2": {"capacity_tokens": 40_000, "active_requests": 9, "room_tokens": -5000.0}}
    found = judged([decision(i % 4, **small) for i in range(200)])

    assert spread_of(found, "requests").is_even
    assert spread_of(found, "under_way").ratio == pytest.approx(3.0)
    assert found.verdict == "kv_memory"
    assert "e2 has room for 40,000 tokens, the others for 100,000" in found.step


def test_an_engine_whose_blocks_are_taken_is_found_by_its_lack_of_room():
    full = {"e2": {"active_requests": 9, "room_tokens": -5000.0}}
    found = judged([decision(i % 4, **full) for i in range(200)])

    assert found.verdict == "kv_memory"
    assert "e2 was full at 100% of looks, the others at 0%" in found.step


def test_an_engine_that_lags_for_no_known_reason_is_named():
    found = judged([decision(i % 4, e2={"active_requests": 9}) for i in range(200)])

    assert (found.verdict, held(found)) == ("engine", set())
    assert "dynctl logs e2" in found.remedy


def test_a_few_large_requests_stay_uneven_when_dealt_out_in_turn():
    # Every fourth is large, and so always the same engine's: in turn, and by the policy.
    found = judged([decision(i % 4, tokens=100_000 if i % 4 == 1 else 500) for i in range(400)])

    tokens = spread_of(found, "uncached_tokens")
    assert tokens.ratio == tokens.in_turn > 3.9
    assert (found.verdict, held(found)) == ("sizes", set())
    assert "dealt out in turn uncached prompt tokens would be 3.94 too" in found.causes[0].evidence


def test_causes_come_in_the_order_in_which_they_are_met():
    found = judged([decision(0) for _ in range(10)])

    assert [cause.name for cause in found.causes] == [
        "routing policy",
        "parallel layout",
        "KV memory",
    ]


@pytest.mark.parametrize("number", [3, 20, 200, 1000])
def test_what_chance_does_is_called_even(number):
    verdicts = []
    for seed in range(30):
        rng = random.Random(seed)
        found = judged([decision(rng.randrange(4), tokens=600) for _ in range(number)])
        verdicts.append(found.verdict)
    assert verdicts.count("even") >= 25, "19 in 20 of each of three measures"


def test_an_engine_that_joined_late_owes_no_share_of_what_was_before():
    before = [decision(i % 3) for i in range(300)]
    for one in before:
        one.loads = one.loads[:3]
        one.overlaps_tokens = one.overlaps_tokens[:3]
    found = judged(before + [decision(i % 4) for i in range(100)])

    assert found.verdict == "even"
    assert spread_of(found, "requests").ratio == pytest.approx(1.0)


def test_prefill_engines_are_judged_by_themselves():
    split = []
    for i in range(100):
        prefill = decision(i % 4)
        prefill.leg = "prefill"
        generate = decision(0)
        generate.leg = "decode"
        split += [generate, prefill]
    verdicts = {name: diagnose(pool).verdict for name, pool in add_up(split).pools.items()}

    assert verdicts == {"prefill": "even", "main": "policy"}


def test_what_the_engine_counted_weighs_more_than_what_was_expected():
    one = decision(0, tokens=1000, overlaps=[800, 0, 0, 0])
    one.cached_tokens, one.counted_tokens, one.output_tokens = 1000, 2000, 7
    amounts = add_up([one]).pools["main"].engines["e0"].amounts

    assert amounts["uncached_tokens"].actual == 500
    assert amounts["output_tokens"].actual == 7


def test_sums_of_several_processes_add_up_to_those_of_one():
    rng = random.Random(3)
    all_of_them = [
        decision(
            rng.randrange(4),
            tokens=rng.randrange(100, 4000),
            overlaps=[rng.randrange(2) * 64 for _ in FLEET],
            key=rng.choice("abc"),
        )
        for _ in range(800)
    ]
    parts = [msgspec.json.encode(add_up(all_of_them[i::2])) for i in range(2)]
    status, body = add_answers("/skew", b"", (200, parts[0]), [parts[1]])
    joined = msgspec.json.decode(body, type=SkewSums).pools["main"]
    whole = add_up(all_of_them).pools["main"]

    assert status == 200
    assert joined.num_decisions == whole.num_decisions == 800
    assert joined.policies == whole.policies
    assert joined.drawn == whole.drawn
    for name, engine in whole.engines.items():
        for measure, amount in engine.amounts.items():
            other = joined.engines[name].amounts[measure]
            assert other.actual == amount.actual
            assert other.fair == pytest.approx(amount.fair)
            assert other.variance == pytest.approx(amount.variance)


def test_route_keys_are_bounded_and_nothing_is_lost():
    pool = add_up([decision(0, key=f"k{i}") for i in range(500)]).pools["main"]

    assert len(pool.drawn["free"]) == 65
    assert pool.drawn["free"]["other"]["e0"][0] == 436
