"""A short request goes its short way only as long as all is well; what the client sees never depends on it."""

import asyncio
import json
import re

import pytest
from router_bench import routed, text_of, until
from router_fakes import FakeEngine

from dynctl.router import afterwards, desk
from dynctl.router.short_flight import ShortFlight


def short_ones(bench):
    return sum(isinstance(flight, ShortFlight) for flight in bench.desk.flights)


def figures(desk):
    """What is counted, without times and without how the prompt was read."""
    counted = {}
    for line in desk.exposition().decode().splitlines():
        name, _, value = line.rpartition(" ")
        unlike = ("_sum", "_bucket", "tokenized", "start_time", "# ", "parity", "ttft_error")
        if not any(part in line for part in unlike):
            counted[name] = float(value)
    return counted


ANY_ANSWER = ["", "status:500", "status:503", "status:400", "refuse", "html", "status:302"]
STREAMS = ["cut:0", "cut:3", "error:0", "error:3", "no-done", "early-done:0", "early-done:3"]


@pytest.mark.parametrize(
    ("fault", "is_stream"),
    [(fault, False) for fault in ANY_ANSWER] + [(fault, True) for fault in ANY_ANSWER + STREAMS],
)
@pytest.mark.parametrize("is_lasting", [False, True])
def test_both_ways_give_the_same_answer_and_count_the_same(run, fault, is_stream, is_lasting):
    async def outcome(limit):
        tried = []

        def script(body):
            tried.append(body)
            return fault if is_lasting or len(tried) == 1 else None

        engines = [FakeEngine(f"e{i}", script=script) for i in range(2)]
        settings = {"short_request_chars": limit}
        async with routed(*engines, settings=settings) as bench:
            answer = await bench.client.complete(max_tokens=7, stream=is_stream)
            bench.assert_books_balance()
            how = bench.desk.metrics.tokenized
            assert how.value("short") == (limit > 0)
            decisions = json.loads(bench.desk.ring.to_json(10))
            outcomes = sorted(decision["outcome"] for decision in decisions)
            headers = {name for name, _ in answer.headers}
            # Which of two equal engines it was is chance.
            body = re.sub(rb" e[01](?=\d)", b" e", answer.body)
            return answer.status, body, headers, outcomes, len(tried), figures(bench.desk)

    async def main():
        short, full = await outcome(512), await outcome(0)
        # Blocks of text are noted on the full way only: nobody matches a short prompt.
        for found in (short, full):
            for name in [n for n in found[5] if "block" in n or 'engine="' in n]:
                del found[5][name]
        assert short == full
        if not fault:
            assert short[0] == 200

    run(main)


@pytest.mark.parametrize("num_others", [0, 20])
@pytest.mark.parametrize("num_events", [1, 2, 5, 9])
def test_a_stream_read_in_any_pieces_is_the_same_and_counted_the_same(run, num_events, num_others):
    """Its first read may hold nothing for the client yet, its first token, or all of it."""

    async def outcome(limit):
        engine = FakeEngine(script=lambda body: "stall" if body.get("seed") else None)

        async def together(exchange, body, is_chat, fault, number):
            held = _Held(exchange)
            await FakeEngine._stream(engine, held, body, is_chat, fault, number)
            assert len(held.pieces) == 9, "role, six tokens, usage, end"
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for start in range(0, 9, num_events):
                exchange.write(b"".join(held.pieces[start : start + num_events]))
                await asyncio.sleep(0.01)
            exchange.finish()

        engine._stream = together
        async with routed(engine, settings={"short_request_chars": limit}) as bench:
            others = [asyncio.create_task(bench.client.complete(seed=1)) for _ in range(num_others)]
            await until(lambda: engine.num_running == num_others)
            answer = await bench.client.chat(stream=True)
            again = await bench.client.chat(stream=True)
            assert again.body == answer.body
            decision = json.loads(bench.desk.ring.to_json(1))[0]
            assert (decision["outcome"], decision["ttft_ms"] is None) == ("done", False)
            assert len(bench.desk.flights) == num_others
            counted = figures(bench.desk)
            for other in others:
                other.cancel()
            await until(lambda: not bench.desk.flights)
            await asyncio.gather(*others, return_exceptions=True)
            bench.assert_books_balance()
            return answer.status, answer.body, counted

    async def main():
        short, full = await outcome(512), await outcome(0)
        for found in (short, full):
            # A decision that waits for its answer is counted with it; lengths of short prompts are guessed.
            late = ("block", "decision_seconds", "queue_seconds", "pending_prefill", "reserved")
            for name in [n for n in found[2] if any(part in n for part in late)]:
                del found[2][name]
        assert short == full
        assert short[0] == 200

    run(main)


_QUIET = {
    "comments": b": ping\n\n",
    "roles": b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
}


@pytest.mark.parametrize("num_at_once", [1, 500, 5000])
@pytest.mark.parametrize("kind", _QUIET)
def test_any_number_of_events_may_come_before_the_first_token(run, kind, num_at_once):
    quiet = _QUIET[kind] * 5000

    async def outcome(limit):
        engine = FakeEngine()

        async def late(exchange, body, is_chat, fault, number):
            held = _Held(exchange)
            await FakeEngine._stream(engine, held, body, is_chat, fault, number)
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for start in range(0, len(quiet), step := len(_QUIET[kind]) * num_at_once):
                piece = quiet[start : start + step]
                exchange.write(
                    piece + b"".join(held.pieces) if start + step >= len(quiet) else piece
                )
            exchange.finish()

        engine._stream = late
        async with routed(engine, settings={"short_request_chars": limit}) as bench:
            answer = await bench.client.chat(stream=True)
            assert (bench.desk.metrics.tokenized.value("short") == 1) is (limit > 0)
            bench.assert_books_balance()
            figured = figures(bench.desk)
            return answer.status, answer.body, {n: figured[n] for n in figured if "block" not in n}

    async def main():
        short, full = await outcome(512), await outcome(0)
        assert short[0] == 200
        assert short[1].startswith(quiet)
        assert text_of(short[1]) == " e00 e01 e02 e03 e04 e05"
        assert short == full

    run(main)


@pytest.mark.parametrize("kind", _QUIET)
def test_events_before_the_first_token_in_one_piece_are_held_back_whole(run, kind):
    """A read may be as large as a socket gives: here the piece is surely one."""

    async def main():
        engine = FakeEngine(script=lambda body: "stall")
        async with routed(engine) as bench:
            task = asyncio.create_task(bench.client.complete(stream=True))
            await until(lambda: short_ones(bench) == 1)
            [short] = bench.desk.flights
            await until(lambda: engine.num_running == 1)
            quiet, token = _QUIET[kind] * 5000, engine.chunk(False, "a", "stop")
            short.on_head(200, [])
            short.on_data(quiet)
            assert bench.desk.flights == {short}
            short.on_data(quiet + token + b"data: [DONE]\n\n")
            answer = await task

            assert (answer.status, answer.body) == (200, quiet * 2 + token + b"data: [DONE]\n\n")
            bench.assert_books_balance()

    run(main)


class _Held:
    """An exchange that keeps what is written."""

    def __init__(self, exchange):
        self.request, self.pieces = exchange.request, []

    def start(self, status, headers):
        pass

    def write(self, data):
        self.pieces.append(data)

    def finish(self):
        pass


@pytest.mark.source
@pytest.mark.parametrize("is_stream", [False, True])
def test_books_are_kept_before_anybody_looks_at_them(run, monkeypatch, is_stream):
    """An answer's reader comes first, but nobody sees books without what was answered."""
    monkeypatch.setattr(afterwards, "_KEEP_S", 3600.0)
    monkeypatch.setattr(desk, "_TICK_S", 3600.0)

    async def main():
        async with routed(FakeEngine("e0")) as bench:
            [worker] = bench.router.desk.workers.all()
            for number in range(1, 4):
                await bench.client.complete(stream=is_stream)
                assert worker.active_requests <= 1, "the one before is out of the books"
                served = f'requests_total{{endpoint="completions",code="200"}} {number}'
                assert served in (await bench.client.get("/metrics")).body.decode()
                assert worker.active_requests == 0
            decisions = json.loads(bench.router.desk.ring.to_json(10))
            assert [one["outcome"] for one in decisions] == ["done"] * 3
            bench.assert_books_balance()

    run(main)


@pytest.mark.parametrize("num_events", [1, 2, 5, 9])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_whose_deadlines_are_looked_at_meanwhile_is_served_once(
    run, is_stream, num_events
):
    """Before its answer, between its head and its first token, between tokens; late or not: nothing of it stays behind."""

    async def main():
        engine = FakeEngine(gap_s=0.02)
        settings = {"body_timeout_s": 1.0, "first_token_timeout_s": 3600.0}

        def look(bench):
            for flight in tuple(bench.desk.flights):
                flight.check(bench.desk.now_s() + 2.0)

        async with routed(engine, settings=settings) as bench:

            async def slowly(exchange, body, is_chat, fault, number):
                held = _Held(exchange)
                await FakeEngine._stream(engine, held, body, is_chat, fault, number)
                exchange.start(200, [(b"content-type", b"text/event-stream")])
                for start in range(0, len(held.pieces), num_events):
                    look(bench)
                    exchange.write(b"".join(held.pieces[start : start + num_events]))
                    await asyncio.sleep(0.02)
                exchange.finish()

            plain = (await bench.client.chat(stream=is_stream)).body
            engine._stream = slowly
            waiting = asyncio.create_task(bench.client.chat(stream=is_stream))
            await until(lambda: bench.desk.flights)
            look(bench)
            assert (await waiting).body == plain
            await until(lambda: not bench.desk.flights)
            bench.assert_books_balance()
            decisions = json.loads(bench.desk.ring.to_json(10))
            assert [one["outcome"] for one in decisions] == ["done", "done"]
            assert bench.desk.metrics.requests.value("chat", "200") == 2
            [worker] = bench.desk.workers.all()
            assert worker.failures_in_row == 0

    run(main)


def test_a_stream_that_stops_after_its_first_token_is_broken_off_in_time(run):
    async def main():
        engine = FakeEngine(script=lambda body: "hang:1")
        timeouts = {"gap_timeout_s": 0.2, "first_token_timeout_s": 60.0}
        async with routed(engine, settings=timeouts) as bench:
            answer = await bench.client.complete(stream=True)
            assert b'"error"' in answer.body
            assert b"[DONE]" not in answer.body
            bench.assert_books_balance()

    run(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_is_noticed_and_its_work_cancelled(run, is_stream):
    async def main():
        engine = FakeEngine(script=lambda body: "stall")
        async with routed(engine) as bench:
            task = asyncio.create_task(bench.client.complete(stream=is_stream))
            await until(lambda: engine.num_running == 1)
            assert short_ones(bench) == 1
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: engine.num_gone == 1)
            await until(lambda: not bench.desk.flights)
            bench.assert_books_balance()
            assert bench.desk.metrics.client_gone.value("main") == 1
            assert bench.desk.metrics.requests.value("completions", "499") == 1

    run(main)


def test_an_engine_that_hangs_is_given_up_at_the_deadline(run):
    async def main():
        engine = FakeEngine(script=lambda body: "stall")
        settings = {"body_timeout_s": 0.3, "first_token_timeout_s": 0.2, "max_retries": 0}
        async with routed(engine, settings=settings) as bench:
            answer = await bench.client.complete()
            assert answer.status == 504
            assert json.loads(answer.body)["error"]["code"] == "engine_timeout"
            bench.assert_books_balance()

    run(main)


def test_a_router_that_stops_cuts_short_requests_too(run):
    async def main():
        engine = FakeEngine(script=lambda body: "stall")
        async with routed(engine) as bench:
            task = asyncio.create_task(bench.client.complete())
            await until(lambda: engine.num_running == 1)
            await bench.desk.close(0.0)
            assert not bench.desk.flights
            answer = await task
            assert (answer.status, b"shutting down" in answer.body) == (503, True)

    run(main)


def test_short_requests_wait_when_there_is_no_room(run):
    async def main():
        engine = FakeEngine(gap_s=0.1)
        async with routed(engine, settings={"default_slots": 1}) as bench:
            answers = await asyncio.gather(*(bench.client.complete() for _ in range(4)))
            assert [answer.status for answer in answers] == [200] * 4
            bench.assert_books_balance()
            assert bench.desk.metrics.tokenized.value("short") == 4

    run(main)


@pytest.mark.parametrize(
    ("policy", "body", "headers"),
    [
        ("round_robin", {}, {}),
        ("least_loaded", {}, {}),
        ("kv", {"prompt": "x" * 600}, {}),
        ("kv", {"prompt": [1, 2, 3]}, {}),
        ("kv", {"prompt": ["a", "b"]}, {}),
        ("kv", {"n": 2}, {}),
        ("kv", {}, {"x_dynctl_explain": "1"}),
    ],
)
def test_what_asks_for_more_goes_the_full_way(run, policy, body, headers):
    async def main():
        engine = FakeEngine()
        engine.go.clear()
        async with routed(engine, policy=policy) as bench:
            full = {"model": "tiny", "prompt": "hello", **body}
            task = asyncio.create_task(bench.client.post("/v1/completions", full, **headers))
            await until(lambda: bench.desk.flights)
            assert short_ones(bench) == 0
            engine.go.set()
            assert (await task).status == 200

    run(main)


def test_with_pools_a_short_request_goes_the_full_way(run):
    async def main():
        engines = [FakeEngine("p", role="prefill"), FakeEngine("d", role="decode")]
        engines[1].go.clear()
        async with routed(*engines) as bench:
            task = asyncio.create_task(bench.client.complete())
            await until(lambda: bench.desk.flights)
            assert short_ones(bench) == 0
            engines[1].go.set()
            assert (await task).status in {200, 502}
            bench.assert_books_balance()

    run(main)


def test_load_decides_and_the_decision_can_be_made_again(run):
    async def main():
        engines = [FakeEngine(f"e{i}") for i in range(8)]
        async with routed(*engines) as bench:
            for _ in range(10):
                for engine in engines:
                    engine.go.clear()
                calls = [asyncio.create_task(bench.client.complete()) for _ in range(40)]
                await until(lambda: sum(engine.num_running for engine in engines) == 40)
                for engine in engines:
                    engine.go.set()
                answers = await asyncio.gather(*calls)
                assert all(answer.status == 200 for answer in answers)
            taken = [len(engine.requests) for engine in engines]
            assert sum(taken) == 400
            # Two choices among 8 at a load of 5 each; one choice alone would often give 1.4.
            assert max(taken) <= 1.25 * 50
            ring = bench.desk.ring._ring
            assert len(ring) == 400
            for decision in ring:
                assert decision.recompute() == decision.position
                assert len(decision.loads) == 2
                assert decision.loads[0].engine != decision.loads[1].engine
            shown = json.loads(bench.desk.ring.to_json(1))[0]
            assert (shown["policy"], shown["outcome"]) == ("short", "done")
            assert shown["is_tokenized"] is False

    run(main)


def test_a_busy_engine_is_left_alone(run):
    async def main():
        engines = [FakeEngine("e0"), FakeEngine("e1")]
        async with routed(*engines) as bench:
            held = [bench.desk.workers.get("e0").book(10, 10, 10) for _ in range(5)]
            for _ in range(12):
                await bench.client.complete()
            assert len(engines[0].requests) == 0
            assert len(engines[1].requests) == 12
            for booking in held:
                booking.release()

    run(main)
