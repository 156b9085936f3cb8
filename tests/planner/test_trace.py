"""What a recorded workload says: lengths, reuse, bursts, sessions, and which features pay."""

import json
import random

import pytest

from dynctl.errors import UsageError
from dynctl.planner.trace import advice, hits, look_at, model_len, reuse, workload_of
from dynctl.planner.trace_lines import read_trace


def lines(*records):
    return [json.dumps(record) for record in records]


def call(at_ms, blocks, osl=10, isl=None):
    return {
        "timestamp": at_ms,
        "input_length": isl or len(blocks) * 512,
        "output_length": osl,
        "hash_ids": blocks,
    }


def chats(num, turns):
    """Each turn's prompt begins with all of the one before."""
    return [
        call((turn * num + chat) * 100, [chat * 1000 + block for block in range(turn + 1)])
        for turn in range(turns)
        for chat in range(num)
    ]


def test_single_turns_reuse_nothing_and_kv_routing_is_skipped():
    trace = read_trace(lines(*[call(i * 100, [i * 2, i * 2 + 1]) for i in range(50)]), "t")
    facts = look_at(trace)

    assert facts.reuse_ceiling == 0
    assert facts.session_turns == 1
    assert advice(facts)[0].startswith("KV routing: skip")


def test_chats_reuse_what_a_chat_can_reuse():
    trace = read_trace(lines(*chats(10, 4)), "t")
    facts = look_at(trace)

    # Blocks found per turn are 0, 1, 2, 3 of 1, 2, 3, 4.
    assert facts.reuse_ceiling == pytest.approx(6 / 10, abs=0.01)
    assert facts.session_turns == 4
    assert advice(facts)[0].startswith("KV routing: pays, up to 60%")


def test_a_small_cache_holds_less_and_never_more_than_a_larger_one():
    rng = random.Random(1)
    records = [
        call(i * 10, [rng.randrange(3), *(100 + rng.randrange(9) for _ in range(3))])
        for i in range(300)
    ]
    trace = read_trace(lines(*records), "t")
    shares = [reuse(trace, tokens) for tokens in (512, 2048, 4096, 10**9)]

    assert shares == sorted(shares)
    assert shares[-1] == reuse(trace, None)
    assert shares[0] < shares[-1]


def test_texts_are_counted_and_cut_by_their_prefix():
    shared = "You are a helpful assistant. " * 40
    trace = read_trace(
        lines(
            {"timestamp_s": 1.0, "prompt": shared + "one", "output": "x" * 400},
            {"timestamp_s": 3.0, "prompt": shared + "two", "output": "y" * 400},
        ),
        "t",
    )

    assert trace.calls[0].at_s == 0
    assert trace.calls[1].osl_tokens == 100
    assert 0.3 < reuse(trace, None) < 0.5


def test_texts_may_say_how_long_an_answer_may_be_and_are_kept_when_asked_for():
    line = {"timestamp": 5, "messages": [{"role": "user", "content": [{"text": "hi"}]}]}
    trace = read_trace(lines(line | {"max_tokens": 7, "session": 3}), "t", keep_texts=True)
    [call] = trace.calls

    assert (call.osl_tokens, call.messages, call.session) == (7, (("user", "hi"),), "3")
    assert read_trace(lines(line | {"max_tokens": 7}), "t").calls[0].messages == ()


def test_a_prompt_that_is_null_is_none():
    line = {"timestamp": 5, "prompt": None, "max_tokens": 7}
    line["messages"] = [{"role": "system", "content": "a" * 400}, {"role": "user", "content": "b"}]
    [call] = read_trace(lines(line), "t").calls

    assert call.isl_tokens == len("system: user: b\n" + "a" * 400) // 4


def test_prompts_of_a_session_begin_with_the_one_before():
    made = [
        {"timestamp": i, "input_length": 100 * (i + 1), "output_length": 5, "session": "a"}
        for i in range(3)
    ]
    trace = read_trace(lines(*made, {**made[2], "session": "b"}), "t")

    assert list(hits(trace)) == [0, 96, 192, 0]


def test_bursts_are_told_from_a_steady_flow():
    steady = look_at(read_trace(lines(*[call(i * 100, [i]) for i in range(200)]), "t"))
    bursty = look_at(
        read_trace(lines(*[call((i // 20) * 20000 + i, [i]) for i in range(200)]), "t")
    )

    assert steady.gap_cv < 0.1
    assert bursty.gap_cv > 3
    assert any("bursts: arrivals vary" in line for line in advice(bursty))
    assert any("bursts: steady" in line for line in advice(steady))


def test_the_context_length_covers_the_trace_and_says_what_it_cuts():
    records = [call(i, [i], isl=1000, osl=24) for i in range(5000)]
    records[7] = call(7, [7], isl=100000)
    facts = look_at(read_trace(lines(*records), "t"))

    assert model_len(facts) == 1136
    assert any("cutting off the longest 0.1 % (up to 100010 tokens)" in t for t in advice(facts))


def test_the_workload_of_a_trace_has_its_means():
    work = workload_of(look_at(read_trace(lines(*chats(10, 4)), "t")))

    assert work.isl_tokens == 1280
    assert work.osl_tokens == 10
    assert work.rate_rps == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "t:2:2: this is no JSON"),
        ("[]", "t:2:1: a line has to be one JSON object"),
        ('{"timestamp": 1}', "t:2:1: 'input_length' is missing"),
        ('{"timestamp": 1, "input_length": 9, "output_length": -2}', "t:2:37: output_length"),
        ('{"timestamp": 1, "messages": [{"content": "x"}], "max_tokens": 3}', "t:2:18: messages"),
        (
            '{"timestamp": 1, "messages": [{"role": "user", "content": 7}]}',
            "content has to be text",
        ),
        ('{"timestamp": 1, "prompt": "x"}', "'output_length' is missing"),
        (
            '{"timestamp": 1, "session": [], "input_length": 1, "output_length": 1}',
            "t:2:18: session",
        ),
        (
            '{"timestamp": 1, "input_length": 10000001, "output_length": 1}',
            "t:2:18: input_length has to be a number of 0 or more, at most 1e+07",
        ),
        ('{"timestamp": 1%s, "input_length": 1}' % ("0" * 400), "t:2:2: timestamp has to be"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "0 or more"),
        ('{"timestamp": 1, "input_length": "a", "output_length": 1}', "has to be a number"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
    ],
)
def test_bad_lines_are_named(line, said):
    with pytest.raises(UsageError, match="t:2") as caught:
        read_trace([*lines(call(0, [1])), line], "t")

    assert said in caught.value.message


def test_an_empty_trace_is_refused():
    with pytest.raises(UsageError, match="no request"):
        read_trace(["", "\n"], "t")
