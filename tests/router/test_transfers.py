"""The prefill/decode hand-off with scripted engines: what is checked, what is retried, what is never sent."""

import asyncio

import pytest
from router_bench import events, routed, until
from router_fakes import FakeEngine

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.transfer import transfer_fault
from dynctl.router.workers import Worker

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "id-p0",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def prefill_worker(**facts):
    info = EngineInfo(
        "p0", "1", EngineState.READY, "prefill", "d", "vllm", "m", block_size_tokens=16, **facts
    )
    return Worker(info, Settings())


def test_parameters_as_vllm_writes_them_are_accepted_and_pin_the_identity():
    worker = prefill_worker(side_channel_host="10.0.0.1", side_channel_port=5600)

    assert transfer_fault(PARAMS, worker, 40) == ""
    assert worker.transfer_identity == "id-p0"
    assert "identity" in transfer_fault(PARAMS | {"remote_engine_id": "other"}, worker, 40)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "10.0.0.2"},
        {"remote_port": 5601},
        {"remote_port": "5600"},
        {"remote_port": 70000},
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {"remote_engine_id": ""},
        {"remote_engine_id": 7},
        {"remote_request_id": "x" * 1000},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[1, "x"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [list(range(100))]},
        {"remote_block_ids": None},
        {"tp_size": 10**9},
        {"tp_size": True},
        {"remote_blocks_expiry_time": "soon"},
        {"surprise": 1},
    ],
)
def test_parameters_that_do_not_fit_the_engine_are_refused(change):
    worker = prefill_worker(side_channel_host="10.0.0.1", side_channel_port=5600)

    assert transfer_fault(PARAMS | change, worker, 40)
    assert worker.transfer_identity == ""


@pytest.mark.parametrize("params", [None, [], "x", {}])
def test_missing_parameters_are_refused(params):
    assert transfer_fault(params, prefill_worker(), 40)


def test_a_split_request_sends_one_token_of_prefill_and_the_answers_parameters_verbatim(run):
    async def main():
        prefill, decode = FakeEngine("p0", "prefill"), FakeEngine("d0", "decode")
        async with routed(prefill, decode) as bench:
            answer = await bench.client.complete(stream=True, max_tokens=6)

            assert events(answer.body)[-1] == b"[DONE]"
            asked, sent = prefill.requests[0], decode.requests[0]
            assert asked["max_tokens"] == 1
            assert not asked["stream"]
            assert asked["kv_transfer_params"] == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
            }
            assert sent["kv_transfer_params"]["remote_request_id"] == "r1"
            assert sent["max_tokens"] == 6
            assert prefill.headers[0][b"x-request-id"] != decode.headers[0][b"x-request-id"]
            bench.assert_books_balance()

    run(main)


def test_forged_parameters_never_reach_a_decode_engine(run):
    async def main():
        prefill, decode = FakeEngine("p0", "prefill"), FakeEngine("d0", "decode")
        prefill.transfer = {"remote_block_ids": [list(range(10_000))]}
        async with routed(prefill, decode) as bench:
            answer = await bench.client.complete(stream=True)

            assert answer.status == 200
            assert "kv_transfer_params" not in decode.requests[0]
            assert bench.desk.metrics.handoffs.value("rejected") >= 1
            assert sum(bench.desk.metrics.local_prefill._values.values()) == 1
            bench.assert_books_balance()

    run(main)


def test_prefill_faults_go_to_another_prefill_engine_then_to_the_decode_engine(run):
    async def main():
        for fault in ("refuse", "status:500", "status:503"):
            bad = [FakeEngine(f"p{i}", "prefill", script=lambda b, f=fault: f) for i in range(2)]
            decode = FakeEngine("d0", "decode")
            async with routed(*bad, decode) as bench:
                answer = await bench.client.complete(stream=True)

                assert answer.status == 200, fault
                assert events(answer.body)[-1] == b"[DONE]"
                assert [len(p.requests) for p in bad] == [1, 1]
                assert "kv_transfer_params" not in decode.requests[0]
                assert sum(bench.desk.metrics.local_prefill._values.values()) == 1
                bench.assert_books_balance()

    run(main)


def test_a_prefill_engines_4xx_reaches_the_client_and_decode_is_not_asked(run):
    async def main():
        prefill = FakeEngine("p0", "prefill", script=lambda b: "status:400")
        decode = FakeEngine("d0", "decode")
        async with routed(prefill, decode) as bench:
            assert (await bench.client.complete()).status == 400
            assert decode.requests == []
            bench.assert_books_balance()

    run(main)


def test_a_decode_engine_that_dies_on_parameters_is_replaced_with_fresh_ones(run):
    async def main():
        prefill = FakeEngine("p0", "prefill")
        decodes = [FakeEngine(f"d{i}", "decode") for i in range(2)]
        dead = []

        def die_once(body):
            if not dead:
                dead.append(body)
                return "refuse"
            return None

        for decode in decodes:
            decode.script = die_once
        async with routed(prefill, *decodes) as bench:
            answer = await bench.client.complete(stream=True)

            assert events(answer.body)[-1] == b"[DONE]"
            used = [
                r["kv_transfer_params"]["remote_request_id"] for d in decodes for r in d.requests
            ]
            assert sorted(used) == ["r1", "r2"]
            assert [len(d.requests) for d in decodes] == [1, 1]
            bench.assert_books_balance()

    run(main)


def test_many_sequences_never_carry_parameters(run):
    async def main():
        prefill, decode = FakeEngine("p0", "prefill"), FakeEngine("d0", "decode")
        async with routed(prefill, decode) as bench:
            await bench.client.complete(n=2)
            await bench.client.complete(prompt=["a", "b"])
            await bench.client.complete(prompt=[[1, 2], [3]])

            assert prefill.requests == []
            assert all("kv_transfer_params" not in body for body in decode.requests)
            assert bench.desk.metrics.local_prefill.value("many_sequences") == 3

    run(main)


def test_a_client_that_leaves_during_prefill_frees_both_engines(run):
    async def main():
        prefill = FakeEngine("p0", "prefill", script=lambda b: "stall")
        decode = FakeEngine("d0", "decode")
        async with routed(prefill, decode) as bench:
            call = asyncio.create_task(bench.client.complete(stream=True))
            await until(lambda: prefill.num_running == 1)
            assert bench.desk.workers.get("d0").active_requests == 1
            call.cancel()
            await asyncio.wait([call])
            await until(lambda: prefill.num_running == 0)

            assert decode.requests == []
            await until(lambda: not bench.desk.flights)
            bench.assert_books_balance()
            assert bench.desk.metrics.client_gone.value("prefill") == 1

    run(main)


def test_a_prefill_that_is_made_again_is_a_decision_that_has_ended(run):
    async def main():
        failed = []

        def once(body):
            failed.append(body)
            return "status:500" if len(failed) == 1 else None

        decodes = [FakeEngine(f"d{i}", "decode", script=once) for i in range(2)]
        async with routed(FakeEngine("p0", "prefill"), *decodes, policy="kv") as bench:
            assert (await bench.client.complete(prompt="x" * 2000)).status == 200
            decisions = [(one.leg, one.outcome) for one in bench.desk.ring.newest(9)]
            assert sorted(decisions) == [
                ("decode", "done"),
                ("decode", "error_500"),
                ("prefill", "done"),
                ("prefill", "repeated"),
            ]

    run(main)


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_is_handed_over_is_counted_streamed_or_not_and_only_a_first_token_tells_how_long_it_took(
    run, is_stream
):
    async def main():
        engines = FakeEngine("p0", "prefill"), FakeEngine("d0", "decode")
        async with routed(*engines, policy="kv") as bench:
            links = bench.desk.placement.links
            began_s = bench.desk.now_s()
            before = links.cost("p0", "d0", 1000, began_s, began_s).move_ms
            for number in range(3):
                prompt = f"{number}" * 2000
                answer = await bench.client.complete(prompt=prompt, stream=is_stream)
                assert answer.status == 200
            await until(lambda: not links.num_booked)
            asked = sum(one.move_tokens for one in bench.desk.ring.newest(9) if one.leg == "decode")
            assert asked > 0
            assert sum(links.moved_tokens.values()) == asked
            ended_s = bench.desk.now_s()
            after = links.cost("p0", "d0", 1000, ended_s, ended_s).move_ms
            assert (after != before) == is_stream

    run(main)
