"""Wherever the router's own code raises: that request ends, its client hears of it at once, and nothing of it is left."""

import asyncio
import inspect
import json
import threading

import pytest
from router_bench import routed, text_of, until
from router_clock import JumpingLoop
from router_fakes import FakeEngine

from dynctl.router import admin, doers, prober, tokens
from dynctl.router.api.streams import StreamFollower
from dynctl.router.attempts import Attempts
from dynctl.router.bookings import Booking
from dynctl.router.desk import Desk
from dynctl.router.flight import Flight
from dynctl.router.handoff import Handoff
from dynctl.router.ledger import Ledger
from dynctl.router.legs import LegSink
from dynctl.router.placement import Placement
from dynctl.router.prompt import Prompt
from dynctl.router.reply import Reply
from dynctl.router.short_flight import ShortFlight
from dynctl.router.sources.route import Route
from dynctl.router.tokens import ModelTokenizer, PromptTokens, Tokenized
from dynctl.router.transfer_cost import Links
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker
from dynctl.sim.options import MODEL_DIR

pytestmark = pytest.mark.source

KINDS = (
    *(Attempts, Booking, Flight, Handoff, Ledger, LegSink, Links, Placement, Prompt, PromptTokens),
    *(Reply, Route, ShortFlight, StreamFollower, Tokenized, Worker, WorkerTable, doers),
)
TRUSTED = {
    *(Flight.abandon, ShortFlight.abandon, Ledger.give_back, Reply.give_up),
    *(Booking.prefill_here, Booking.prefill_ended, Booking.release),
    *(Worker.changed, Worker.released),
}
"""What ends a request that has failed, and the sums themselves."""

LONG = "a long prompt, which takes the long way through the router"
SETTINGS = {"short_request_chars": 40, "max_retries": 1, "engine_poll_s": 3600.0}
SOON_S = 1.0


class Fault:
    """Fails a method the first time it is called from now on."""

    def __init__(self, patch, kind, name):
        self.has_struck = False
        real = getattr(kind, name)

        def once(*args, **kwargs):
            if not self.has_struck:
                self.has_struck = True
                raise RuntimeError("a fault of ours")
            return real(*args, **kwargs)

        patch.setattr(kind, name, once)
        for action, doer in doers.DOERS.items():
            if doer is real:
                patch.setitem(doers.DOERS, action, once)


def on_jumping_loop(main):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        # Receivers that fail are reported there.
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.run(main())


async def what_became_of(bench, prompt, *, is_stream):
    """What a client got, in a word: a whole answer, an error, a stream ended by one, or a connection cut."""
    began_s = asyncio.get_running_loop().time()
    try:
        answer = await bench.client.complete(prompt=prompt, stream=is_stream)
    except Exception as error:
        return error.kind
    finally:
        assert asyncio.get_running_loop().time() - began_s < SOON_S
    if answer.status != 200:
        assert json.loads(answer.body)["error"]["code"] == "internal"
        return str(answer.status)
    if not is_stream or answer.body.endswith(b"data: [DONE]\n\n"):
        assert not is_stream or len(text_of(answer.body).split()) == 6
        return "done"
    assert json.loads(answer.body.split(b"data: ")[-1])["error"]["code"] == "internal"
    return "broken"


async def assert_nothing_left(bench):
    desk = bench.desk
    await until(lambda: not desk.flights)
    bench.assert_books_balance()
    for worker in desk.workers.all():
        assert worker.pending_prefills == 0
        assert worker.room.booked_tokens == 0
        assert worker.failures_in_row == 0, "no engine is to blame"
    for route in desk.fleet.routes.values():
        await until(lambda pool=route.upstream: pool.num_active == 0)
    assert not any(port.moves for port in desk.placement.links._ports.values())
    assert not desk.metrics.engine_failures._values


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")], ids=["one", "pools"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_wherever_our_code_raises_the_client_is_told_and_nothing_is_left(monkeypatch, kind, roles):
    names = [
        name
        for name, one in vars(kind).items()
        if inspect.isfunction(one)
        and one.__module__ == kind.__dict__.get("__module__", kind.__name__)
        and name != "__repr__"
        and one not in TRUSTED
    ]
    became = []

    async def main():
        engines = [FakeEngine(role[0], role) for role in roles]
        async with routed(*engines, settings=SETTINGS) as bench:
            for name in names:
                for prompt in ("x", LONG):
                    for is_stream in (False, True):
                        with monkeypatch.context() as patch:
                            fault = Fault(patch, kind, name)
                            one = await what_became_of(bench, prompt, is_stream=is_stream)
                            await until(lambda: not bench.desk.flights)
                        await assert_nothing_left(bench)
                        assert one in {"done", "broken", "500", "closed"}, (name, one)
                        assert fault.has_struck or one == "done", name
                        became.append(one)
                        counted = bench.desk.metrics.requests._values.values()
                        assert sum(counted) == len(became), name
            assert await what_became_of(bench, LONG, is_stream=True) == "done"

    on_jumping_loop(main)
    assert len(became) == 4 * len(names) > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_engine_booked_before_placing_failed_midway_is_free_again(monkeypatch, is_stream):
    async def main():
        async with routed(
            FakeEngine("p", "prefill"), FakeEngine("d", "decode"), settings=SETTINGS
        ) as bench:
            with monkeypatch.context() as patch:
                fault = Fault(patch, Placement, "_note_move")
                assert await what_became_of(bench, LONG, is_stream=is_stream) == "500"
                assert fault.has_struck
            bench.assert_books_balance()
            metrics = bench.desk.metrics
            assert metrics.errors.value("internal") == 1
            assert metrics.requests.value("completions", "500") == 1
            assert metrics.book_faults.value() == 0

    on_jumping_loop(main)


def test_a_fault_after_the_answer_is_one_of_the_books_alone(monkeypatch, caplog):
    async def main():
        async with routed(FakeEngine(), settings=SETTINGS) as bench:
            for prompt in ("x", LONG):
                with monkeypatch.context() as patch:
                    Fault(patch, Flight, "_conclude")
                    Fault(patch, ShortFlight, "note")
                    assert await what_became_of(bench, prompt, is_stream=False) == "done"
                    await assert_nothing_left(bench)
            assert bench.desk.metrics.book_faults.value() == 2
            assert bench.desk.metrics.errors.value("internal") == 0

    on_jumping_loop(main)
    assert caplog.text.count("is ended by a fault of the router's own") == 2


def forget_to_place(*_):
    pass


def forget_to_queue(*_):
    return None


def forget_the_call(route, path, request_id, body, sink):
    call = route.upstream.send("POST", path, (), body, sink)
    call.cancel()
    return call


@pytest.mark.parametrize(
    ("kind", "name", "forget"),
    [
        (doers, "place_now", forget_to_place),
        (Desk, "wait", forget_to_queue),
        (Route, "send", forget_the_call),
    ],
    ids=["placing", "waiting", "main"],
)
def test_a_request_nobody_goes_on_with_ends_as_an_error(monkeypatch, caplog, kind, name, forget):
    async def main():
        engine = FakeEngine()
        settings = SETTINGS | {"max_requests_per_engine": 1}
        async with routed(engine, settings=settings) as bench:
            running = None
            if kind is Desk:
                engine.go.clear()
                running = asyncio.create_task(bench.client.complete(prompt=LONG))
                await until(lambda: engine.num_running)
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, forget)
                assert await what_became_of(bench, LONG, is_stream=True) == "500"
            engine.go.set()
            if running is not None:
                assert (await running).status == 200
            await assert_nothing_left(bench)

    on_jumping_loop(main)
    assert "nobody goes on with a request" in caplog.text


def test_what_fails_in_the_upkeep_keeps_nobody_from_their_deadline():
    async def main():
        engine = FakeEngine(script=lambda body: "stall")
        settings = {"first_token_timeout_s": 0.2, "body_timeout_s": 0.2, "max_retries": 0}
        settings |= {"max_requests_per_engine": 1, "queue_timeout_s": 0.5}
        async with routed(engine, settings=settings) as bench:

            def fail(*_):
                raise RuntimeError("a fault of ours")

            bench.desk.index.sweep = fail
            first = asyncio.create_task(bench.client.complete(prompt=LONG))
            await until(lambda: engine.num_running)
            second = asyncio.create_task(bench.client.complete(prompt=LONG))
            await until(lambda: len(bench.desk.line) or second.done())
            engine.script = lambda body: None
            assert (await first).status == 504
            assert (await second).status in {200, 503}

    on_jumping_loop(main)


def test_an_answer_for_who_runs_the_router_that_cannot_be_put_together_is_an_error(
    run, monkeypatch, tmp_path
):
    async def main():
        async with routed(FakeEngine(), decision_log=str(tmp_path)) as bench:

            async def fail(*_):
                raise RuntimeError("a fault of ours")

            with monkeypatch.context() as patch:
                patch.setattr(admin, "recalled", fail)
                answer = await bench.client.get("/metrics")
                assert (answer.status, json.loads(answer.body)["error"]["code"]) == (
                    500,
                    "internal",
                )
            assert (await bench.client.get("/metrics")).status == 200

    run(main)


class Panic(BaseException):
    """What a library in Rust raises where it is wrong about itself: no Exception."""


@pytest.mark.parametrize("inline_chars", [0, 10_000], ids=["thread", "inline"])
def test_a_tokenizer_that_panics_costs_a_request_no_more_than_the_knowledge_of_its_tokens(
    run, inline_chars
):
    async def main():
        settings = {"short_request_chars": 0, "inline_tokenize_chars": inline_chars}
        async with routed(FakeEngine(), settings=settings, tokenizer=str(MODEL_DIR)) as bench:

            def panic(_):
                raise Panic

            bench.desk.tokens.tokenizer.text_of = panic
            assert (await bench.client.complete(prompt=LONG)).status == 200
            bench.assert_books_balance()
            assert bench.desk.metrics.tokenized.value("none") == 1

    run(main)


@pytest.mark.parametrize("fault", [Panic, ValueError])
def test_a_tokenizer_that_fails_when_the_router_itself_asks_it_ends_no_watch_over_engines(
    run, monkeypatch, fault, caplog
):
    monkeypatch.setattr(prober, "_LOOK_S", 0.01)
    monkeypatch.setattr(prober, "_FIRST_S", (0.0, 0.0, 0.0))

    def fail(*_, **__):
        raise fault("wrong about itself")

    monkeypatch.setattr(ModelTokenizer, "encode", fail)

    async def main():
        settings = {"probe_s": 0.1}
        async with routed(FakeEngine(), settings=settings, tokenizer=str(MODEL_DIR)) as bench:
            await until(lambda: caplog.text.count("the probe of engine e0 failed") >= 3)
            await until(lambda: "our own tokenizer fails" in caplog.text)
            assert bench.desk.workers.get("e0").parity == "unverified"
            assert not bench.router._watch.done()
            assert (await bench.client.complete(prompt=LONG * 20)).status == 200
            bench.desk.afterwards.keep()
            await until(lambda: not bench.desk.workers.get("e0").active_requests)

    run(main)


def test_a_tokenizer_that_does_not_come_back_holds_no_request_and_is_asked_again_when_it_has(
    run, monkeypatch
):
    monkeypatch.setattr(tokens, "_PATIENCE_S", 0.05)

    async def main():
        settings = {"short_request_chars": 0, "inline_tokenize_chars": 0}
        async with routed(FakeEngine(), settings=settings, tokenizer=str(MODEL_DIR)) as bench:
            desk, held = bench.desk, threading.Event()
            prompts, tokenizer = desk.tokens, desk.tokens.tokenizer
            real = tokenizer.text_of

            def wait(request):
                held.wait()
                return real(request)

            tokenizer.text_of = wait
            try:
                # One the thread works on, one that waits behind it, one that comes later.
                both = [asyncio.create_task(bench.client.complete(prompt=LONG)) for _ in range(2)]
                assert [(await one).status for one in both] == [200, 200]
                assert prompts._num_overdue == 1
                assert (await bench.client.complete(prompt=LONG)).status == 200
                assert desk.metrics.tokenized.value("late") == 3
            finally:
                held.set()
            await until(lambda: prompts._num_overdue == 0)
            monkeypatch.setattr(tokens, "_PATIENCE_S", 60.0)
            assert (await bench.client.complete(prompt=LONG)).status == 200
            assert desk.metrics.tokenized.value("late") == 3, "what it made late is kept"
            bench.assert_books_balance()

    run(main)
