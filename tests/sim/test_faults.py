"""Faults strike when asked, and nowhere else."""

import json
import signal
import time

import httpx
import pytest

from dynctl.errors import UsageError
from dynctl.sim.faults import FaultKind, Faults, parse_fault


def read_until_broken(engine, body):
    """Return what came before the connection ended without a proper end."""
    got = b""
    with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_raw()
        while True:
            try:
                got += next(pieces)
            except httpx.RemoteProtocolError:
                return got


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("f")


@pytest.fixture(autouse=True)
def clean(request):
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").control.delete("/faults")


def test_reject_with_a_status_so_many_times(engine):
    engine.fault("reject,status=503,count=2")
    statuses = [engine.complete([1, 2], 1).status_code for _ in range(3)]

    assert statuses == [503, 503, 200]


def test_reject_only_the_marked(engine):
    engine.fault("reject,status=500,marker=poison")

    assert engine.complete("sweet", 1).status_code == 200
    assert engine.complete("poison", 1).status_code == 500


def test_cut_ends_the_connection_without_a_proper_end(engine):
    engine.fault("cut,after_tokens=3,count=1")
    body = {"prompt": [1], "max_tokens": 9, "stream": True}
    got = read_until_broken(engine, body)

    assert got.count(b"data: ") == 2
    assert b"[DONE]" not in got
    assert engine.state()["num_open"] == 0


def test_split_streams_say_the_same(engine):
    whole = engine.stream("/v1/completions", prompt=[5, 6], max_tokens=5)
    engine.fault("split")
    split = engine.stream("/v1/completions", prompt=[5, 6], max_tokens=5)

    assert [e["choices"] for e in split[:-1]] == [e["choices"] for e in whole[:-1]]


def test_a_hang_keeps_health_green_and_ends_when_lifted(engine, chain):
    engine.fault("hang,after_tokens=2")
    with pytest.raises(httpx.ReadTimeout):
        engine.http.post("/v1/completions", json={"prompt": [7], "max_tokens": 5}, timeout=0.5)

    assert engine.http.get("/health").status_code == 200
    engine.control.delete("/faults")
    assert engine.token_ids([7], 5) == chain.continuation([7], 5)


def test_health_lies_while_requests_are_served(engine):
    engine.fault("health,status=503")

    assert engine.http.get("/health").status_code == 503
    assert engine.complete([1], 1).status_code == 200


def test_slow_takes_longer(engine):
    engine.fault("slow,factor=20")
    start_s = time.monotonic()
    engine.complete([1], 10)

    assert time.monotonic() - start_s > 9 * 0.002 * 20


def test_die_after_tokens_and_in_prefill(start_engine):
    for name, spec in (("d1", "die,after_tokens=4"), ("d2", "die,in=prefill,marker=poison")):
        engine = start_engine(name, "--fault", spec)
        body = {"prompt": "poison", "max_tokens": 9, "stream": True}
        got = read_until_broken(engine, body)

        assert engine.process.wait(60) == -signal.SIGKILL
        assert got.count(b"data: ") == (3 if name == "d1" else 0)


def test_a_pull_that_fails_and_a_lease_that_is_lost(start_engine):
    flags = ("--side-channel", "127.0.0.1:0")
    prefill, decode = start_engine("fp", *flags), start_engine("fd", *flags)
    ask = {"do_remote_decode": True}

    def hand_over():
        params = prefill.complete([1, 2, 3], 1, kv_transfer_params=ask).json()["kv_transfer_params"]
        return decode.complete([1, 2, 3], 2, kv_transfer_params=params).status_code

    decode.fault("fail-pull,count=1")
    assert [hand_over(), hand_over()] == [500, 200]
    prefill.fault("lose-lease,count=1")
    assert [hand_over(), hand_over()] == [500, 200]


def test_the_control_socket_lists_and_refuses(engine):
    engine.fault("slow,factor=1.5,count=3")

    assert engine.control.get("/faults").json()[0]["spec"] == "slow,factor=1.5,count=3"
    assert engine.control.post("/faults", json={"spec": "explode"}).status_code == 400
    assert engine.control.post("/faults", content=b"{").status_code == 400
    assert engine.control.get("/nothing").status_code == 404


@pytest.mark.parametrize("spec", ["", "explode", "die,after_tokens=0", "die,in=decode", "slow,factor=x", "reject,status=200", "cut,why=so"])  # fmt: skip
def test_senseless_faults_are_refused(spec):
    with pytest.raises(UsageError):
        parse_fault(spec)


def test_a_ratio_strikes_that_share_of_the_times():
    faults = Faults(("lose-events,ratio=0.25",))

    assert sum(faults.struck(FaultKind.LOSE_EVENTS) is not None for _ in range(100)) == 25


def test_sigterm_lets_streams_end_and_refuses_new_requests(start_engine, chain):
    """As vLLM: /health stays 200 while draining, new requests get 500."""
    engine = start_engine("drain", "--shutdown-timeout", "100", "--decode-ms", "20")
    body = {"prompt": [9], "max_tokens": 300, "stream": True, "return_token_ids": True}
    with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        other = engine.client(engine.socket)
        assert other.get("/health").status_code == 200
        engine.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 60
        while (refused := other.post("/v1/completions", json={"prompt": [1]})).status_code == 200:
            assert time.monotonic() < deadline_s
        health = other.get("/health").status_code
        rest = [line for line in lines if line.startswith("data: ")]
        other.close()

    assert refused.status_code == 500
    assert "shutdown" in refused.json()["error"]["message"]
    assert health == 200
    assert rest[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in [first, *rest[:-1]]]
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == chain.continuation([9], 300)
    assert engine.process.wait(60) == 0


def test_sigterm_without_patience_cuts_streams_with_an_end_mark(start_engine):
    engine = start_engine("now", "--decode-ms", "20")
    with engine.http.stream(
        "POST", "/v1/completions", json={"prompt": [9], "max_tokens": 5000, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        engine.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]

    assert rest[-1] == "data: [DONE]"
    assert all('"finish_reason":null' in line for line in [first, *rest[:-1]])
    assert engine.process.wait(60) == 0
    assert not list(engine.folder.glob("now*"))  # no socket file stays behind
