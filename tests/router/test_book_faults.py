"""What fails while books are kept harms no client: not the request's own, not another's, and no drain."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from router_bench import routed, text_of, until
from router_clock import JumpingLoop
from router_fakes import MODEL, FakeEngine

from dynctl.router.api.streams import StreamFollower, read_answer
from dynctl.router.flight import Flight

STRANGE = [b"1" + b"0" * 400, b"-5", b"1e3", b"1e999", b"99999999999999999999999", b"2147483648"]


def fail(*_, **__):
    raise RuntimeError("a fault of ours")


async def each_way(client):
    """A short and a long request, streamed and not."""
    bodies = [{"prompt": text, "stream": s} for text in ("x", "x" * 2000) for s in (False, True)]
    return [await client.complete(**body) for body in bodies]


@pytest.mark.source
@pytest.mark.parametrize("book", ["lengths", "prompt_tokens", "output_tokens"])
def test_a_book_that_cannot_be_kept_fails_no_request_and_no_drain(run, book, caplog):
    async def main():
        async with routed(FakeEngine("e0")) as bench:
            desk = bench.desk
            if book == "lengths":
                desk.workers.lengths.learn = fail
            else:
                setattr(desk.metrics, book, SimpleNamespace(add=fail))
            answers = [*await each_way(bench.client), *await each_way(bench.client)]
            assert [answer.status for answer in answers] == [200] * 8
            assert (await bench.client.get("/metrics")).status == 200
            bench.assert_books_balance()
            assert desk.metrics.book_faults.value() >= 8
            assert "could not be kept" in caplog.text
            # And one whose books are still to be kept when the router ends.
            assert (await bench.client.complete()).status == 200
            assert bench.router.desk.flights
            await asyncio.wait_for(bench.router.desk.close(100), 30)
            assert not bench.router.desk.flights

    run(main)


@pytest.mark.source
def test_deadlines_that_cannot_be_looked_at_harm_no_other_request_and_no_drain(run):
    async def main():
        engine = FakeEngine("e0", script=lambda body: "stall")
        settings = {"body_timeout_s": 0.3, "first_token_timeout_s": 0.2, "max_retries": 0}
        async with routed(engine, settings=settings) as bench:
            desk = bench.desk
            broken = Mock(check=Mock(side_effect=fail), abandon=Mock(side_effect=fail))
            desk.flights.add(broken)
            assert (await bench.client.complete()).status == 504
            assert not desk.flights
            assert desk.metrics.book_faults.value() == 1
            bench.assert_books_balance()

    run(main)


@pytest.mark.source
@pytest.mark.parametrize("method", ["resume", "expire"])
def test_whoever_cannot_be_served_in_turn_keeps_nobody_behind_waiting(monkeypatch, method):
    async def main():
        engine = FakeEngine()
        settings = {"max_requests_per_engine": 1, "queue_timeout_s": 1.0, "max_retries": 0}
        async with routed(engine, settings=settings) as bench:
            desk = bench.desk
            engine.go.clear()
            running = asyncio.create_task(bench.client.complete())
            await until(lambda: engine.num_running)
            waiting = []
            for number in (1, 2):
                waiting.append(asyncio.create_task(bench.client.complete()))
                await until(lambda number=number: len(desk.line) == number)
            first, _ = desk.line.in_order(MODEL, desk.loop.time())
            real = getattr(Flight, method)

            def once(flight, *args):
                return fail() if flight is first else real(flight, *args)

            monkeypatch.setattr(Flight, method, once)
            if method == "expire":
                await until(lambda: not len(desk.line))
            engine.go.set()
            statuses = [(await one).status for one in (running, *waiting)]
            assert statuses == [200, 500, 200 if method == "resume" else 503]
            assert desk.metrics.errors.value("internal") == 1
            assert desk.metrics.book_faults.value() == 0
            bench.assert_books_balance()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("number", STRANGE)
@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens":3,"completion_tokens":%b}',
        b'{"prompt_tokens":%b}',
        b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":%b}}',
    ],
)
def test_numbers_that_cannot_be_counts_are_no_usage_and_no_fault(number, usage):
    told = usage % number
    answer = read_answer(b'{"choices":[{"text":"x"}],"usage":%b}' % told)
    assert (answer.fault, answer.usage) == ("", None)

    event = b'data: {"choices":[{"text":"x","finish_reason":"stop"}]%b}\n\n'
    own = b'data: {"choices":[],"usage":%b}\n\n' % told
    end = b"data: [DONE]\n\n"
    follower = StreamFollower(hides_usage=True)
    both = follower.feed(event % (b',"usage":' + told)) + follower.feed(own) + follower.feed(end)
    assert both == event % b"" + end, "what nobody asked for is cut out whatever it says"
    assert (follower.is_done, follower.broken, follower.usage) == (True, "", None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_gets_its_answer_whatever_its_engine_counts(run, is_stream):
    async def main():
        engine = FakeEngine("e0", tokens=3)
        counted = engine.usage()
        engine.usage = lambda: counted | {"completion_tokens": 10**400}
        async with routed(engine) as bench:
            for text in ("x", "x" * 2000):
                answer = await bench.client.complete(prompt=text, stream=is_stream)
                assert answer.status == 200
                if is_stream:
                    assert text_of(answer.body) == " e00 e01 e02"
            bench.assert_books_balance()
            assert bench.desk.metrics.output_tokens.value() == 0
            assert bench.desk.metrics.book_faults.value() == 0

    run(main)
