"""Route keys: who names one, in which order, and what is counted by it."""

import asyncio
import hashlib

import pytest
from router_bench import routed, until
from router_fakes import MODEL, FakeEngine

from dynctl.cli.route import build_config
from dynctl.core.exposition import parse
from dynctl.errors import UsageError
from dynctl.http1.request import Request
from dynctl.router.api.keys import Keys
from dynctl.router.api.requests import KINDS, parse_request
from dynctl.router.config import ApiKeyHash, EngineTarget, RouterConfig, Settings, check_config
from dynctl.router.merging import add_expositions
from dynctl.router.route_keys import ByKey, RouteKeys

PREFIX = "dynctl_router_route_key_"


def api_key(name, **fields):
    return ApiKeyHash(name, hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **fields)


KEYS = (api_key("alice"), api_key("batch", route_key="night"))


def named(field="", keys=(), body=b"", **headers):
    fields = tuple((name.replace("_", "-").encode(), value) for name, value in headers.items())
    head = Request("POST", b"/v1/completions", "/v1/completions", b"", fields)
    content = b'{"model":"m","prompt":"x","max_tokens":7%b}' % body
    request = parse_request("/v1/completions", content, Settings())
    return RouteKeys(field, Keys(keys)).of(head, request)


def test_header_then_body_field_then_api_key_then_what_is_asked_for():
    user, alice, header = b',"user":"carol"', b"Bearer sk-alice", b"search"

    assert named() == "/v1/completions:8"
    assert named(body=user) == "/v1/completions:8", "no field is looked at unless one is named"
    assert named(keys=KEYS, authorization=alice) == "alice"
    assert named(keys=KEYS, authorization=b"Bearer sk-batch") == "night"
    assert named("user", KEYS, user, authorization=alice) == "carol"
    given = {"authorization": alice, "x_dynctl_route_key": header}
    assert named("user", KEYS, user, **given) == "search"


@pytest.mark.parametrize(
    ("limit", "kind"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (256, 256), (257, 512), (2**31 - 1, 2**31), ("null", "None")],
)
def test_limits_are_rounded_up_to_few_kinds_all_known_from_the_start(limit, kind):
    body = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"max_tokens":{limit}}}'
    request = parse_request("/v1/chat/completions", body.encode(), Settings())

    assert request.kind == f"/v1/chat/completions:{kind}"
    assert request.kind in KINDS


def test_what_is_named_by_nobody_takes_no_place_of_what_clients_name(run):
    async def main():
        async with routed(FakeEngine(tokens=1)) as bench:
            for limit in range(1, 130):
                await bench.client.complete(max_tokens=limit)
            body = {"model": MODEL, "prompt": "x"}
            for number in range(65):
                key = f"k{number}"
                await bench.client.post("/v1/completions", body, x_dynctl_route_key=key)
            sums = bench.desk.route_keys.sums
            kinds = [f"/v1/completions:{1 << bits}" for bits in range(9)]
            assert sums.names() == [*kinds, *(f"k{number}" for number in range(64))]
            assert sums.of("/v1/completions:128").codes == {200: 64}

    run(main)


def test_a_field_may_lie_deeper():
    team = b',"metadata":{"team":"ads","n":3}'

    assert named("metadata.team", body=team) == "ads"
    assert named("metadata.n", body=team) == "/v1/completions:8"
    assert named("metadata.team.x", body=team) == "/v1/completions:8"
    assert named("metadata", body=team) == "/v1/completions:8"


@pytest.mark.parametrize("name", ["", "x" * 65, "two\nlines", "\x85", "\u2028", "\x00"])
def test_what_cannot_be_a_key_is_as_if_it_were_not_there(name):
    import msgspec

    user = b',"user":%b' % msgspec.json.encode(name)

    assert named("user", body=user) == "/v1/completions:8"
    assert named(x_dynctl_route_key=name.encode()) == "/v1/completions:8"


def test_keys_of_the_configuration_are_told_apart_however_many_clients_invent():
    books = ByKey(["late"])
    for number in range(100):
        books.of(f"k{number}").ended(200)
    books.of("late").ended(200)
    books.of("late").took(30, 5)

    texts = "\n".join(books.lines())
    counts = {
        one.labels["route_key"]: one.value
        for one in parse(texts, {PREFIX + "requests_total"})[PREFIX + "requests_total"]
    }
    assert counts["late"] == counts["k63"] == 1
    assert counts["other"] == 100 - 64
    assert len(counts) == 66
    assert PREFIX + 'prompt_tokens_total{route_key="late"} 30' in texts


def test_each_key_has_its_requests_tokens_and_first_tokens(run):
    async def main():
        engine = FakeEngine(tokens=3)
        async with routed(engine, api_keys=KEYS, route_key_field="user") as bench:
            alice = {"authorization": "Bearer sk-alice"}
            body = {"model": MODEL, "prompt": "long enough to be looked at " * 40}
            for extra in ({}, {"stream": True}, {"user": "ads"}, {"prompt": "short"}):
                await bench.client.post("/v1/completions", body | extra, **alice)
            engine.go.clear()
            waiting = asyncio.create_task(
                bench.client.post("/v1/completions", body, authorization="Bearer sk-batch")
            )
            await until(lambda: engine.num_running == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: not bench.desk.flights)
            engine.go.set()
            text = (await bench.client.get("/metrics", **alice)).body.decode()

            def values(name, *labels):
                found = parse(text, {PREFIX + name})[PREFIX + name]
                return {tuple(one.labels[label] for label in labels): one.value for one in found}

            assert values("requests_total", "route_key", "code") == {
                ("alice", "200"): 3,
                ("ads", "200"): 1,
                ("night", "499"): 1,
            }
            assert values("output_tokens_total", "route_key") == {
                ("alice",): 9,
                ("ads",): 3,
                ("night",): 0,
            }
            prompts = values("prompt_tokens_total", "route_key")
            assert prompts[("alice",)] == 3 * prompts[("ads",)] > 0
            assert PREFIX + 'ttft_seconds_count{route_key="alice"} 1' in text
            assert PREFIX + 'ttft_seconds_bucket{route_key="alice",le="+Inf"} 1' in text
            doubled = add_expositions([text.encode(), text.encode()]).decode()
            assert PREFIX + 'ttft_seconds_count{route_key="alice"} 2' in doubled
            assert PREFIX + 'requests_total{route_key="alice",code="200"} 6' in doubled

    run(main)


PLAIN = {
    "engines": ["http://127.0.0.1:1"],
    "listen": "127.0.0.1:0",
    "policy": "kv",
    "tokenizer": None,
    "models": [],
    "tls": (None, None),
    "insecure_listen": False,
    "settings": [],
}


def test_a_file_of_keys_may_say_priority_and_route_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice=sk-alice-0001\nnight=sk-night-001 route-key=batch priority=low\n")

    alice, night = build_config(**PLAIN, api_keys=keys).api_keys

    assert (alice.priority, alice.route_key) == ("high", "")
    assert (night.priority, night.route_key) == ("low", "batch")
    for wrong in ("k=sk-secret-key and=more", "k=sk-secret-key more", "k=sk-secret-key priority=x"):
        keys.write_text(wrong)
        with pytest.raises(UsageError) as raised:
            build_config(**PLAIN, api_keys=keys)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"route_key_field": "metadata."},
        {"route_key_field": "."},
        {"api_keys": (api_key("a", route_key="x" * 65),)},
    ],
)
def test_a_configuration_that_can_name_no_key_is_refused(change):
    engines = (EngineTarget("e", "http://127.0.0.1:1"),)

    with pytest.raises(UsageError):
        check_config(RouterConfig("127.0.0.1:0", engines=engines, **change))
