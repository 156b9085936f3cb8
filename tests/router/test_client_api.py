"""What clients see: the OpenAI library unchanged, errors in its shape, keys, refused fields."""

import asyncio
import hashlib
import json
import re
from pathlib import Path

import msgspec
import openai
import pytest
from router_bench import events, routed, until
from router_fakes import MODEL, FakeEngine

from dynctl.errors import UsageError
from dynctl.router.api.requests import RefusedError, parse_request
from dynctl.router.config import (
    ApiKeyHash,
    EngineTarget,
    RouterConfig,
    Settings,
    check_config,
    parse_config,
)

KEY = ApiKeyHash("alice", hashlib.sha256(b"sk-alice-1").hexdigest())


def library(bench, key="none"):
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{bench.router.port}/v1", api_key=key, max_retries=0
    )


def test_the_openai_library_works_unchanged(run):
    async def main():
        async with routed(FakeEngine()) as bench, library(bench) as client:
            said = "".join(f" e0{i}" for i in range(6))
            messages = [{"role": "user", "content": "hi"}]

            whole = await client.chat.completions.create(model=MODEL, messages=messages)
            assert whole.choices[0].message.content == said
            assert whole.usage.completion_tokens == 6
            assert whole._request_id

            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True
            )
            parts = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in parts) == said
            assert parts[-1].choices[0].finish_reason == "length"

            counted = await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            assert [c async for c in counted][-1].usage.total_tokens == 26

            text = await client.completions.create(model=MODEL, prompt="hi", max_tokens=6)
            assert text.choices[0].text == said

            stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
            assert "".join([c.choices[0].text async for c in stream if c.choices]) == said

            models = await client.models.list()
            assert [m.id for m in models.data] == [MODEL]

    run(main)


def test_the_openai_library_sees_our_errors_as_its_own(run):
    async def main():
        broken = FakeEngine(script=lambda body: "cut:2" if body.get("stream") else "status:400")
        async with routed(broken) as bench, library(bench) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="nope", prompt="hi")
            assert missing.value.code == "model_not_found"
            assert missing.value.param == "model"

            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="hi")

            stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
            with pytest.raises(openai.APIError, match="stream broke"):
                [chunk async for chunk in stream]

    run(main)


def test_keys_are_asked_for_before_the_body_is_read(run):
    async def main():
        async with routed(FakeEngine(), api_keys=(KEY,)) as bench:
            async with library(bench, "sk-alice-1") as good, library(bench, "sk-bob") as bad:
                assert (await good.completions.create(model=MODEL, prompt="hi")).choices
                with pytest.raises(openai.AuthenticationError):
                    await bad.completions.create(model=MODEL, prompt="hi")

            reader, writer = await asyncio.open_connection("127.0.0.1", bench.router.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9000000\r\n\r\n"
            )
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 60)
            writer.close()
            await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"x-request-id" in answer
            assert (await bench.client.get("/health")).status == 200
            assert (await bench.client.get("/metrics")).status == 401
            assert (await bench.client.get("/v1/models")).status == 401

    run(main)


REFUSED = [
    (b"{", 400),
    (b"[]", 400),
    (b'{"model":"tiny","prompt":NaN}', 400),
    (b'{"model":"tiny","model":"tiny","prompt":"x"}', 400),
    (b'{"model":"tiny","prompt":"x","stop":{"a":1,"a":2}}', 400),
    (b'{"model":"tiny","prompt":"\\ud800"}', 400),
    (b'{"model":"tiny","prompt":"\xff"}', 400),
    (b"\xef\xbb\xbf" + b'{"model":"tiny","prompt":"x"}', 400),
    ('{"model":"tiny","prompt":"x"}'.encode("utf-16"), 400),
    (b'{"model":"tiny","prompt":"x","logit_bias":' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
    (b'{"model":"tiny","prompt":"x","a":' + b"[" * 70 + b"]" * 70 + b"}", 400),
    (b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}", 400),
    (b'{"prompt":"x"}', 400),
    (b'{"model":"tiny"}', 400),
    (b'{"model":"tiny","prompt":[]}', 400),
    (b'{"model":"tiny","prompt":[1,-1]}', 400),
    (b'{"model":"tiny","prompt":[1,"x"]}', 400),
    (b'{"model":"tiny","prompt":[1,{"a":1,"a":2}]}', 400),
    (b'{"model":"tiny","prompt":[1,true]}', 400),
    (json.dumps({"model": "tiny", "prompt": ["x"] * 65}).encode(), 400),
    (b'{"model":"tiny","prompt":"x","n":0}', 400),
    (b'{"model":"tiny","prompt":"x","n":1000000000}', 400),
    (b'{"model":"tiny","prompt":"x","max_tokens":-1}', 400),
    (b'{"model":"tiny","prompt":"x","max_tokens":true}', 400),
    (b'{"model":"tiny","prompt":"x","stream":"yes"}', 400),
    (b'{"model":"tiny","prompt":"x","kv_transfer_params":{"do_remote_prefill":true}}', 400),
    (b'{"model":"tiny","prompt":"x","kv_transfer_params":null}', 400),
    (b'{"model":"tiny","prompt":"x","ec_transfer_params":{}}', 400),
    (b'{"model":"tiny","prompt":"x","vllm_xargs":{}}', 400),
    (b'{"model":"tiny","prompt":"x","chat_template":"{{x}}"}', 400),
    (b'{"model":"tiny","prompt":"x","chat_template_kwargs":{"chat_template":"x"}}', 400),
    (b'{"model":"nope","prompt":"x"}', 404),
]


def test_bad_bodies_are_refused_at_the_router_in_the_openai_shape(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine) as bench:
            for body, status in REFUSED:
                answer = await bench.client.post("/v1/completions", body)
                assert answer.status == status, (body[:80], answer.body)
                error = json.loads(answer.body)["error"]
                assert set(error) == {"message", "type", "code", "param"}
                assert dict(answer.headers)[b"x-request-id"]
            assert engine.requests == []
            bench.assert_books_balance()

    run(main)


def test_other_content_types_encodings_paths_and_methods_are_refused(run):
    async def main():
        async with routed(FakeEngine()) as bench:
            post, get = bench.client.post, bench.client.get
            body = {"model": MODEL, "prompt": "x"}
            assert (await post("/v1/completions", body, content_type="text/plain")).status == 415
            assert (await post("/v1/completions", body, content_encoding="gzip")).status == 415
            assert (await get("/v1/completions")).status == 405
            assert (await get("/v1/engines")).status == 404
            assert (await post("/tokenize", body)).status == 404
            assert (await get("/decisions")).status == 404

    run(main)


def test_fields_the_router_owns_are_replaced_and_headers_never_pass(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine) as bench:
            await bench.client.post(
                "/v1/completions",
                {
                    "model": MODEL,
                    "prompt": "x",
                    "priority": -9,
                    "request_id": "mine",
                    "cache_salt": "s",
                },
                x_data_parallel_rank="3",
                x_prefiller_host_port="10.0.0.1:80",
                x_request_id="client-1",
            )

            assert set(engine.requests[0]) == {"model", "prompt"}
            passed = set(engine.headers[0])
            assert passed == {b"host", b"content-type", b"x-request-id"}
            assert engine.headers[0][b"x-request-id"] not in {b"", b"client-1"}

    run(main)


def test_a_harmless_request_id_comes_back_another_is_replaced(run):
    async def main():
        async with routed(FakeEngine()) as bench:
            for given, is_kept in (("client-1", True), ("a" * 200, False), ("a b", False)):
                answer = await bench.client.post(
                    "/v1/completions", {"model": MODEL, "prompt": "x"}, x_request_id=given
                )
                assert (dict(answer.headers)[b"x-request-id"] == given.encode()) == is_kept

    run(main)


def test_served_names_stand_for_the_engines_own(run):
    async def main():
        engine = FakeEngine()
        async with routed(engine, served_names=("chat", "chat-latest")) as bench:
            assert (await bench.client.complete(model="chat")).status == 200
            assert (await bench.client.complete(model=MODEL)).status == 404
            assert engine.requests[0]["model"] == MODEL
            models = json.loads((await bench.client.get("/v1/models")).body)["data"]
            assert [(m["id"], m["max_model_len"]) for m in models] == [
                ("chat", 4096),
                ("chat-latest", 4096),
            ]

    run(main)


LENGTHS = "dynctl_router_expected_output_tokens"
ANSWERS = "dynctl_router_route_key_requests_total"


def test_metrics_say_what_happened(run):
    async def main():
        from dynctl.core.exposition import parse, router_sample

        async with routed(FakeEngine()) as bench:
            await bench.client.complete()
            await bench.client.complete(stream=True)
            body = {"model": MODEL, "prompt": "hello"}
            for number in range(100):
                key = 'a"b\\c' if number == 0 else f"kind {number}"
                await bench.client.post("/v1/completions", body, x_dynctl_route_key=key)
            text = (await bench.client.get("/metrics")).body.decode()

            lengths = parse(text, {LENGTHS})[LENGTHS]
            assert len(lengths) == 65, "clients cannot make any number of them"
            assert {one.labels["route_key"] for one in lengths} >= {"/v1/completions:16", 'a"b\\c'}
            assert {one.value for one in lengths} == {6.0}
            answers = {
                one.labels["route_key"]: one.value for one in parse(text, {ANSWERS})[ANSWERS]
            }
            assert len(answers) == 66
            assert answers['a"b\\c'] == answers["kind 1"] == 1
            assert sum(answers.values()) == 102
            assert answers["other"] == 100 - 64
            assert answers["/v1/completions:16"] == 2
            sample = router_sample(text, "r", "d")
            assert sample.requests_total == 102
            assert sample.errors_total == 0
            assert sample.inflight == sample.queued == 0
            assert sample.prompt_tokens_total == 102 * 20
            assert sample.output_tokens_total == 102 * 6
            assert sample.ttft_s.counts[-1] == 1
            assert sample.itl_s.counts[-1] == 5

    run(main)


def test_every_metric_is_in_the_documentation_and_the_other_way_round(run, tmp_path):
    async def main():
        # Some are shown only where there is something to count.
        settings = {"kv_bytes_per_token": 1}
        async with routed(FakeEngine(), settings=settings, decision_log=str(tmp_path)) as bench:
            await bench.client.complete(stream=True)
            text = (await bench.client.get("/metrics")).body.decode()
        exported = {
            (line.split()[2], line.split()[3])
            for line in text.splitlines()
            if line.startswith("# TYPE")
        }
        table = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
        rows = re.findall(r"^\| `(dynctl_router_\w+)` \| (\w+) \|", table, re.MULTILINE)
        assert exported == set(rows)

    run(main)


def test_a_drain_lets_streams_end_and_takes_nothing_new(run):
    async def main():
        engine = FakeEngine(tokens=20, gap_s=0.02)
        async with routed(engine) as bench:
            stream = asyncio.create_task(bench.client.complete(stream=True))
            await until(lambda: bench.desk.metrics.ttft.count == 1)
            engine.go.clear()
            drain = asyncio.create_task(bench.router.drain())
            await asyncio.sleep(0)
            refused = await bench.client.complete()
            health = await bench.client.get("/health")
            engine.go.set()
            answer = await stream
            await drain

            assert refused.status == 503
            assert json.loads(refused.body)["error"]["code"] == "draining"
            assert health.status == 503
            assert events(answer.body)[-1] == b"[DONE]"

    run(main)


def test_the_body_an_engine_gets_says_what_the_client_said():
    body = b'{"model":"m","prompt":"x","temperature":0.1,"seed":123456789012345678901234567890,"extra":{"a":[1,null]}}'

    request = parse_request("/v1/completions", body, Settings())

    sent = json.loads(request.main_body("engine-name", None))
    assert sent == json.loads(body) | {"model": "engine-name"}
    prefill = json.loads(request.prefill_body("engine-name"))
    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}


def test_parsing_a_megabyte_is_bounded():
    import time

    body = json.dumps({"model": "m", "prompt": 'say "x" \\ ' * 100_000}).encode()
    started = time.process_time()
    parse_request("/v1/completions", body, Settings())
    assert time.process_time() - started < 10.0  # what grows faster than its length takes minutes

    with pytest.raises(RefusedError):
        parse_request("/v1/completions", b'{"a":' * 100_000, Settings())


def test_configurations_that_open_the_door_or_are_misspelt_are_refused():
    engine = EngineTarget("e", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="lets other machines in"):
        check_config(RouterConfig("0.0.0.0:8000", engines=(engine,)))
    check_config(RouterConfig("0.0.0.0:8000", engines=(engine,), allow_insecure_listen=True))
    for text in (
        b'{"listen":"127.0.0.1:1","engnes":[]}',
        b'{"listen":"nowhere","engines":[{"id":"e","url":"http://h:1"}]}',
        b'{"listen":"127.0.0.1:1"}',
        b'{"listen":"127.0.0.1:1","engines":[{"id":"e","url":"http://h:1","role":"both"}]}',
        b'{"listen":"127.0.0.1:1","engines":[{"id":"e","url":"http://h:1"}],"settings":{"retries":1}}',
        b'{"listen":"127.0.0.1:1","relays":[{"host_name":"h","address":"a","port":1}]}',
    ):
        with pytest.raises(UsageError):
            parse_config(text)


def test_a_configuration_survives_its_own_json():
    config = RouterConfig(
        "127.0.0.1:0",
        engines=(EngineTarget("e", "http://127.0.0.1:1", "prefill"),),
        api_keys=(KEY,),
        settings=Settings(max_retries=1, gap_timeout_s=3.5),
    )

    assert parse_config(msgspec.json.encode(config)) == config


@pytest.mark.parametrize("space", ["", " ", "\t\n"])
@pytest.mark.parametrize("text", ["plain", ":", " :", '\\"', "\\u0022:", "\\n", "\\\\", '\\":'])
@pytest.mark.parametrize("double", [False, True])
def test_a_key_that_is_there_twice_is_refused_whatever_strings_hold(space, text, double):
    prompts = [f'"prompt"{space}:"{text}"'] * (2 if double else 1)
    fields = [f'"model"{space}: "m"', *prompts, f'"user":{space}"{text}"']
    body = ("{" + ",".join(fields) + "}").encode()
    if double:
        with pytest.raises(RefusedError, match="twice"):
            parse_request("/v1/completions", body, Settings())
    else:
        request = parse_request("/v1/completions", body, Settings())
        assert json.loads(request.encoded) == json.loads(body)
