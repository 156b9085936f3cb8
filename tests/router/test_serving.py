"""Requests through a router to scripted engines, over real sockets."""

import asyncio
import json

from router_bench import events, routed, text_of, until
from router_fakes import MODEL, FakeEngine

from dynctl.http1.upstream import Address, Upstream, UpstreamLimits


def test_whole_answers_pass_byte_for_byte(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine) as bench:
            answer = await bench.client.complete(max_tokens=6)

            assert answer.status == 200
            assert answer.body == json.dumps(engine._whole(False)).encode()
            assert dict(answer.headers)[b"x-request-id"]
            bench.assert_books_balance()

    run(main)


def test_a_stream_passes_and_usage_nobody_asked_for_is_cut_out(run):
    async def main():
        async with routed(FakeEngine()) as bench:
            plain = await bench.client.chat(stream=True)
            asked = await bench.client.chat(stream=True, stream_options={"include_usage": True})

            assert text_of(plain.body) == "".join(f" e0{i}" for i in range(6))
            assert events(plain.body)[-1] == b"[DONE]"
            assert b"usage" not in plain.body
            assert json.loads(events(asked.body)[-2])["usage"]["completion_tokens"] == 6
            assert bench.engines[0].requests[0]["stream_options"] == {"include_usage": True}
            assert bench.desk.metrics.output_tokens.value() == 12
            bench.assert_books_balance()

    run(main)


def test_a_stream_cut_at_any_byte_comes_out_the_same(run):
    async def main():
        for size in (1, 2, 3, 7, 50):
            engine = FakeEngine()
            engine.split = lambda data, n=size: [data[i : i + n] for i in range(0, len(data), n)]
            async with routed(engine) as bench:
                body = (await bench.client.chat(stream=True)).body
                whole = await bench.client.chat(stream=True)

            assert body == whole.body
            assert text_of(body) == "".join(f" e0{i}" for i in range(6))

    run(main)


def test_an_engine_that_dies_before_the_first_byte_is_replaced(run):
    async def main():
        for fault in ("refuse", "status:500", "cut:0", "html", "error:0", "early-done:0"):
            bad = FakeEngine("bad", script=lambda body, f=fault: f)
            async with routed(bad, FakeEngine("good")) as bench:
                for _ in range(16):
                    answer = await bench.client.complete(stream=True)
                    assert answer.status == 200, fault
                    assert text_of(answer.body).startswith(" good0"), fault
                    assert events(answer.body)[-1] == b"[DONE]"
                assert bench.desk.metrics.requests.value("completions", "200") == 16
                assert len(bench.engines[0].requests) >= 1, "random among equals never tried it"
                bench.assert_books_balance()

    run(main)


def test_a_stream_that_breaks_ends_in_one_error_event_and_never_done(run):
    async def main():
        for fault in ("cut:3", "error:3", "no-done", "early-done:3"):
            engine = FakeEngine(script=lambda body, f=fault: f)
            async with routed(
                engine, FakeEngine("spare", role="aggregated", script=lambda b: "status:500")
            ) as bench:
                while True:
                    answer = await bench.client.complete(stream=True)
                    if answer.status == 200:
                        break

                data = events(answer.body)
                assert answer.status == 200
                assert b"[DONE]" not in answer.body, fault
                assert [b"error" in d for d in data].count(True) == 1
                assert json.loads(data[-1])["error"]["code"] == "stream_broken"
                assert sum(bench.desk.metrics.stream_broken._values.values()) == 1
                bench.assert_books_balance()

    run(main)


def test_an_engines_refusal_goes_to_the_client_without_a_retry_and_without_addresses(run):
    async def main():
        engines = [FakeEngine(f"e{i}", script=lambda body: "status:400") for i in range(2)]
        async with routed(*engines) as bench:
            answer = await bench.client.complete()

            error = json.loads(answer.body)["error"]
            assert answer.status == 400
            assert "10.1.2.3" not in error["message"]
            assert "/srv" not in error["message"]
            assert sum(len(e.requests) for e in engines) == 1
            bench.assert_books_balance()

    run(main)


def test_a_saturated_engine_is_left_alone_for_a_while(run):
    async def main():
        busy = FakeEngine("busy", script=lambda body: "status:503")
        async with routed(busy, FakeEngine("free")) as bench:
            while not busy.requests:  # of two that are alike chance takes one
                assert (await bench.client.complete()).status == 200
            for _ in range(8):
                assert (await bench.client.complete()).status == 200

            assert len(busy.requests) == 1
            assert bench.desk.workers.get("busy").failures_in_row == 0

    run(main)


def test_only_retries_within_the_budget_then_the_client_hears_it(run):
    async def main():
        engines = [FakeEngine(f"e{i}", script=lambda body: "refuse") for i in range(5)]
        async with routed(*engines) as bench:
            answer = await bench.client.complete()

            assert answer.status == 502
            assert json.loads(answer.body)["error"]["code"] == "engine_failure"
            assert sum(len(e.requests) for e in engines) == 3
            bench.assert_books_balance()

    run(main)


def test_a_client_that_leaves_is_cancelled_upstream_in_every_phase(run):
    async def main():
        engine = FakeEngine(tokens=1000, gap_s=0.01)
        stalled = FakeEngine("e1", script=lambda body: "stall")
        for target, body in (
            (engine, {"stream": True}),
            (stalled, {"stream": False}),
            (stalled, {"stream": True}),
        ):
            async with routed(target) as bench:
                call = asyncio.create_task(bench.client.complete(**body))
                await until(lambda t=target: t.num_running == 1)
                if target is engine:
                    await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.wait([call])
                await until(lambda t=target: t.num_running == 0)

                assert target.num_gone == 1
                await until(lambda b=bench: not b.desk.flights)
                bench.assert_books_balance()
                target.num_gone = 0

    run(main)


def test_requests_wait_for_room_and_leave_the_queue_when_time_is_over(run):
    async def main():
        engine = FakeEngine()
        settings = {"default_slots": 1, "queue_timeout_s": 2.0}
        async with routed(engine, settings=settings) as bench:
            engine.go.clear()
            calls = [asyncio.create_task(bench.client.complete()) for _ in range(4)]
            await until(lambda: engine.num_running == 1 and len(bench.desk.line) == 3)
            engine.go.set()
            engine.go.clear()  # for one answer
            await until(lambda: sum(call.done() for call in calls) == 3)
            engine.go.set()
            answers = await asyncio.gather(*calls)

            codes = sorted(answer.status for answer in answers)
            assert codes == [200, 200, 503, 503]
            late = next(a for a in answers if a.status == 503)
            assert json.loads(late.body)["error"]["code"] == "queue_timeout"
            assert dict(late.headers)[b"retry-after"]
            bench.assert_books_balance()

    run(main)


def test_a_client_that_leaves_the_queue_is_out_at_once(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, settings={"default_slots": 1}) as bench:
            engine.go.clear()
            first = asyncio.create_task(bench.client.complete())
            await until(lambda: engine.num_running == 1)
            second = asyncio.create_task(bench.client.complete())
            await until(lambda: len(bench.desk.line) == 1)
            second.cancel()
            await asyncio.wait([second])
            await until(lambda: not len(bench.desk.line))

            engine.go.set()
            assert (await first).status == 200
            assert len(engine.requests) == 1
            assert bench.desk.metrics.client_gone.value("queued") == 1
            bench.assert_books_balance()

    run(main)


def test_a_full_queue_refuses_at_once(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, settings={"default_slots": 1, "queue_limit": 1}) as bench:
            engine.go.clear()
            calls = [asyncio.create_task(bench.client.complete()) for _ in range(5)]
            await until(lambda: sum(call.done() for call in calls) == 3)
            engine.go.set()
            answers = await asyncio.gather(*calls)

            assert sorted(a.status for a in answers) == [200, 200, 503, 503, 503]

    run(main)


def test_without_any_engine_the_answer_is_503_with_retry_after(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, served_names=(MODEL,)) as bench:
            assert (await bench.client.get("/health")).status == 200
            await engine.stop()
            await until(lambda: not bench.desk.can_serve())

            assert (await bench.client.get("/health")).status == 503
            bench.desk.fleet.lost("e0", "e0")
            answer = await bench.client.complete()
            assert answer.status == 503
            assert json.loads(answer.body)["error"]["code"] == "no_engine"
            assert dict(answer.headers)[b"retry-after"]

    run(main)


def test_an_engine_that_hangs_is_given_up_at_the_deadline(run):
    async def main():
        hung = FakeEngine("hung", script=lambda body: "stall")
        mute = FakeEngine("mute", script=lambda body: "hang:2")
        settings = {"first_token_timeout_s": 0.3, "gap_timeout_s": 0.3, "body_timeout_s": 0.3}
        async with routed(hung, settings=settings) as bench:
            answer = await bench.client.complete(stream=True)
            assert answer.status == 504
            bench.assert_books_balance()
        async with routed(mute, settings=settings | {"first_token_timeout_s": 60}) as bench:
            answer = await bench.client.complete(stream=True)
            assert b"[DONE]" not in answer.body
            assert json.loads(events(answer.body)[-1])["error"]["code"] == "stream_broken"
            await until(lambda: mute.num_gone == 1)
            bench.assert_books_balance()

    run(main)


def test_two_thousand_streams_at_once_are_all_served_half_of_them_after_waiting(run):
    """However long a busy machine takes for so many connections."""
    patient = {"queue_timeout_s": 300, "first_token_timeout_s": 300, "gap_timeout_s": 300}
    patient |= {"default_slots": 250, "connect_timeout_s": 300, "engine_poll_s": 60}
    body = json.dumps({"model": MODEL, "prompt": "hello", "stream": True}).encode()

    async def main():
        engines = [FakeEngine(f"e{i}", tokens=3) for i in range(4)]
        async with routed(*engines, settings=patient) as bench:
            for engine in engines:
                engine.go.clear()
            limits = UpstreamLimits(max_connections=2000, connect_timeout_s=300)
            many = Upstream(Address(host="127.0.0.1", port=bench.router.port), limits)
            json_ = ((b"content-type", b"application/json"),)
            calls = [
                asyncio.create_task(
                    many.fetch("POST", "/v1/completions", json_, body, timeout_s=300)
                )
                for _ in range(2000)
            ]
            await until(lambda: len(bench.desk.line) == 1000, timeout_s=140)
            await until(lambda: [engine.num_running for engine in engines] == [250] * 4, 140)
            for engine in engines:
                engine.go.set()
            answers = await asyncio.gather(*calls)

            assert {answer.status for answer in answers} == {200}
            assert all(events(answer.body)[-1] == b"[DONE]" for answer in answers)
            assert max(engine.most_running for engine in engines) == 250
            bench.assert_books_balance()
            await many.close()

    run(main)
