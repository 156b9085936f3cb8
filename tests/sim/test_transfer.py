"""Prefill and decode on two engines: same text as one, KV counted, single use, leases, failures."""

import time

import pytest

from dynctl.core.kv import BlockStored
from dynctl.sim.chain import Chain
from dynctl.sim.sequence import SimSequence, Wish
from dynctl.sim.transfer import LEASE_S, Leases, _PullWish

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
}
FIELDS = [
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
    "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
    "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(start_engine):
    flags = ("--side-channel", "127.0.0.1:0", "--block-size", "128", "--num-blocks", "128")
    return start_engine("p", "--role", "prefill", *flags), start_engine(
        "d", "--role", "decode", *flags
    )


def prefill(engine, prompt):
    answer = engine.complete(
        prompt, 1, kv_transfer_params=ASK, headers={"X-Request-Id": "pd-1"}
    ).json()
    return answer, answer["kv_transfer_params"]


def delta(engine, before):
    return {
        name: value - before.get(name, 0)
        for name, value in engine.metrics().items()
        if value != before.get(name, 0)
    }


def test_apart_they_say_what_one_engine_says(pair, chain):
    prompt = list(range(1000, 2000))
    before = pair[1].metrics()
    first, params = prefill(pair[0], prompt)
    assert pair[0].state()["num_leases"] == 1
    said = pair[1].token_ids(prompt, 16, kv_transfer_params=params)
    moved = delta(pair[1], before)

    assert said == chain.continuation(prompt, 16)
    assert first["choices"][0]["token_ids"] == said[:1]
    assert list(params) == FIELDS
    assert (params["remote_num_tokens"], params["transfer_mode"]) == (1000, "pull")
    assert [len(ids) for ids in params["remote_block_ids"]] == [8]
    assert params["remote_request_id"].startswith("cmpl-pd-1-0-")
    assert moved['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 1000
    assert moved["vllm:external_prefix_cache_hits_total"] == 1000
    assert moved["vllm:external_prefix_cache_queries_total"] == 1000
    assert moved["vllm:nixl_xfer_time_seconds_count"] == 1
    assert moved["vllm:nixl_bytes_transferred_sum"] == 8 * 128 * 131072
    assert 'vllm:prompt_tokens_by_source_total{source="local_compute"}' not in moved
    assert pair[0].state()["num_leases"] == 0
    assert pair[0].state()["num_free_blocks"] == 127


def test_a_repeated_prompt_moves_only_its_last_blocks(pair, chain):
    prompt = list(range(2000, 3000))
    for _ in range(2):
        before = pair[1].metrics()
        _, params = prefill(pair[0], prompt)
        answer = pair[1].complete(prompt, 4, kv_transfer_params=params).json()
    moved = delta(pair[1], before)

    assert answer["choices"][0]["token_ids"] == chain.continuation(prompt, 4)
    assert moved['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 104
    assert moved["vllm:prefix_cache_hits_total"] == 896
    assert moved["vllm:nixl_bytes_transferred_sum"] == 128 * 131072
    assert params["remote_prefill_cached_tokens"] == 896
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 896


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 256])
def test_prompts_of_any_length_come_over(pair, chain, length):
    prompt = [(7 * i + length) % 4000 for i in range(length)]
    _, params = prefill(pair[0], prompt)

    assert pair[1].token_ids(prompt, 5, kv_transfer_params=params) == chain.continuation(prompt, 5)


@pytest.mark.parametrize("wrong", ["used", "remote_engine_id", "remote_request_id", "remote_port"])
def test_parameters_used_twice_unknown_or_of_nobody_are_refused(pair, wrong):
    prompt = list(range(300, 500))
    _, params = prefill(pair[0], prompt)
    if wrong == "used":
        pair[1].complete(prompt, 1, kv_transfer_params=params)
    else:
        params |= {wrong: 1 if wrong == "remote_port" else "other"}
    before = pair[1].metrics()
    answer = pair[1].complete(prompt, 1, kv_transfer_params=params)
    moved = delta(pair[1], before)

    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "Internal server error")
    assert moved["vllm:nixl_num_failed_transfers_total"] == 1
    assert moved['vllm:request_success_total{finished_reason="error"}'] == 1
    assert pair[1].state()["num_free_blocks"] == 127


def test_a_failed_pull_breaks_a_stream_with_one_error_event(pair):
    _, params = prefill(pair[0], list(range(60)))
    events = pair[1].stream(
        "/v1/completions",
        prompt=list(range(60)),
        kv_transfer_params=params | {"remote_engine_id": "x"},
    )

    assert [("error" in event) for event in events[:-1]] == [True]
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    "change", [{"remote_port": "x"}, {"remote_host": None}, {"remote_port": 70000}]
)
def test_parameters_without_an_address_are_a_bad_request(pair, change):
    params = dict.fromkeys(FIELDS) | {
        "do_remote_prefill": True,
        "remote_host": "h",
        "remote_port": 1,
    }
    params |= {"remote_engine_id": "e", "remote_request_id": "r", **change}
    answer = pair[1].complete([1, 2], 1, kv_transfer_params=params)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_kv_of_another_prompt_changes_the_answer(pair, chain):
    _, params = prefill(pair[0], list(range(500, 700)))
    said = pair[1].token_ids(list(range(3000, 3200)), 8, kv_transfer_params=params)

    assert said != chain.continuation(range(3000, 3200), 8)


def test_a_slow_transfer_delays_the_first_token(start_engine, pair, chain):
    slow = start_engine(
        "slow",
        "--side-channel",
        "127.0.0.1:0",
        "--block-size",
        "128",
        "--kv-transfer-mbytes-s",
        "100",
    )
    prompt = list(range(700, 828))
    _, params = prefill(pair[0], prompt)
    start_s = time.monotonic()
    said = slow.token_ids(prompt, 2, kv_transfer_params=params)

    assert time.monotonic() - start_s >= 128 * 131072 / 100e6
    assert said == chain.continuation(prompt, 2)


def test_a_client_that_leaves_during_the_transfer_frees_both_engines(start_engine, pair, until):
    slow = start_engine(
        "gone",
        "--side-channel",
        "127.0.0.1:0",
        "--block-size",
        "128",
        "--kv-transfer-mbytes-s",
        "1",
    )
    before = pair[0].state()
    _, params = prefill(pair[0], list(range(900, 1100)))
    client = slow.client(slow.socket)
    body = {"prompt": list(range(900, 1100)), "stream": True, "kv_transfer_params": params}
    with client.stream("POST", "/v1/completions", json=body):
        until(lambda: slow.state()["num_waiting"], "the transfer is under way")
    client.close()
    until(
        lambda: (
            not slow.state()["num_waiting"]
            and pair[0].state()["num_leases"] == before["num_leases"]
        ),
        "both have let go",
    )

    assert slow.state()["num_free_blocks"] == slow.state()["num_blocks"] - 1
    assert pair[0].state()["num_free_blocks"] == before["num_free_blocks"]


def test_without_a_connector_the_parameters_mean_nothing(start_engine, chain):
    plain = start_engine("plain")
    answer = plain.complete([5, 6, 7], 3, kv_transfer_params=ASK).json()

    assert answer["kv_transfer_params"] is None
    assert answer["choices"][0]["token_ids"] == chain.continuation([5, 6, 7], 3)


def leased():
    sequence = SimSequence(Wish("r", (1, 2, 3), 1), Chain(range(10)), 0)
    leases = Leases("e", 2, 10)
    leases.grant(sequence, 100)
    return leases, sequence


def test_a_lease_ends_after_its_time_and_says_so():
    leases, sequence = leased()
    wish = _PullWish("e", "r", 2, 0)

    assert leases.expire(100 + LEASE_S - 1) == []
    assert "expired" in leases.pull(wish, 100 + LEASE_S).error
    assert leases.expire(100 + LEASE_S) == [sequence]
    assert "expired" in leases.pull(wish, 200).error
    assert leases.end("r", "used") is None


def test_a_lease_is_good_for_one_pull():
    leases, sequence = leased()
    wish = _PullWish("e", "r", 2, 0)

    assert leases.pull(wish, 101).error == ""
    assert "in use" in leases.pull(wish, 102).error
    assert leases.end("r", "used") is sequence
    assert "used" in leases.pull(wish, 103).error
    assert "blocks of" in leases.pull(_PullWish("e", "r", 4, 0), 103).error


def test_decode_publishes_pulled_blocks_under_the_names_prefill_gave_them(pair, zmq_events):
    prompt = list(range(3100, 3500))
    _, params = prefill(pair[0], prompt)
    pair[1].complete(prompt, 2, kv_transfer_params=params)
    names = [
        [
            name
            for batch in zmq_events(engine)
            for event in batch.events
            if isinstance(event, BlockStored) and set(event.token_ids) <= set(prompt)
            for name in event.block_hashes
        ]
        for engine in pair
    ]

    assert len(names[0]) == 3
    assert names[0] == names[1]
