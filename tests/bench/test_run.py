"""Whole runs against a server with exact delays. Bounds are one-sided where a busy machine could stretch times."""

import asyncio
from types import SimpleNamespace

import pytest

from dynctl.bench.arrivals import parse_load
from dynctl.bench.client import MAX_CONTROL_BYTES, open_target
from dynctl.bench.report import make_report
from dynctl.bench.run import Drive, Wish, learn_counting, other_traffic
from dynctl.bench.workload import parse_workload
from dynctl.errors import ConnectError, DynctlError, ExitCode, UsageError
from dynctl.http1.server import serve
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.options import MODEL_DIR, SimOptions
from dynctl.sim.text import TextModel

LEARNING = [""] * 5
"""The requests that learn the token counting; faults after them hit the run."""


async def drive(server, spec, load, duration_s=0.5, *, api="chat", stop_after_s=None, **wishes):
    wish = Wish(parse_workload(spec), parse_load(load), duration_s, **wishes)
    stop = asyncio.Event()
    async with open_target(server.url, api, None, 60.0) as target:
        await target.find_model(None)
        count = await learn_counting(target, wish.workload)
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        measured = await Drive(target, wish, count, stop).run(lambda _: None)
        return make_report(wish.setting(target, count), measured), measured.records


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_times_lengths_and_tokens_come_out_as_the_server_made_them(with_server, api):
    async def scenario(server):
        return await drive(server, "synthetic:isl=60,osl=6", "constant:40", api=api)

    report, records = with_server(scenario, ttft_s=0.05, gap_s=0.02, tokens_per_chunk=2)

    assert len(records) == 20
    assert all(r.is_ok for r in records)
    assert {r.prompt_tokens for r in records} == {60}
    assert {r.output_tokens for r in records} == {6}
    assert all(len(r.chunks) == 3 for r in records)
    assert min(r.ttft_service_ms for r in records) >= 49.0
    assert report.metrics["ttft_ms"].p50 < 60_000.0
    # Not the least: whoever reads the first piece late sees less time until the last.
    assert report.metrics["tpot_ms"].p50 >= 0.9 * 2 * 20.0 / 4
    assert report.metrics["itl_ms"].num == 20 * 4
    assert report.metrics["e2e_ms"].min >= 89.0
    assert report.lengths.isl_mismatch_ratio == 0.0
    assert report.lengths.osl_mismatch_ratio == 0.0
    assert report.exit_code is ExitCode.OK


def test_an_open_loop_is_not_held_up_by_slow_answers(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=20,osl=1", "constant:40")

    report, records = with_server(scenario, ttft_s=1.0)

    assert len(records) == 20
    assert sum(r.sent_s < records[0].end_s for r in records) > 3
    assert report.requests.ok == 20


def test_a_closed_loop_keeps_so_many_requests_under_way(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=20,osl=2", "concurrency:3", 2.0)

    _, records = with_server(scenario, ttft_s=0.4)
    first_three = sorted(records, key=lambda r: r.sent_s)[:3]

    assert len(records) >= 6
    assert max(r.sent_s for r in first_three) < min(r.end_s for r in records)
    overlapping = [sum(o.sent_s <= r.sent_s < o.end_s for o in records) for r in records]
    assert max(overlapping) <= 3


def test_a_tokenizer_that_makes_three_tokens_of_a_word_is_learnt(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=68,osl=2", "constant:20", 0.3)

    report, records = with_server(scenario, tokens_per_word=3)

    assert {r.prompt_tokens for r in records} == {68}
    assert report.setting.tokens_per_word == 3.0
    assert report.setting.overhead_tokens == 8.0


def test_a_tokenizer_that_splits_some_words_gets_the_others(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=65,osl=2", "constant:20", 0.3)

    report, records = with_server(scenario, splits=True, ttft_s=0.0)

    assert {r.prompt_tokens for r in records} == {65}
    assert report.setting.tokens_per_word == 1.0


def test_extensions_a_server_refuses_are_dropped_and_said(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=30,osl=4", "constant:20", 0.3), server.bodies[-1]

    (report, records), body = with_server(scenario, refuses_extensions=True)

    assert all(r.is_ok for r in records)
    assert not report.setting.per_chunk_usage
    assert not report.setting.fixed_lengths
    assert "ignore_eos" not in body
    assert "itl_ms" not in report.metrics
    assert report.metrics["chunk_gap_ms"].num == len(records) * 3


def test_without_usage_tokens_are_estimated_and_said_so(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=30,osl=4", "constant:20", 0.3)

    report, records = with_server(scenario, sends_usage=False)

    assert report.lengths.is_estimated
    assert {r.output_tokens for r in records} == {4}
    assert report.kv.cached_ratio is None


@pytest.mark.parametrize(
    ("api", "lead", "wrapper"),
    [("completions", 0, (0, 0)), ("chat", 1, (3, 2)), ("chat", 14, (9, 1)), ("chat", 0, (1, 20))],
)
@pytest.mark.parametrize(
    "spec", ["prefix:groups=2,len=64,suffix=40,osl=1", "synthetic:isl=60,osl=1"]
)
def test_cached_tokens_reach_the_ideal_on_a_server_that_never_forgets(
    with_server, api, lead, wrapper, spec
):
    async def scenario(server):
        return await drive(server, spec, "constant:40", 0.5, api=api)

    report, _ = with_server(scenario, ttft_s=0.0, lead=lead, wrapper=wrapper)

    # The probes warm the server's cache a little before the run does.
    assert report.kv.cached_ratio == pytest.approx(report.kv.ideal_ratio, abs=0.05)
    assert report.kv.ideal_ratio > 0.4 or "synthetic" in spec


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_ideal_of_chats_is_what_an_engine_with_room_for_all_finds(api):
    """Also where the answers are a part of the next prompt: all of what stands before them must be the same then."""

    async def main():
        engine = SimEngine(
            SimOptions(prefill_us_per_token=1.0, prefill_base_ms=0.1, decode_ms=0.1),
            TextModel(MODEL_DIR),
        )
        served = await serve(Api(engine).handle, host="127.0.0.1", port=0)
        await engine.start()
        try:
            where = SimpleNamespace(url=f"http://127.0.0.1:{served.port}")
            spec = "multiturn:chats=3,turns=4,system=40,isl=30,osl=50"
            return await drive(where, spec, "concurrency:1", 2.0, api=api)
        finally:
            await engine.close()
            await served.close(0)

    report, records = asyncio.run(main())

    assert max(r.turn for r in records) > 1
    assert report.kv.ideal_ratio > 0.3
    assert report.kv.cached_ratio == pytest.approx(report.kv.ideal_ratio, abs=0.01)


def test_chats_resend_the_real_answers(with_server):
    async def scenario(server):
        _, records = await drive(
            server, "multiturn:chats=1,turns=3,system=8,isl=6,osl=3", "concurrency:1", 0.4
        )
        return records, server.bodies

    records, bodies = with_server(scenario)
    third = next(b for b in bodies if len(b["messages"]) == 6)

    assert [m["content"] for m in third["messages"] if m["role"] == "assistant"] == [
        "w1 w2 w3 "
    ] * 2
    assert {r.turn for r in records} >= {1, 2, 3}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("503", "http 503"), ("die", "broken stream"), ("error", "error event"), ("no-done", "broken stream"),
     ("empty", "empty")],
)  # fmt: skip
def test_each_failure_has_its_kind_and_spoils_no_latency(with_server, fault, kind):
    async def scenario(server):
        server.faults = [*LEARNING, fault, fault]
        return await drive(server, "synthetic:isl=20,osl=3", "constant:20", 0.4)

    report, records = with_server(scenario)

    assert report.requests.failed_by_kind == {kind: 2}
    assert report.requests.ok == len(records) - 2
    assert report.metrics["ttft_ms"].num == report.requests.ok
    assert all(r.error for r in records if not r.is_ok)


def test_answers_that_never_end_are_unfinished_after_the_drain(with_server):
    async def scenario(server):
        server.faults = [*LEARNING, "hang"]
        return await drive(server, "synthetic:isl=20,osl=1", "constant:20", 0.3, drain_s=2.0)

    report, _ = with_server(scenario)

    assert report.requests.failed_by_kind == {"unfinished": 1}
    assert not report.is_partial


def test_an_interrupt_keeps_what_was_measured(with_server):
    async def scenario(server):
        return await drive(server, "synthetic:isl=20,osl=1", "constant:50", 120.0, stop_after_s=2.0)

    report, records = with_server(scenario)

    assert report.is_partial
    assert report.exit_code is ExitCode.INTERRUPTED
    assert 0 < report.measured_s < 120.0
    assert any(r.is_ok for r in records)


def test_a_server_that_is_gone_gives_connect_failures_and_exit_4(with_server):
    async def scenario(server):
        wish = Wish(parse_workload("synthetic:isl=20,osl=1"), parse_load("constant:20"), 0.2)
        async with open_target(server.url, "chat", None, 60.0) as target:
            await target.find_model(None)
            count = await learn_counting(target, wish.workload)
        async with open_target("http://127.0.0.1:1", "chat", None, 60.0) as gone:
            gone.model = "fake"
            measured = await Drive(gone, wish, count, asyncio.Event()).run(lambda _: None)
            return make_report(wish.setting(gone, count), measured), measured

    report, measured = with_server(scenario)

    assert set(report.requests.failed_by_kind) == {"connect"}
    assert {record.error for record in measured.records} == {"connection refused"}
    assert report.exit_code is ExitCode.REFUSED


def test_a_refusing_server_is_not_asked_in_a_busy_loop(with_server):
    async def scenario(server):
        server.faults = [*LEARNING, *["503"] * 10_000]
        return await drive(server, "synthetic:isl=20,osl=1", "concurrency:1", 0.5)

    _, records = with_server(scenario)

    assert 1 <= len(records) <= 12


def test_the_router_says_what_it_expected(with_server, eventually):
    async def scenario(server):
        server.metrics = (
            "dynctl_router_requests_total 5\ndynctl_router_inflight 0\n"
            "dynctl_router_prompt_tokens_total 100\ndynctl_router_predicted_hit_tokens_total 10\n"
        )

        async def grow():
            await eventually(lambda: len(server.bodies) > len(LEARNING), "the run has begun")
            server.metrics = (
                "dynctl_router_requests_total 9\ndynctl_router_inflight 0\n"
                "dynctl_router_prompt_tokens_total 300\ndynctl_router_predicted_hit_tokens_total 110\n"
            )

        growing = asyncio.create_task(grow())
        found = await drive(server, "synthetic:isl=20,osl=1", "constant:10", 0.8)
        await growing
        return found

    report, _ = with_server(scenario)

    assert report.kv.predicted_ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("metrics", "word"),
    [("dynctl_router_inflight 3\ndynctl_router_queued 1\ndynctl_router_requests_total 9\n", "4 requests"),
     ("vllm:num_requests_running 2\nvllm:num_requests_waiting 0\n", "2 requests"),
     ("dynctl_router_inflight 0\ndynctl_router_requests_total 9\n", ""), (None, "")],
)  # fmt: skip
def test_traffic_of_others_is_noticed(with_server, metrics, word):
    async def scenario(server):
        async with open_target(server.url, "chat", None, 60.0) as target:
            return await other_traffic(target)

    found = with_server(scenario, metrics=metrics)

    assert found.startswith(word)
    assert bool(found) == bool(word)


def test_traffic_that_comes_while_looking_is_noticed(with_server, eventually):
    async def scenario(server):
        async def grow():
            await eventually(lambda: "/metrics" in server.paths, "it has looked once")
            server.metrics = "dynctl_router_requests_total 12\n"

        growing = asyncio.create_task(grow())
        async with open_target(server.url, "chat", None, 60.0) as target:
            found = await other_traffic(target)
        await growing
        return found

    assert "3 requests" in with_server(scenario, metrics="dynctl_router_requests_total 9\n")


def test_the_model_must_be_named_when_there_are_several(with_server):
    async def scenario(server):
        async with open_target(server.url, "chat", None, 60.0) as target:
            with pytest.raises(UsageError, match="2 models: a, b"):
                await target.find_model(None)
            with pytest.raises(UsageError, match="does not serve 'c'"):
                await target.find_model("c")
            await target.find_model("b")
            return target.model, await target.version()

    assert with_server(scenario, models=("a", "b")) == ("b", "1.2.3")


def test_prompts_longer_than_the_context_are_refused_before_anything_is_sent(with_server):
    async def scenario(server):
        with pytest.raises(DynctlError, match="reach 150 tokens") as caught:
            await drive(server, "synthetic:isl=100,osl=50", "constant:1")
        return caught.value.exit_code, server.bodies

    assert with_server(scenario, max_model_len=128) == (ExitCode.REFUSED, [])


def test_a_server_that_refuses_everything_is_told_with_its_message(with_server):
    async def scenario(server):
        server.faults = ["503"] * 3
        with pytest.raises(DynctlError, match="http 503: no engine is ready"):
            await drive(server, "synthetic:isl=20,osl=1", "constant:1")

    with_server(scenario)


def test_an_address_without_a_server_is_a_connect_error():
    async def main():
        async with open_target("http://127.0.0.1:1", "chat", None, 60.0) as target:
            await target.find_model(None)

    with pytest.raises(ConnectError) as caught:
        asyncio.run(main())

    text = "http://127.0.0.1:1/v1/models does not answer: connection refused"
    assert caught.value.message == text
    assert "dynctl status" in caught.value.hint


def test_a_control_answer_without_end_is_not_read_to_its_end(with_server):
    async def scenario(server):
        server.models = ("m" * MAX_CONTROL_BYTES,)
        async with open_target(server.url, "chat", None, 60.0) as target:
            with pytest.raises(DynctlError, match="/v1/models answers with more than 16 MiB"):
                await target.find_model(None)

    with_server(scenario)


def test_the_api_key_is_sent_with_every_request(with_server):
    async def scenario(server):
        async with open_target(server.url, "chat", "s3cret", 5.0) as target:
            await target.find_model(None)
            await learn_counting(target, parse_workload("synthetic:isl=20,osl=1"))
        return server.headers

    assert all(b"authorization: bearer s3cret" in head.lower() for head in with_server(scenario))
