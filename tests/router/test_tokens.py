"""Prompts are tokenised as the engine does it, off the loop where that takes long, and once."""

import asyncio
import json

import pytest
from router_bench import routed, until
from router_fakes import FakeEngine
from router_sims import Sim, prompt_of, routed_sims

from dynctl.errors import RouterError
from dynctl.router.api.requests import parse_request
from dynctl.router.config import Settings
from dynctl.router.template import ChatTemplate
from dynctl.router.tokens import PromptTokens, load_tokenizer
from dynctl.sim.options import MODEL_DIR

SETTINGS = Settings(short_request_chars=0)


def request(**body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return parse_request(path, json.dumps({"model": "m", **body}).encode(), SETTINGS)


async def tokenized(tokens, wanted):
    future = asyncio.get_running_loop().create_future()
    tokens.submit(wanted, future.set_result)
    return await asyncio.wait_for(future, 60)


def test_short_prompts_are_done_at_once_long_ones_in_a_thread_and_repeats_come_from_the_cache(run):
    async def main():
        tokenizer = load_tokenizer(str(MODEL_DIR))
        tokens = PromptTokens(tokenizer, SETTINGS)
        long = "the sea and the wind " * 500
        assert (await tokenized(tokens, request(prompt="hello sea"))).how == "inline"
        assert (await tokenized(tokens, request(prompt="hello sea"))).how == "cache"
        first = await tokenized(tokens, request(prompt=long))
        again = await tokenized(tokens, request(prompt=long))
        assert (first.how, again.how) == ("thread", "cache")
        assert list(first.ids) == list(again.ids) == tokenizer.encode(long, has_special=True)
        given = await tokenized(tokens, request(prompt=[5, 6, 7]))
        assert (given.how, list(given.ids)) == ("given", [5, 6, 7])
        for unknowable in (
            request(prompt=["a", "b"]),
            request(prompt="a", truncate_prompt_tokens=3),
            request(
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
            ),
        ):
            assert (await tokenized(tokens, unknowable)).how == "none"
        tokens.close()

    run(main)


def test_prompts_below_the_limit_are_not_tokenised_by_rule_and_counted(run):
    async def main():
        tokens = PromptTokens(load_tokenizer(str(MODEL_DIR)), Settings(short_request_chars=40))
        for body, how in (
            ({"prompt": "x" * 39}, "short"),
            ({"prompt": "x" * 40}, "inline"),
            ({"messages": [{"role": "user", "content": "y" * 39}]}, "short"),
            ({"messages": [{"role": "user", "content": "y" * 20}] * 2}, "inline"),
            ({"prompt": [1, 2, 3]}, "given"),
        ):
            found = await tokenized(tokens, request(**body))
            assert found.how == how, body
            assert (found.ids is None) == (how == "short")
        tokens.close()
        async with routed(FakeEngine(), tokenizer=str(MODEL_DIR)) as bench:
            assert (await bench.client.complete(prompt="hi")).status == 200
            assert (await bench.client.complete(prompt="hi " * 300)).status == 200
            counted = bench.desk.metrics.tokenized
            assert counted.value("short") == counted.value("inline") == 1

    run(main)


def test_the_cache_keeps_to_its_budget(run):
    async def main():
        tokens = PromptTokens(
            load_tokenizer(str(MODEL_DIR)), Settings(token_cache_bytes=5000, short_request_chars=0)
        )
        for i in range(40):
            await tokenized(tokens, request(prompt=f"prompt {i} " * 20))
        assert tokens._cache_bytes <= 5000
        assert 1 <= len(tokens._cache) < 40
        tokens.close()

    run(main)


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(RouterError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RouterError):
        load_tokenizer(str(tmp_path))


def test_templates_render_parts_tools_and_arguments_like_the_engine():
    source = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %}{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<bot>{% endif %}{{ eos_token }}"
    )
    template = ChatTemplate(source, {"eos_token": "</s>"})
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
    ]

    text = template.render({"messages": messages, "tools": [{"a": "<é>"}]})

    assert text == '<user>a\nb<assistant>c[Rome][{"a": "<é>"}]<bot></s>'
    assert template.render({"messages": messages, "continue_final_message": True}) is None


def test_a_template_that_refuses_or_reaches_out_gives_no_text():
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert ChatTemplate("{{ raise_exception('no') }}", {}).render(body) is None
    assert ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render(body) is None
    with pytest.raises(RouterError):
        ChatTemplate("{% for %}", {})


def test_parity_is_checked_and_an_engine_that_differs_is_not_matched_by_tokens(
    run, short_dir, tmp_path, caplog
):
    other = json.loads((MODEL_DIR / "tokenizer.json").read_bytes())
    vocabulary = other["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    # A vocabulary with all ids moved around: every text comes out differently.
    other["model"]["vocab"] = dict(
        zip(vocabulary, sorted(vocabulary.values(), reverse=True), strict=True)
    )
    other["added_tokens"] = []
    other["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))

    async def main():
        import random

        async with routed_sims(Sim("e0", short_dir), tokenizer=None) as bench:
            assert bench.desk.workers.get("e0").parity == "unverified"
        sim = Sim("e1", short_dir)
        async with routed_sims(sim, tokenizer=str(tmp_path), parity="mismatch") as bench:
            prompt = prompt_of(random.Random(1), bench.text.words, 100)
            for _ in range(2):
                assert (
                    await bench.client.complete(model="sim", prompt=prompt, max_tokens=4)
                ).status == 200
                await until(lambda: bench.desk.index.num_blocks("e1") > 0)
            assert json.loads(bench.desk.ring.to_json(1))[0]["overlap_tokens"] == 0
            assert 'tokenizer_engines{parity="mismatch"} 1' in bench.desk.exposition().decode()
        assert "counts tokens differently" in caplog.text

    run(main)


def test_an_engine_without_tokenize_is_trusted_and_marked_unverified(run, caplog):
    async def main():
        async with routed(FakeEngine(), tokenizer=str(MODEL_DIR)) as bench:
            await until(lambda: "not verified" in caplog.text)
            assert bench.desk.workers.get("e0").parity == "unverified"
            assert (await bench.client.complete()).status == 200

    run(main)
