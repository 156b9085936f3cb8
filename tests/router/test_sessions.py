"""Requests of one session stay with the engine that had the last one, while nothing speaks against it."""

import json
import random

import pytest
from router_bench import routed
from router_fakes import MODEL, FakeEngine
from router_sims import Sim, generate, prompt_of, routed_sims, told

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router import sessions
from dynctl.router.choosing import Load, Need
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.sessions import Following, Sessions
from dynctl.router.workers import Worker
from dynctl.sim.options import MODEL_DIR

KV = load_policy("kv")
NEED = Need(1000, 100, 0)


def load(name, active=0, pending=0):
    """An idle engine, or one with so many requests and tokens to prefill."""
    facts = dict.fromkeys(Load._fields, 0.0) | {
        "engine": name,
        "prefill_ms_per_token": 0.1,
        "uncached_ms_per_token": 0.1,
        "room_tokens": 1e9,
        "capacity_tokens": 0,
        "active_requests": active,
        "pending_prefill_tokens": pending,
    }
    return Load(**facts)


def worker(name, start=1):
    info = EngineInfo(name, f"{name}.{start}", EngineState.READY, "aggregated", "d", "sim", "m")
    return Worker(info, Settings())


def looks(loads, overlaps=None, **facts):
    return Following(KV, "b", **facts).look(loads, overlaps or [0] * len(loads))


def test_a_session_goes_on_at_its_engine_until_that_is_clearly_busier_or_the_index_knows_more():
    assert looks([load("a"), load("b"), load("c")]) == (1, "followed")
    assert looks([load("a"), load("b", active=2), load("c")]) == (1, "followed")
    assert looks([load("a"), load("b", active=4), load("c")]) == (-1, "busy")
    assert looks([load("a"), load("b", pending=8000), load("c")]) == (1, "followed")
    assert looks([load("a"), load("b", pending=100_000), load("c")]) == (-1, "busy")
    assert looks([load("a"), load("c")]) == (-1, "away")
    # All hold the same system prompt, or one holds more: of that the policy makes milliseconds.
    assert looks([load("a"), load("b")], [64, 64]) == (1, "followed")
    assert looks([load("a"), load("b")], [64, 0]) == (-1, "cache")
    assert looks([load("a"), load("b")], [0, 64]) == (-1, "cache")


def test_where_the_session_does_not_decide_the_policy_does_and_both_can_be_computed_again():
    loads = [load("a"), load("b", active=9), load("c", active=1)]
    for overlaps in ([0, 0, 0], [0, 0, 960]):
        following = Following(KV, "b")
        chosen = [following.choose(NEED, loads, overlaps, draw) for draw in (0.1, 0.9)]
        assert chosen == [KV.choose(NEED, loads, overlaps, draw) for draw in (0.1, 0.9)]
    idle = [load("a"), load("b"), load("c")]
    assert {Following(KV, "b").choose(NEED, idle, [0, 0, 0], d / 9) for d in range(9)} == {1}


def test_a_session_is_forgotten_after_its_time_and_with_its_engines_start():
    book, a, b = Sessions(60.0), worker("a"), worker("b")
    assert book.following(KV, b"s", "whole", [a, b], 0.0).look([load("a")], [0]) == (-1, "new")

    book.sent(b"s", "whole", a, 0.0)
    assert book.following(KV, b"s", "decode", [a, b], 59.0).engine == "a"
    assert book.following(KV, b"s", "prefill", [a, b], 59.0).engine == "", "a leg of its own"
    assert book.following(KV, b"s", "whole", [a, b], 61.0).engine == ""
    assert book.following(KV, b"s", "whole", [worker("a", start=2), b], 1.0).engine == ""

    for number in range(1500):
        book.sent(b"%d" % number, "whole", b, 1.0)
    book.sent(b"t", "whole", b, 30.0)
    book.sweep(70.0)
    assert len(book) == 502, "a thousand at once"
    book.sweep(71.0)
    assert len(book) == 1
    assert book.following(KV, b"t", "whole", [a, b], 70.0).engine == "b"


def test_no_more_sessions_are_kept_than_a_bound_and_those_in_use_are_kept(monkeypatch):
    monkeypatch.setattr(sessions, "_MAX_SESSIONS", 100)
    book, a = Sessions(60.0), worker("a")
    for number in range(500):
        book.sent(b"in use", "whole", a, 0.0)
        book.sent(b"%d" % number, "whole", a, 0.0)

    assert len(book) == 100
    assert book.following(KV, b"in use", "whole", [a], 1.0).engine == "a"
    assert book.following(KV, b"0", "whole", [a], 1.0).engine == ""


def test_processes_of_one_port_let_a_new_session_begin_at_the_same_engine_and_spread_them():
    workers = [worker(name) for name in "abcd"]
    processes = [Sessions(60.0, are_processes_many=True) for _ in range(2)]
    begun = []
    for number in range(400):
        first, second = (
            p.following(KV, b"session %d" % number, "whole", workers, 0.0) for p in processes
        )
        assert first.engine == second.engine
        begun.append(first.engine)
    assert all(60 <= begun.count(name) <= 140 for name in "abcd")


IMAGE = "data:image/png;base64,AAAA"


def picture(url=IMAGE, text="What is on this picture?"):
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


async def ask(bench, messages, **headers):
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    answer = await bench.client.post("/v1/chat/completions", body, **headers)
    assert answer.status == 200
    return bench.desk.ring.newest(1)[0]


@pytest.mark.parametrize("long", [False, True])
def test_requests_with_images_stay_together_by_their_session(run, long):
    async def main():
        engines = [FakeEngine(f"e{number}") for number in range(4)]
        async with routed(*engines, tokenizer=str(MODEL_DIR)) as bench:
            messages = picture(text="What is on this picture? " * (40 if long else 1))
            for session in ("one", "two", "three"):
                found = [await ask(bench, messages, x_dynctl_session=session) for _ in range(6)]
                assert len({decision.engine for decision in found}) == 1
                assert [decision.session for decision in found] == ["new"] + ["followed"] * 5
                assert all(decision.recompute() == decision.position for decision in found)
                assert {decision.overlap_tokens for decision in found} == {0}
            counted = bench.desk.exposition().decode()
            assert 'session_decisions_total{result="followed"} 15' in counted
            assert "dynctl_router_sessions 3" in counted
            shown = json.loads(bench.desk.ring.to_json(1))[0]
            assert shown["session"] == "followed"
            assert shown["is_reproduced"]
            assert (await ask(bench, messages)).session == ""
            bench.assert_books_balance()

    run(main)


def test_a_session_leaves_an_engine_that_has_many_requests_more_than_the_others(run):
    async def main():
        engines = [FakeEngine(f"e{number}") for number in range(3)]
        async with routed(*engines, tokenizer=str(MODEL_DIR)) as bench:
            first = await ask(bench, picture(), x_dynctl_session="s")
            busy = bench.desk.workers.get(first.engine)
            bookings = [busy.book(10, 10, 10) for _ in range(6)]
            moved = await ask(bench, picture(), x_dynctl_session="s")
            assert (moved.session, moved.engine != first.engine) == ("busy", True)
            for booking in bookings:
                booking.release()
            stays = await ask(bench, picture(), x_dynctl_session="s")
            assert (stays.session, stays.engine) == ("followed", moved.engine)

    run(main)


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"settings": {"session_ttl_s": 0}}, {"x_dynctl_session": "s"}),
        ({"policy": "round_robin"}, {"x_dynctl_session": "s"}),
        ({}, {"x_dynctl_session": "s" * 129}),
    ],
)
def test_a_session_is_not_looked_at_where_it_is_off_or_the_policy_has_no_eye_for_caches(
    run, options, headers
):
    async def main():
        async with routed(FakeEngine("a"), FakeEngine("b"), **options) as bench:
            for _ in range(3):
                assert (await ask(bench, picture(), **headers)).session == ""

    run(main)


def test_a_session_with_known_tokens_is_left_to_what_the_index_knows(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            prompt = prompt_of(random.Random(1), bench.text.words, 200)
            await generate(bench, prompt, 4)
            await told(bench)
            body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
            answer = await bench.client.post("/v1/completions", body, x_dynctl_session="s")
            assert answer.status == 200
            first, second = bench.desk.ring.newest(2)
            assert second.engine == first.engine
            assert (second.session, second.overlap_tokens) == ("new", 192)
            answer = await bench.client.post("/v1/completions", body, x_dynctl_session="s")
            (third,) = bench.desk.ring.newest(1)
            assert (third.session, third.engine) == ("cache", first.engine)

    run(main)


@pytest.mark.parametrize("tokenizer", [None, str(MODEL_DIR)])
def test_two_images_with_the_same_text_are_never_taken_for_one(run, tokenizer):
    """Without a tokenizer prompts are matched by their text, to which the image belongs; with one they are not matched."""

    async def main():
        async with routed(FakeEngine("e0"), FakeEngine("e1"), tokenizer=tokenizer) as bench:
            text = "Compare it with what you know of the sea and the wind. " * 20
            pictures = [
                [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
                for image in (
                    {
                        "type": "image_url",
                        "image_url": {"url": f"data:image/png;base64,{data * 64}"},
                    }
                    for data in "AB"
                )
            ]
            for messages in (pictures[0], pictures[1]):
                decision = await ask(bench, messages, x_dynctl_session="same")
                assert decision.most_held_tokens <= 32, "nothing but what stands before the image"
            again = await ask(bench, pictures[0])
            assert (again.most_held_tokens > 200) == (tokenizer is None)
            if tokenizer is not None:
                assert bench.desk.hits.to_json()["predicted_tokens"] == 0

    run(main)
