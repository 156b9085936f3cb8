"""Data-parallel ranks behind one server: who gets a request, whose cache holds it, what is told of it."""

import re
from types import SimpleNamespace

import pytest

from dynctl.core.exposition import engine_sample
from dynctl.errors import UsageError
from dynctl.sim.metrics import merge
from dynctl.sim.options import parse_args

PROMPT = list(range(40, 104))


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("inproc", "--data-parallel-size", "2", "--side-channel", "127.0.0.1:0")


def rank(number):
    return {"X-data-parallel-rank": str(number)}


def cached(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_each_rank_has_a_cache_of_its_own_and_tells_of_it_at_its_own_place(engine, zmq_events):
    first = engine.complete(PROMPT, headers=rank(0))
    assert cached(first) == 0
    assert cached(engine.complete(PROMPT, headers=rank(0))) == 48
    other = engine.complete(PROMPT, headers=rank(1))
    assert cached(other) == 0
    assert other.json()["choices"] == first.json()["choices"]

    sources = engine.http.get("/kv_event_sources").json()
    assert sources == {
        str(number): {
            "endpoint": engine.kv_events + suffix,
            "replay_endpoint": engine.kv_replay + suffix,
            "topic": "kv@inproc",
        }
        for number, suffix in enumerate(("", "_dp1"))
    }
    for number, suffix in enumerate(("", "_dp1")):
        batches = zmq_events(SimpleNamespace(kv_replay=engine.kv_replay + suffix))
        assert {batch.dp_rank for batch in batches} == {number}
        stored = [token for batch in batches for event in batch.events for token in event.token_ids]
        assert stored[:64] == PROMPT


def test_requests_that_name_no_rank_are_spread(engine):
    seen = set()
    for turn, headers in enumerate(({}, {}, {"X-data-parallel-rank": "first"}, {})):
        before = [engine.control.get("/state", headers=rank(n)).json() for n in (0, 1)]
        engine.complete([300 + turn] * 40, headers=headers)
        after = [engine.control.get("/state", headers=rank(n)).json() for n in (0, 1)]
        seen |= {
            n for n in (0, 1) if after[n]["num_cached_blocks"] > before[n]["num_cached_blocks"]
        }
    assert seen == {0, 1}


@pytest.mark.parametrize("number", [2, -1])
def test_a_rank_there_is_not_is_refused(engine, number):
    answer = engine.complete(PROMPT, headers=rank(number))
    assert answer.status_code == 400
    assert f"data_parallel_rank {number} is out of range [0, 2)." in answer.text


def test_each_rank_has_a_side_channel_and_an_identity(engine):
    params = [
        engine.complete(
            PROMPT,
            max_tokens=1,
            headers=rank(number),
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        ).json()["kv_transfer_params"]
        for number in (0, 1)
    ]
    assert params[0]["remote_port"] != params[1]["remote_port"]
    assert params[0]["remote_engine_id"] != params[1]["remote_engine_id"]


def test_metrics_name_the_rank_and_each_family_is_there_once(engine):
    text = engine.http.get("/metrics").text
    assert len(re.findall(r"# TYPE vllm:num_requests_running gauge\n", text)) == 1
    samples = re.findall(r'vllm:prompt_tokens_total\{engine="(\d)",.*\} (\S+)', text)
    assert [number for number, _ in samples] == ["0", "1"]
    names = re.findall(r"# TYPE (\S+)", text)
    assert len(names) == len(set(names))
    figures = engine_sample(text, "e", "i")
    assert figures.prompt_tokens_total == sum(float(value) for _, value in samples)


def test_one_rank_is_written_as_it_is():
    assert merge([b"# HELP a a\n# TYPE a gauge\na 1\n"]) == b"# HELP a a\n# TYPE a gauge\na 1\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--data-parallel-size", "0"],
        ["--data-parallel-size", "65"],
        ["--data-parallel-size", "2", "--kv-events", "ipc:///run/kv"],
        ["--data-parallel-size", "2", "--kv-events", "tcp://127.0.0.1:65535"],
        ["--data-parallel-size", "2", "--kv-events", "tcp://h:1", "--kv-replay", "ipc:///run/re"],
        ["--data-parallel-size", "2", "--side-channel", "127.0.0.1:65535"],
    ],
)
def test_ranks_without_places_are_refused(flags):
    with pytest.raises(UsageError, match=r"data-parallel-size|no place for each of 2 ranks"):
        parse_args(["--uds", "/run/e", *flags])
