"""Requests from routers' decisions: parts of the first token add up, what is not known stays unknown."""

import json

import pytest

from dynctl.errors import ProbeError
from dynctl.telemetry.traces import LOST, NUM_KEPT, Told, TraceBook, engine_of, routes, told, trace


def prefill(request_id="r", **fields):
    given = {
        "unix_s": 10.0, "engine": "p0", "prompt_tokens": 800, "overlap_tokens": 400, "cached_tokens": 384,
        "waited_ms": 2.0, "ttft_ms": 36.0, "outcome": "done",
    }  # fmt: skip
    return Told(request_id=request_id, leg="prefill", **given | fields)


def decode(request_id="r", **fields):
    given = {
        "unix_s": 10.1, "engine": "d0", "prompt_tokens": 800, "waited_ms": 40.0, "ttft_ms": 26.0, "outcome": "done",
        "path": "copy", "link": "rdma", "move_tokens": 400, "move_bytes": 1 << 20, "output_tokens": 128,
    }  # fmt: skip
    return Told(request_id=request_id, leg="decode", **given | fields)


def whole(request_id="r", **fields):
    return Told(
        request_id=request_id,
        leg="whole",
        **{"unix_s": 10.0, "engine": "d0", "prompt_tokens": 80} | fields,
    )


def test_a_hand_over_has_three_parts_that_add_up():
    found = trace([decode(), prefill()])

    assert (found.queue_ms, found.prefill_ms, found.handover_ms) == (2.0, 36.0, 28.0)
    assert found.ttft_ms == 66.0
    assert (found.prefill, found.engine, found.link, found.move_bytes) == (
        "p0",
        "d0",
        "rdma",
        1 << 20,
    )
    assert found.hit_ratio == 0.48
    assert found.unix_s == 10.0


def test_one_engine_that_does_both_has_no_hand_over():
    found = trace([whole(waited_ms=3.0, ttft_ms=20.0, link="rdma", move_bytes=5)])

    assert (found.queue_ms, found.prefill_ms, found.handover_ms, found.ttft_ms) == (
        3.0,
        20.0,
        None,
        23.0,
    )
    assert not found.is_handed_over
    assert (found.link, found.move_bytes) == ("", None)


def test_times_are_unknown_until_they_are_told():
    under_way = trace(
        [
            prefill(ttft_ms=None, outcome="", waited_ms=0.0),
            decode(ttft_ms=None, waited_ms=0.0, outcome=""),
        ]
    )
    decoding = trace([prefill(), decode(ttft_ms=None, waited_ms=0.0, outcome="", output_tokens=0)])

    assert (under_way.queue_ms, under_way.prefill_ms, under_way.handover_ms, under_way.ttft_ms) == (
        None,
    ) * 4
    assert (decoding.queue_ms, decoding.prefill_ms, decoding.handover_ms, decoding.ttft_ms) == (
        2.0,
        36.0,
        None,
        None,
    )
    assert decoding.output_tokens is None
    assert trace([whole(cached_tokens=None)]).hit_ratio is None


def test_a_request_without_its_first_leg_is_not_shown():
    assert trace([decode()]) is None
    assert trace([prefill()]) is None


def test_the_last_attempt_counts_and_earlier_ones_are_counted():
    found = trace(
        [prefill(engine="p0", outcome="engine_failure", unix_s=9.0), prefill(engine="p1"), decode()]
    )

    assert (found.prefill, found.num_failed) == ("p1", 1)


def test_a_prefill_that_failed_for_good_leaves_it_to_the_other_engine():
    found = trace(
        [prefill(outcome="engine_failure"), whole(unix_s=11.0, waited_ms=50.0, ttft_ms=30.0)]
    )

    assert (found.prefill, found.engine, found.queue_ms, found.num_failed) == ("d0", "d0", 50.0, 1)


def test_texts_of_routers_are_cleaned():
    found = trace([whole(shown_id="a\x1b[2Jb", route_key="k\n\x07", engine="d\u202e0")])

    assert (found.id, found.route_key, found.engine) == ("ab", "k", "d0")


def test_decisions_are_read_and_what_they_hold_beside_is_passed_over():
    (one,) = told(
        json.dumps(
            [{"request_id": "r", "leg": "whole", "engine": "e", "unix_s": 1.5, "candidates": [{}]}]
        ).encode()
    )

    assert (one.engine, one.waited_ms, one.cached_tokens) == ("e", None, None)


@pytest.mark.parametrize("body", [b"", b"{}", b'[{"leg": 3}]', b"[1]"])
def test_what_is_no_list_of_decisions_is_refused(body):
    with pytest.raises(ProbeError, match="not understood"):
        told(body)


@pytest.mark.parametrize(
    "wrong",
    [{"unix_s": 1e300}, {"unix_s": -1.0}, {"ttft_ms": 1e308}, {"waited_ms": -5.0}, {"cached_tokens": 10**40}],
)  # fmt: skip
def test_numbers_that_no_request_has_are_refused_before_they_are_drawn(wrong):
    one = {"request_id": "r", "leg": "whole", "engine": "e", "unix_s": 1.5} | wrong

    with pytest.raises(ProbeError, match=next(iter(wrong))):
        told(json.dumps([one]).encode())


def test_requests_are_remembered_over_looks_newest_first():
    book = TraceBook()
    book.add([whole("a", unix_s=1.0, outcome="done"), whole("b", unix_s=2.0)])
    book.add([whole("b", unix_s=2.0, outcome="done"), whole("c", unix_s=3.0)])

    assert [(one.id, one.outcome) for one in book.newest()] == [
        ("c", ""),
        ("b", "done"),
        ("a", "done"),
    ]


def test_one_that_ran_and_is_told_of_no_more_is_not_said_to_run():
    book = TraceBook()
    book.add([whole("a", unix_s=1.0)])
    book.add([whole("b", unix_s=2.0)])

    assert [(one.id, one.outcome) for one in book.newest()] == [("b", ""), ("a", LOST)]


def test_old_requests_are_forgotten():
    book = TraceBook()
    for at in range(NUM_KEPT + 100):
        book.add([whole(f"r{at}", unix_s=float(at), outcome="done")])

    found = book.newest()
    assert len(found) == NUM_KEPT
    assert found[0].id == f"r{NUM_KEPT + 99}"


def test_ranks_are_of_their_engine_and_names_that_only_look_so_are_their_own():
    assert engine_of("chat-0_dp12", {"chat-0"}) == "chat-0"
    assert engine_of("chat-0_dp1", {"chat-0_dp1"}) == "chat-0_dp1"
    assert engine_of("chat-0", ()) == "chat-0"


def test_routes_are_counted_by_both_engines():
    found = [trace([prefill(), decode()]), trace([prefill("s"), decode("s")]), trace([whole("t")])]

    assert routes(found) == {("p0", "d0"): 2, ("d0", "d0"): 1}
