"""Tokens of parts put together are the tokens of the whole, turn n costs its own turn, and no template runs for ever."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_bench import routed
from router_fakes import FakeEngine
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from dynctl.router.api.requests import CHAT, COMPLETIONS, ApiRequest
from dynctl.router.config import Settings
from dynctl.router.template import ChatTemplate
from dynctl.router.text_blocks import pseudo_ids
from dynctl.router.tokens import ModelTokenizer, PromptTokens, load_tokenizer
from dynctl.router.units import UnitCutter
from dynctl.sim.options import MODEL_DIR

SPECIAL = ("<|a|>", "<|a|>b", "[X]", "</s>")


def made(pre_tokenizer, normalizer=None, **flags):
    letters = sorted({*"abcdefgh <>|[]X/s▁Ġ\nĊé日", *pre_tokenizers.ByteLevel.alphabet()})
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    merges = []
    for left, right in (("a", "b"), ("ab", "c"), ("▁", "a"), ("Ġ", "a"), ("Ġa", "b"), ("Ċ", "a")):
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True, **flags) for name in SPECIAL]
    )
    return tokenizer


TOKENIZERS = {
    "bytes": made(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, prefixed": made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first": made(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": made(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "normalised": made(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.NFKC()]),
    ),
    "greedy": made(pre_tokenizers.ByteLevel(add_prefix_space=False), rstrip=True),
    "packaged": Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")),
}
PIECES = (
    *SPECIAL,
    "<|start|>",
    "<|end|>",
    "ab",
    "abc",
    " a",
    " ab",
    "\n",
    "a",
    " ",
    "é日",
    "<|a",
    "b|>",
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=150, deadline=None)
def test_parts_together_are_the_whole(name, pieces):
    tokenizer = TOKENIZERS[name]
    cutter = UnitCutter(tokenizer)
    text = "".join(pieces)
    parts = cutter.cut(text)
    assert "".join(parts) == text
    ids = [one for part in cutter.encode(parts) for one in part]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_texts_are_cut_where_it_is_exact_and_stay_whole_where_it_is_not():
    assert len(UnitCutter(TOKENIZERS["bytes"]).cut("x<|a|>b<|a|>[X]")) == 4
    assert UnitCutter(TOKENIZERS["greedy"]).cut("x<|a|> y[X]") == ["x<|a|> y[X]"]


@pytest.mark.source
def test_a_further_turn_costs_that_turn_alone(run):
    async def main():
        tokenizer = load_tokenizer(str(MODEL_DIR))
        tokens = PromptTokens(tokenizer, Settings(short_request_chars=0))
        encoded = []
        inner = tokenizer.cutter.encode
        tokenizer.cutter.encode = lambda parts: encoded.append(list(parts)) or inner(parts)
        draw, messages = random.Random(1), [{"role": "system", "content": "Be brief. " * 300}]
        for turn in range(6):
            said = " ".join(draw.choice(("sea", "wind", "ship")) for _ in range(100)) + f" {turn}"
            messages.append({"role": "user", "content": said})
            request = ApiRequest.of(CHAT, {"model": "m", "messages": messages})
            encoded.clear()
            future = asyncio.get_running_loop().create_future()
            tokens.submit(request, future.set_result)
            found = await future
            assert found.how == "thread"
            assert list(found.ids) == tokenizer.chat_ids(messages)
            new = "".join(part for parts in encoded for part in parts)
            assert said in new
            assert (messages[0]["content"] in new) == (turn == 0)
            messages.append({"role": "assistant", "content": f"answer {turn}"})
        tokens.close()

    run(main)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 2000000000 }}",
        "{{ [1] * 2000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% for a in 'a' * 999999 %}{% for b in messages * 1000 %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_would_run_for_ever_ends(source):
    template = ChatTemplate(source, {})
    assert template.render({"messages": [{"role": "user", "content": "x"}]}) is None


def test_counting_changes_nothing_for_sound_templates():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{% if loop.last %}!{% endif %}"
        "{% for k, v in m.items() %}{{ k }}={{ v * 1 }};{% else %}none{% endfor %}{% endfor %}"
        "{% for t in missing %}x{% else %}no tools{% endfor %}{{ '-' * 3 }}{{ 2 ** 3 }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    expected = "1/2userrole=user;content=a;2/2tool!role=tool;content=b;no tools---8"
    template = ChatTemplate(source, {})
    for _ in range(3):
        assert template.render({"messages": messages}) == expected
    long = {"messages": [{"role": "user", "content": "x"}] * 5000}
    assert template.render(long).startswith("1/5000user")


def test_text_stands_for_tokens_where_there_is_no_tokenizer():
    def ids(**body):
        endpoint = CHAT if "messages" in body else COMPLETIONS
        return pseudo_ids(ApiRequest.of(endpoint, {"model": "m", **body}))

    first = [{"role": "user", "content": "tell me " * 20}]
    more = [*first, {"role": "assistant", "content": "no"}]
    a, b = ids(messages=first), ids(messages=more)
    assert a == b[: len(a)]
    assert len(b) > len(a) > 40
    assert ids(messages=first, tools=[{"type": "function"}])[:8] != a[:8]
    assert ids(prompt="abcdefgh")[1:].tobytes() == b"abcdefgh"
    assert ids(prompt=["a", "b"]) is None


def test_without_a_tokenizer_conversations_stay_where_they_were(run):
    async def main():
        engines = [FakeEngine(f"e{i}") for i in range(3)]
        async with routed(*engines, settings={"short_request_chars": 64}) as bench:
            desk = bench.desk
            talks = [
                [{"role": "user", "content": f"{n} " + "once upon a time " * 60}] for n in range(9)
            ]
            homes = {}
            for turn in range(4):
                for number, messages in enumerate(talks):
                    before = [len(engine.requests) for engine in engines]
                    assert (await bench.client.chat(messages=messages)).status == 200
                    after = [len(engine.requests) for engine in engines]
                    home = [b != a for a, b in zip(before, after, strict=True)].index(True)
                    assert homes.setdefault(number, home) == home, (turn, number)
                    messages.append({"role": "assistant", "content": "and then " * 30})
                    messages.append({"role": "user", "content": f"go on {turn} " * 20})
            assert desk.metrics.tokenized.value("text") == 36
            assert len(set(homes.values())) > 1
            # Past the few seconds a prompt just sent is believed for, the blocks are still there.
            held = sum(desk.index.num_blocks(engine.name) for engine in engines)
            assert held > 300

    run(main)


def test_blocks_of_text_are_dropped_at_the_engines_capacity(run):
    async def main():
        async with routed(FakeEngine("e0"), settings={"short_request_chars": 0}) as bench:
            worker = bench.desk.workers.get("e0")
            limit = worker.capacity_tokens // worker.block_size
            assert limit == 1000
            for number in range(30):
                await bench.client.complete(prompt=f"{number} " + "x y z " * 700)
                assert bench.desk.index.num_blocks("e0") <= limit
            assert bench.desk.index.num_blocks("e0") == limit

    run(main)


def test_model_tokenizer_has_a_cutter():
    assert isinstance(ModelTokenizer(TOKENIZERS["bytes"], None).cutter, UnitCutter)
