"""Who waits is served by class, deadline and arrival; rises with time; and a router takes no more at once than it is to."""

import asyncio
import hashlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_bench import routed, until
from router_fakes import FakeEngine

from dynctl.errors import UsageError
from dynctl.http1.request import Request
from dynctl.router.admission import WaitingLine
from dynctl.router.config import ApiKeyHash, EngineTarget, RouterConfig, check_config
from dynctl.router.orders import deadline_s, level_of
from dynctl.router.shared_books import SharedBooks, clear_share, make_books
from dynctl.router.turns import CLASSES, Turns
from dynctl.router.worker_table import WorkerTable

HIGH, NORMAL, LOW = range(3)
AGEING_S = 5.0


def head(**fields):
    names = {"priority": b"x-dynctl-priority", "deadline": b"x-dynctl-deadline-ms"}
    headers = tuple((names[name], value) for name, value in fields.items())
    return Request("POST", b"/", "/", b"", headers)


# The order

waiting = st.lists(
    st.tuples(
        st.sampled_from(range(len(CLASSES))),
        st.integers(0, 40),
        st.one_of(st.none(), st.integers(0, 40)),
        st.booleans(),
    ),
    max_size=30,
)


@given(waiting, st.integers(40, 80))
def test_the_order_is_class_less_what_was_waited_then_deadline_then_arrival(items, now_s):
    turns, left = Turns(AGEING_S), []
    for number, (level, arrived_s, patience_s, stays) in enumerate(items):
        until_s = arrived_s + (100 if patience_s is None else patience_s)
        turns.add(number, level, arrived_s, until_s)
        # Looked at in between, too: rising is not noticed only at the end.
        turns.in_order(arrived_s)
        if stays:
            risen = (now_s - arrived_s) // AGEING_S
            left.append((level - risen, until_s, arrived_s, number))
    for number, (*_, stays) in enumerate(items):
        if not stays:
            turns.remove(number)
            turns.remove(number)

    assert turns.in_order(now_s) == [number for *_, number in sorted(left)]
    assert len(turns) == len(left)


@given(
    st.sampled_from(range(3)), st.sampled_from(range(3)), st.floats(0.0, 60.0), st.floats(0.0, 60.0)
)
def test_nobody_is_overtaken_by_what_comes_later_than_the_bound(level, other, later_s, looked_s):
    """However urgent that is, and however close its deadline."""
    bound_s = (max(level - other, 0) + 1) * AGEING_S
    turns = Turns(AGEING_S)
    turns.add("first", level, 0.0, 1000.0)
    turns.add("second", other, bound_s + later_s, bound_s + later_s)

    assert turns.in_order(bound_s + later_s + looked_s)[0] == "first"


def test_low_is_served_within_its_bound_though_high_never_ends():
    """An engine that serves one a second, and a high request every second."""
    turns, served = Turns(AGEING_S), {}
    turns.add("low", LOW, 0.0, 1000.0)
    for second in range(40):
        turns.add(second, HIGH, float(second), second + 1000.0)
        chosen = turns.in_order(float(second))[0]
        turns.remove(chosen)
        served[chosen] = second

    assert served["low"] == 2 * AGEING_S


def test_without_ageing_a_higher_class_always_goes_first():
    turns = Turns(0.0)
    turns.add("low", LOW, 0.0, 1e9)
    turns.add("high", HIGH, 1e6, 1e9)

    assert turns.in_order(1e7) == ["high", "low"]


def test_models_wait_apart_and_are_bounded_together():
    line = WaitingLine(3, 10.0, AGEING_S)
    assert line.join("a", "m", LOW, 0.0, None) is None
    assert line.join("b", "m", HIGH, 1.0, None) is None
    assert line.join("c", None, NORMAL, 1.0, None) is None
    assert line.join("d", None, HIGH, 1.0, None).code == "queue_full"
    assert line.join("a", "m", LOW, 0.0, None) is None, "who is in it stays in it"

    assert (len(line), line.in_order("m", 1.0), line.in_order(None, 1.0)) == (3, ["b", "a"], ["c"])
    line.leave("c")
    line.leave("c")
    assert (line.models(), line.has_waiting(None)) == (["m"], False)


def test_a_deadline_ends_the_wait_before_the_queue_does_and_never_after_it():
    line = WaitingLine(10, 10.0, AGEING_S)
    line.join("hasty", "m", NORMAL, 0.0, 2.0)
    line.join("patient", "m", NORMAL, 0.0, 60.0)
    line.join("plain", "m", NORMAL, 0.0, None)
    assert line.in_order("m", 1.0) == ["hasty", "patient", "plain"]

    assert line.lateness("hasty", 1.9) is None
    assert line.lateness("hasty", 2.0).status == 504
    assert [(who, why.code) for who, why in line.expired(2.0)] == [("hasty", "deadline_passed")]
    assert {why.code for _, why in line.expired(10.0)} == {"queue_timeout"}
    assert len(line) == 0


# What requests say


@pytest.mark.parametrize(
    ("given_", "top", "level"),
    [
        (b"high", HIGH, HIGH),
        (b"LOW", HIGH, LOW),
        (b"high", LOW, LOW),
        (b"high", NORMAL, NORMAL),
        (b"low", NORMAL, LOW),
        (b"urgent", HIGH, NORMAL),
        (b"\xff", HIGH, NORMAL),
        (b"", LOW, LOW),
    ],
)
def test_a_class_is_what_is_asked_for_and_allowed_else_normal(given_, top, level):
    assert level_of(head(priority=given_), top) == level
    assert level_of(head(), HIGH) == NORMAL


@pytest.mark.parametrize(
    ("given_", "seconds"),
    [(b"1500", 1.5), (b"0", 0.0), (b"-1", None), (b"1.5", None), (b"x", None), (b"9" * 30, None)],
)
def test_a_deadline_is_a_whole_number_of_milliseconds_or_none(given_, seconds):
    assert deadline_s(head(deadline=given_)) == seconds
    assert deadline_s(head()) is None


def test_a_key_with_an_unknown_class_is_refused():
    config = RouterConfig(
        listen="127.0.0.1:0",
        engines=(EngineTarget("e", "http://127.0.0.1:1"),),
        api_keys=(ApiKeyHash("k", "00", "urgent"),),
    )
    with pytest.raises(UsageError, match="API key k: no priority 'urgent'"):
        check_config(config)


# Through a router


def ask(bench, prompt, **headers):
    body = {"model": "tiny", "prompt": prompt}
    return asyncio.create_task(bench.client.post("/v1/completions", body, **headers))


async def queue_up(bench, engine, asked):
    """One request on the engine, the others behind it in the order given; returns their tasks."""
    engine.go.clear()
    tasks = [ask(bench, "first")]
    await until(lambda: engine.num_running == 1)
    for number, (prompt, headers) in enumerate(asked, 1):
        tasks.append(ask(bench, prompt, **headers))
        await until(lambda n=number: len(bench.desk.line) == n)
    return tasks


def test_urgent_requests_overtake_and_everybody_is_served(run):
    async def main():
        engine = FakeEngine()
        settings = {"default_slots": 1, "queue_timeout_s": 100, "priority_ageing_s": 100}
        async with routed(engine, settings=settings) as bench:
            asked = [
                ("low", {"x_dynctl_priority": "low"}),
                ("plain", {}),
                ("hasty", {"x_dynctl_deadline_ms": "90000"}),
                ("odd", {"x_dynctl_priority": "at once", "x_dynctl_deadline_ms": "soon"}),
                ("high", {"x_dynctl_priority": "high"}),
            ]
            tasks = await queue_up(bench, engine, asked)
            engine.go.set()
            answers = await asyncio.gather(*tasks)

            assert {answer.status for answer in answers} == {200}
            served = [request["prompt"] for request in engine.requests]
            assert served == ["first", "high", "hasty", "plain", "odd", "low"]
            assert not any(name.startswith(b"x-dynctl") for h in engine.headers for name in h)
            bench.assert_books_balance()

    run(main)


def test_in_a_full_queue_the_last_of_a_lower_class_makes_room(run):
    async def main():
        engine = FakeEngine()
        settings = {"default_slots": 1, "queue_timeout_s": 100, "queue_limit": 2}
        async with routed(engine, settings=settings | {"priority_ageing_s": 0}) as bench:
            low = {"x_dynctl_priority": "low"}
            first, one, other = await queue_up(bench, engine, [("one", low), ("other", low)])
            plain = ask(bench, "plain")
            refused = await other
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (
                503,
                "queue_full",
            )
            # Nobody makes room for his own class or a lower one.
            assert (await ask(bench, "third", **low)).status == 503
            high = ask(bench, "high", x_dynctl_priority="high")
            assert (await one).status == 503
            assert (await ask(bench, "more")).status == 503
            engine.go.set()
            answers = await asyncio.gather(first, plain, high)

            assert [answer.status for answer in answers] == [200] * 3
            served = [request["prompt"] for request in engine.requests]
            assert served == ["first", "high", "plain"]
            bench.assert_books_balance()

    run(main)


def test_who_asks_is_told_its_place_in_the_queue(run):
    async def main():
        engine = FakeEngine()
        settings = {"default_slots": 1, "queue_timeout_s": 100, "priority_ageing_s": 100}
        async with routed(engine, settings=settings) as bench:
            explain = {"x_dynctl_explain": "1"}
            asked = [
                ("one", explain),
                ("two", {}),
                ("three", explain),
                ("high", explain | {"x_dynctl_priority": "high"}),
            ]
            tasks = await queue_up(bench, engine, asked)
            engine.go.set()
            answers = await asyncio.gather(*tasks)

            places = [dict(answer.headers).get(b"x-dynctl-queue-position") for answer in answers]
            assert places == [None, b"1", None, b"3", b"1"], "as it was when each began to wait"

    run(main)


@pytest.mark.parametrize(("limit", "slots", "most"), [(3, 50, 3), (3, 2, 2), (0, 4, 4)])
def test_an_engine_gets_no_more_than_the_limit_at_once_and_the_rest_is_served_later(
    run, limit, slots, most
):
    async def main():
        engine = FakeEngine()
        settings = {
            "max_requests_per_engine": limit,
            "default_slots": slots,
            "queue_timeout_s": 100,
        }
        async with routed(engine, settings=settings) as bench:
            engine.go.clear()
            tasks = [ask(bench, f"{number}") for number in range(12)]
            await until(lambda: len(bench.desk.line) == 12 - most)
            await until(lambda: engine.num_running == most)
            engine.go.set()
            answers = await asyncio.gather(*tasks)

            assert {answer.status for answer in answers} == {200}
            assert engine.most_running == most
            bench.assert_books_balance()

    run(main)


def test_a_key_bounds_what_its_requests_may_ask_for(run):
    async def main():
        engine = FakeEngine()
        keys = tuple(
            ApiKeyHash(name, hashlib.sha256(name.encode()).hexdigest(), priority)
            for name, priority in (("batch", "low"), ("chat", "high"))
        )
        settings = {"default_slots": 1, "queue_timeout_s": 100, "priority_ageing_s": 100}
        async with routed(engine, settings=settings, api_keys=keys) as bench:
            batch = {"authorization": "Bearer batch", "x_dynctl_priority": "high"}
            chat = {"authorization": "Bearer chat"}
            engine.go.clear()
            tasks = [ask(bench, "first", **chat)]
            await until(lambda: engine.num_running == 1)
            for number, fields in enumerate((batch, chat), 1):
                tasks.append(ask(bench, f"{number}", **fields))
                await until(lambda n=number: len(bench.desk.line) == n)
            engine.go.set()
            await asyncio.gather(*tasks)

            assert [request["prompt"] for request in engine.requests] == ["first", "2", "1"]

    run(main)


def test_a_request_whose_deadline_passes_while_it_waits_is_told_and_never_sent(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, settings={"default_slots": 1, "queue_timeout_s": 100}) as bench:
            [first] = await queue_up(bench, engine, [])
            # Nobody looks whether it waits: it may have left before that.
            answer = await ask(bench, "late", x_dynctl_deadline_ms="50")
            engine.go.set()
            await first

            assert answer.status == 504
            assert json.loads(answer.body)["error"]["code"] == "deadline_passed"
            assert [request["prompt"] for request in engine.requests] == ["first"]
            assert bench.desk.metrics.errors.value("deadline") == 1
            bench.assert_books_balance()

    run(main)


@pytest.mark.source
def test_who_comes_does_not_take_the_room_that_others_wait_for(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, settings={"default_slots": 1, "queue_timeout_s": 100}) as bench:
            tasks = await queue_up(bench, engine, [("waiting", {})])
            # Room that nobody has noticed yet, as in the turn of the loop in which an answer ends.
            worker = bench.desk.workers.get("e0")
            worker.slots = 2
            worker.changed()
            held = bench.desk._pump = bench.desk.loop.call_later(3600, lambda: None)
            tasks.append(ask(bench, "fresh"))
            await until(lambda: len(bench.desk.line) == 2)
            held.cancel()
            bench.desk._pump = None
            bench.desk.pump_soon()
            await until(lambda: len(engine.requests) == 2)
            assert engine.requests[1]["prompt"] == "waiting"
            engine.go.set()
            await asyncio.gather(*tasks)

    run(main)


def test_no_more_than_the_limit_are_under_way_and_the_others_are_told_to_come_again(run):
    async def main():
        engines = [FakeEngine("e0"), FakeEngine("e1")]
        async with routed(*engines, settings={"max_concurrent_requests": 5}) as bench:
            for engine in engines:
                engine.go.clear()
            tasks = [ask(bench, "x" * size) for size in (10, 1000) * 10]
            await until(lambda: sum(task.done() for task in tasks) == 15)
            assert len(bench.desk.flights) == 5
            for engine in engines:
                engine.go.set()
            answers = await asyncio.gather(*tasks)

            assert sorted(answer.status for answer in answers) == [200] * 5 + [429] * 15
            refused = next(answer for answer in answers if answer.status == 429)
            assert json.loads(refused.body)["error"]["type"] == "rate_limit_error"
            assert dict(refused.headers)[b"retry-after"] == b"1"
            assert bench.desk.metrics.requests.value("completions", "429") == 15
            assert bench.desk.metrics.errors.value("at_capacity") == 15
            # What is over makes room again.
            assert (await bench.client.complete()).status == 200
            bench.assert_books_balance()

    run(main)


@pytest.mark.parametrize("short_request_chars", [512, 0])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_pipelined_request_finds_the_room_of_the_one_before_it(
    run, is_stream, short_request_chars
):
    async def main():
        settings = {"max_concurrent_requests": 1, "short_request_chars": short_request_chars}
        async with routed(FakeEngine(), settings=settings) as bench:
            body = json.dumps({"model": "tiny", "prompt": "x", "stream": is_stream}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            one = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
            last = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.router.port)
            writer.write(one * 3 + last)
            answers = await reader.read()
            writer.close()
            await writer.wait_closed()

            statuses = [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]
            assert statuses == [b"200", b"200", b"200", b"404"]
            assert bench.desk.metrics.requests.value("completions", "200") == 3
            bench.assert_books_balance()

    run(main)


def test_the_limit_counts_what_other_processes_of_the_port_have(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, settings={"max_concurrent_requests": 3}) as bench:
            desk, memory = bench.desk, make_books(2)
            desk.books = SharedBooks(memory, 0, 2, desk.workers)
            other = SharedBooks(memory, 1, 2, WorkerTable(desk.settings))
            try:
                other.under_way(2)
                engine.go.clear()
                first = ask(bench, "first")
                await until(lambda: engine.num_running == 1)
                assert other.others_under_way() == 1
                assert (await bench.client.complete()).status == 429
                # A process that died has nothing under way.
                clear_share(memory, 1)
                second = ask(bench, "second")
                await until(lambda: engine.num_running == 2)
                engine.go.set()
                assert [(await task).status for task in (first, second)] == [200, 200]
                assert other.others_under_way() == 0
            finally:
                other.close()
                os.close(memory)

    run(main)
