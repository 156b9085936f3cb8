"""Only engines whose KV blocks are of the same kind are paired, as when `up` is half done."""

import json
import random
from dataclasses import replace

import pytest
from router_bench import routed
from router_fakes import FakeEngine

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.alarms import apart
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placed, Placement, Unplaced
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.worker_table import WorkerTable

LONG = list(range(8000))
OLD, NEW = "1:old", "1:new"
POLICIES = ["kv", "least_loaded", "round_robin"]


def told(name, identity="", **facts):
    role = "prefill" if name[0] == "p" else "decode"
    more = {
        "block_size_tokens": 16,
        "kv_capacity_tokens": 1_000_000,
        "kv_identity": identity,
    } | facts
    return EngineInfo(name, f"{name}.1", EngineState.READY, role, "d", "vllm", "m", **more)


def placement(engines, policy="kv", **settings):
    made = Settings(**settings)
    table, index = WorkerTable(made), PrefixIndex()
    for name, identity in engines.items():
        table.put(told(name, identity))
        index.begin(Source(name, f"{name}.1"))
    return Placement(table, index, load_policy(policy), made, random.Random(0))


def order(number=0, tokens=LONG, **more):
    prompt = Prompt.known(Hashers("s"), [number, *tokens])
    return Order("r", prompt, None, 50, **more)


def pairs(made, number=40):
    """Who prefilled for whom, or why nobody did, of so many prompts that stay under way."""
    found = []
    for i in range(number):
        placed = made.place(order(i), i / 10)
        assert isinstance(placed, Placed)
        main = placed.main.worker.id
        found.append(
            (placed.prefill.worker.id, main) if placed.prefill else (placed.local_reason, main)
        )
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [0, 1])
def test_only_equal_kinds_are_paired(policy, share):
    engines = {"p0": OLD, "p1": NEW, "d0": OLD, "d1": NEW, "d2": NEW}
    made = placement(engines, policy, conditional_prefill=share)
    found = pairs(made)

    copied = [(one, other) for one, other in found if one in engines]
    assert copied
    assert all(engines[one] == engines[other] for one, other in copied)
    assert {one for one, _ in copied} == {"p0", "p1"}
    if policy != "kv" or not share:
        assert copied == found


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_pair_the_decode_engine_computes_the_prompt_and_says_why(policy):
    made = placement({"p0": OLD, "d0": NEW, "d1": NEW}, policy)
    placed = made.place(order(), 0.0)

    assert (placed.prefill, placed.local_reason) == (None, "other_kv")
    (decision,) = placed.decisions
    assert (decision.leg, decision.path_reason) == ("whole", "other_kv")
    assert decision.to_json()["is_reproduced"]
    assert made.workers.get("p0").active_requests == 0
    assert placed.main.worker.pending_prefill_tokens > 7000


def test_a_decode_engine_without_a_partner_still_works_when_others_are_busy():
    made = placement({"p0": OLD, "d0": OLD, "d1": NEW})
    found = set(pairs(made))

    assert ("p0", "d0") in found
    assert ("other_kv", "d1") in found
    assert ("p0", "d1") not in found


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_known_is_paired_as_before(policy):
    engines = {"p0": "", "p1": OLD, "d0": NEW, "d1": ""}
    found = set(pairs(placement(engines, policy, conditional_prefill=0)))

    assert ("p0", "d0") in found
    assert ("p1", "d1") in found
    assert ("p1", "d0") not in found


def test_who_was_left_out_for_its_kind_is_told():
    made = placement({"p0": OLD, "p1": NEW, "d0": NEW})
    prefill = made.place(order(), 0.0).decisions[1]

    assert (prefill.leg, prefill.engine) == ("prefill", "p1")
    assert prefill.left_out == {"p0": "other_kv"}


def test_full_partners_are_waited_for_unless_some_decode_engine_is_free():
    made = placement({"p0": OLD, "p1": NEW, "d0": OLD, "d1": NEW}, default_slots=1)
    made.workers.get("p0").book(10, 10, 1, 0.0)
    made.workers.get("d1").book(10, 0, 1, 0.0)
    assert isinstance(made.place(order(), 0.0), Unplaced), "p0 is full, and d0 is its partner"

    made = placement({"p0": OLD, "d0": OLD, "d1": NEW}, default_slots=1)
    made.workers.get("d0").book(10, 0, 1, 0.0)
    assert made.place(order(), 0.0).local_reason == "other_kv"


def test_blocks_that_are_ready_go_only_to_their_kind():
    made = placement({"p0": OLD, "d0": NEW, "d1": OLD})
    source = made.workers.get("p0")
    for i in range(8):
        placed = made.place_main(order(i), source, 0.0)
        assert placed.main.worker.id == "d1"
        assert placed.decisions[0].left_out == {"d0": "other_kv"}
    assert made.has_taker(source, 0.0)

    made.workers.put(told("d1", NEW))
    assert not made.has_taker(source, 0.0)
    made.workers.remove("d0")
    made.workers.remove("d1")
    assert made.has_taker(source, 0.0), "nobody is there: who comes may be of its kind"


def test_another_prefill_engine_is_of_the_kind_of_who_generates():
    made = placement({"p0": OLD, "p1": NEW, "d0": NEW})
    main = made.workers.get("d0")
    assert made.place_prefill(order(), main, 0.0).prefill.worker.id == "p1"
    made.workers.remove("p1")
    assert made.place_prefill(order(), main, 0.0).local_reason == "other_kv"
    made.workers.remove("p0")
    assert made.place_prefill(order(), main, 0.0).local_reason == "no_prefill_engine"


def test_decode_engines_that_stand_apart_are_found():
    table = placement({"p0": OLD, "d0": OLD, "d1": NEW, "d2": NEW}).workers
    (finding,) = apart(table.all())
    assert (finding.engine, finding.cause) == ("", "other_kv")
    assert "2 of 3 decode engines" in finding.text
    assert "d1, d2" in finding.text

    assert apart(placement({"p0": OLD, "d0": OLD}).workers.all()) == []
    assert apart(placement({"p0": OLD, "d0": ""}).workers.all()) == []
    assert apart(placement({"d0": OLD, "d1": NEW}).workers.all()) == []


def test_a_decode_engine_replaced_during_the_prefill_gets_nothing_of_the_old_kind(run):
    async def main():
        prefill, decode = FakeEngine("p0", "prefill"), FakeEngine("d0", "decode")
        async with routed(prefill, decode, settings={"engine_poll_s": 3600.0}) as bench:
            table = bench.desk.workers

            def tell(name, identity, **facts):
                info = table.get(name).info
                table.put(replace(info, kv_identity=identity, **facts))

            tell("p0", OLD)
            tell("d0", OLD)
            prefill.script = lambda body: tell("d0", NEW, incarnation="d0.new")
            answer = await bench.client.complete(stream=True, max_tokens=4)

            assert answer.status == 200
            assert len(prefill.requests) == 1
            (sent,) = decode.requests
            assert "kv_transfer_params" not in sent
            assert bench.desk.metrics.local_prefill.value("other_kv") == 1
            shown = json.loads(bench.desk.ring.to_json(10))
            assert shown[0]["path"] == "other_kv"
            bench.assert_books_balance()

    run(main)
