"""Explaining what happened: admin socket, command, headers on request; policy and shadow changed live."""

import asyncio
import json
import random
import re

import pytest
from router_bench import until
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.cli import explain, policy, routers
from dynctl.cli.options import Output
from dynctl.core.kv_links import EnginePlace, LinkRate
from dynctl.errors import ConnectError, DynctlError, UsageError
from dynctl.http1.upstream import Address, Upstream
from dynctl.router.server import Entrance


async def ask(path, method, target):
    upstream = Upstream(Address(path=path))
    try:
        answer = await upstream.fetch(method, target)
    finally:
        await upstream.close()
    return answer.status, json.loads(answer.body)


async def opened(bench, directory):
    """An admin socket of a router that already runs."""
    entrance = Entrance(bench.desk)
    path = f"{directory}/admin.sock"
    await entrance.open_admin(path)
    return entrance, path


def test_a_request_is_explained_by_its_own_id_and_computed_again(run, short_dir, capsys):
    async def main():
        async with routed_sims(Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            entrance, path = await opened(bench, short_dir)
            prompt = prompt_of(random.Random(1), bench.text.words, 200)
            await generate(bench, prompt, 4)
            await until(lambda: len(bench.desk.index) >= 12)
            answer = await bench.client.complete(
                model="sim",
                prompt=prompt,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
            own_id = dict(answer.headers)[b"x-request-id"].decode()

            status, (decision,) = await ask(path, "GET", f"/decisions?request={own_id}")
            assert status == 200
            assert decision["overlap_tokens"] == decision["cached_tokens"] == 192
            assert decision["is_reproduced"]
            assert decision["counterfactual"]["overlap_tokens"] == 0
            assert decision["ttft_ms"] > 0
            assert len(decision["candidates"]) == 2

            (found,) = await routers.ask_socket(path, [f"/decisions?request={own_id}"])
            for item in explain._of_one_request(found):
                explain._show(item)
            shown = capsys.readouterr().out
            assert own_id in shown
            assert "192 tokens expected, 192 by the engine's count" in shown
            assert "the recorded inputs give the same engine" in shown
            assert (await ask(path, "GET", "/decisions?request=nobody"))[1] == []
            both = (await ask(path, "GET", "/decisions?limit=2"))[1]
            errors_ms = [abs(d["ttft_ms"] - sum(d["predicted"].values())) for d in both]
            counted = bench.desk.exposition().decode()
            [error_s] = re.findall(r"dynctl_router_ttft_error_seconds_sum (\S+)", counted)
            assert float(error_s) * 1e3 == pytest.approx(sum(errors_ms), abs=0.01)

            status, hits = await ask(path, "GET", "/hits")
            assert status == 200
            assert hits["requests"] == 2
            assert hits["reported_ratio"] == hits["predicted_ratio"] > 0.4
            assert (await ask(path, "GET", "/findings"))[1] == []
            await entrance.close(0.0)

    run(main)


def test_where_hits_went_is_told_for_all_requests_together(run, short_dir, capsys):
    async def main():
        sims = [Sim("e0", short_dir), Sim("e1", short_dir, prefix_caching=0)]
        async with routed_sims(*sims, settings={"probe_s": 60}) as bench:
            entrance, path = await opened(bench, short_dir)
            bench.desk.set_shadow("round_robin")
            prompt = prompt_of(random.Random(1), bench.text.words, 200)
            for _ in range(3):
                await generate(bench, prompt, 4)
            await until(lambda: len(bench.desk.probes.findings()) == 1)
            answers = {"router-a": await routers.ask_socket(path, explain._HIT_TARGETS)}
            explain._show_hits(answers, Output.TABLE)
            shown = capsys.readouterr().out
            assert "router-a: 3 requests, 600 tokens" in shown
            assert "% of own questions asked again" in shown
            assert "% if they forgot nothing" in shown
            assert "e1: the engine's prefix cache is off (caching_off)" in shown
            assert "fix: start it without --no-enable-prefix-caching" in shown
            assert "round_robin for kv" in shown
            assert "does not look at caches" not in shown
            answers["router-a"][3]["gain"] = {"hit_ratio": -0.0123, "band": 0.004}
            explain._show_hits(answers, Output.TABLE)
            assert "(-1.2 ± 0.4 points), TTFT" in capsys.readouterr().out
            explain._show_hits(answers, Output.JSON)
            (told,) = json.loads(capsys.readouterr().out)["routers"]
            assert set(told) == {"router", "policy", "hits", "findings", "shadow", "stickiness"}
            answers["router-a"][0]["policy"] = "round_robin"
            explain._show_hits(answers, Output.TABLE)
            assert "round_robin does not look at caches" in capsys.readouterr().out
            await entrance.close(0.0)

    run(main)


def test_policy_and_shadow_are_changed_live_without_dropping_a_stream(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir, decode_ms=10.0)) as bench:
            entrance, path = await opened(bench, short_dir)
            prompt = list(range(5, 60))
            under_way = asyncio.create_task(generate(bench, prompt, 150))
            await until(lambda: bench.desk.flights)
            for name in ("round_robin", "least_loaded", "prefix", "kv"):
                told = {"policy": name, "stickiness": 1.0}
                assert await ask(path, "POST", f"/policy?name={name}") == (200, told)
            for wrong in ("name=../secrets", "", "stickiness=much", "stickiness=-1&name=random"):
                status, refused = await ask(path, "POST", f"/policy?{wrong}")
                assert status == 400
                assert refused["error"]["message"]
            with pytest.raises(
                ConnectError, match="answered 400: that is no policy's name"
            ) as wrong:
                await routers.ask_socket(path, ["/policy"], ["/policy?unknown=1"])
            assert "older version" in wrong.value.hint
            told = {"policy": "kv", "stickiness": 0.5}
            assert await ask(path, "POST", "/policy?stickiness=0.5") == (200, told)
            await generate(bench, prompt, 2)
            assert bench.desk.ring.newest(1)[0].need.stickiness == 0.5
            assert (await ask(path, "POST", "/policy?stickiness=1"))[1]["stickiness"] == 1.0
            assert (await ask(path, "POST", "/shadow?policy=round_robin"))[0] == 200
            assert len(await under_way) == 150

            await generate(bench, prompt, 2)
            status, shadow = await ask(path, "GET", "/shadow")
            assert shadow["shadow"]["policy"] == "round_robin"
            assert shadow["num_decisions"] == 1
            assert shadow["real"]["policy"] == "kv"
            # What it was compared with is over: it begins anew beside the policy that serves now.
            assert (await ask(path, "POST", "/policy?name=prefix"))[0] == 200
            status, shadow = await ask(path, "GET", "/shadow")
            assert (shadow["real"]["policy"], shadow["num_decisions"]) == ("prefix", 0)
            assert await ask(path, "POST", "/shadow?policy=") == (200, None)
            await entrance.close(0.0)

    run(main)


def test_the_policy_command_changes_what_it_is_told_and_shows_the_rest(run, short_dir, capsys):
    async def main():
        async with routed_sims(Sim("e0", short_dir)) as bench:
            entrance, path = await opened(bench, short_dir)

            async def told(**flags):
                given = {"admin_socket": path, "output": Output.JSON} | flags
                await asyncio.to_thread(policy.command, **given)
                [row] = json.loads(capsys.readouterr().out)["routers"]
                stickiness.append(row["stickiness"])
                return row["policy"], row["shadow"], row["num_decisions"]

            stickiness = []
            assert await told() == ("kv", None, None)
            assert await told(stickiness=2.0) == ("kv", None, None)
            assert stickiness == [1.0, 2.0]
            assert await told(name="prefix") == ("prefix", None, None)
            assert await told(shadow="kv") == ("prefix", "kv", 0)
            await generate(bench, list(range(5, 60)), 2)
            assert await told() == ("prefix", "kv", 1)
            assert await told(no_shadow=True) == ("prefix", None, None)
            for flags in ({"name": "best"}, {"shadow": "best"}, {"name": "random", "shadow": ""}):
                with pytest.raises(DynctlError, match="none of the policies"):
                    await told(**flags)
            with pytest.raises(UsageError):
                await told(shadow="kv", no_shadow=True)
            assert await told() == ("prefix", None, None), "a refusal changes nothing"
            await entrance.close(0.0)

    run(main)


def test_predictions_are_sent_as_headers_only_on_request(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir)) as bench:
            upstream = bench.client.upstream
            for is_stream in (True, False):
                body = {"model": "sim", "prompt": [7] * 100, "max_tokens": 3, "stream": is_stream}
                for asked in ((), ((b"x-dynctl-explain", b"1"),)):
                    answer = await upstream.fetch(
                        "POST",
                        "/v1/completions",
                        ((b"content-type", b"application/json"), *asked),
                        json.dumps(body).encode(),
                    )
                    names = [name for name, _ in answer.headers if name.startswith(b"x-dynctl")]
                    assert answer.status == 200
                    assert bool(names) == bool(asked), names
                    if asked:
                        fields = dict(answer.headers)
                        assert fields[b"x-dynctl-engines"] == b"e0"
                        assert float(fields[b"x-dynctl-predicted-ttft-ms"]) > 0
                        assert fields[b"x-dynctl-queue-position"] == b"0"

    run(main)


def test_what_was_copied_is_told_with_its_link_for_one_request_and_for_all(run, short_dir, capsys):
    async def main():
        sims = [Sim("p0", short_dir, "prefill"), Sim("d0", short_dir, "decode")]
        places = (EnginePlace("p0", "a", has_rdma=True), EnginePlace("d0", "b", has_rdma=True))
        rates = (LinkRate("a", "b", "rdma", 0.004, latency_ms=0.1),)
        options = {"settings": {"kv_bytes_per_token": 131_072}, "places": places}
        options["link_rates"] = rates
        async with routed_sims(*sims, **options) as bench:
            entrance, path = await opened(bench, short_dir)
            await generate(bench, prompt_of(random.Random(1), bench.text.words, 200), 4)
            (found,) = await routers.ask_socket(path, ["/decisions?limit=2"])
            assert [(one["link"], one["move_tokens"], one["move_bytes"]) for one in found] == [
                ("rdma", 200, 200 * 131_072)
            ] * 2
            for one in found:
                explain._show(one)
            assert [one["link_price"] for one in found] == ["measured"] * 2
            (decode,) = [one for one in found if one["leg"] == "decode"]
            assert decode["predicted"] == {"transfer_ms": pytest.approx(2.1 + 200 * 0.004)}
            assert "copy, 200 tokens, 25 MiB, over RDMA" in capsys.readouterr().out
            answers = {"router-a": await routers.ask_socket(path, explain._HIT_TARGETS)}
            explain._show_hits(answers, Output.TABLE)
            assert "KV moved   25 MiB (200 tokens) over RDMA\n" in capsys.readouterr().out
            answers["router-a"][1].pop("moved_rdma_bytes")
            answers["router-a"][1].pop("moved_nvlink_bytes")
            answers["router-a"][1]["moved_nvlink_tokens"] = 5
            explain._show_hits(answers, Output.TABLE)
            shown = capsys.readouterr().out
            assert "KV moved   5 tokens over NVLink, 200 tokens over RDMA\n" in shown
            await entrance.close(0.0)

    run(main)


def test_a_router_of_another_version_that_does_not_tell_of_links_is_shown_all_the_same():
    decision = {"path": "copy", "costs": {"copy_ms": 1.0, "recompute_ms": 2.0}}
    assert explain._path(decision) == "copy (copy 1.0 ms, recompute 2.0 ms)"
    decision["link_price"] = "measured"
    assert explain._path(decision) == (
        "copy (copy 1.0 ms, recompute 2.0 ms; the link's price is as linktest measured)"
    )
    assert explain._moved({"requests": 3}) == ""
