"""Which events carry tokens, on recorded bytes and times."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.bench.stream import MAX_LINE_BYTES, Chunk, Stream


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(**fields):
    return {"choices": [{"delta": fields}]}


def fed(*pieces):
    stream = Stream()
    for at_s, piece in pieces:
        stream.feed(piece if isinstance(piece, bytes) else event(piece), at_s)
    return stream


def test_role_empty_usage_and_comment_frames_are_no_first_token():
    stream = fed(
        (1.0, delta(role="assistant", content="")),
        (2.0, b": ping\n\n"),
        (3.0, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}),
        (4.0, delta(content="")),
        (5.0, delta(content="Hi")),
        (6.0, b"data: [DONE]\n\n"),
    )

    assert stream.first_s == 5.0
    assert stream.chunks == (Chunk(5.0, None),)
    assert stream.end_s == 6.0
    assert stream.text == "Hi"


@pytest.mark.parametrize(
    "fields", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}]
)
def test_reasoning_and_tool_calls_are_first_tokens(fields):
    assert fed((1.0, delta(**fields))).first_s == 1.0


def test_the_first_answer_token_comes_after_reasoning():
    stream = fed((1.0, delta(reasoning="hm")), (2.0, delta(content="yes")))

    assert (stream.first_s, stream.first_answer_s) == (1.0, 2.0)
    assert stream.text == "yes"


def test_completions_carry_text():
    stream = fed((1.0, {"choices": [{"text": "a"}]}), (2.0, {"choices": [{"text": "b"}]}))

    assert stream.text == "ab"
    assert len(stream.chunks) == 2


def test_per_chunk_usage_gives_the_tokens_so_far_and_the_last_usage_wins():
    stream = fed(
        (1.0, delta(content="a") | {"usage": {"prompt_tokens": 9, "completion_tokens": 2}}),
        (2.0, delta(content="b") | {"usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
        (
            3.0,
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 8},
                },
            },
        ),
    )

    assert stream.chunks == (Chunk(1.0, 2), Chunk(2.0, 3))
    assert (stream.prompt_tokens, stream.output_tokens, stream.cached_tokens) == (9, 4, 8)


def test_an_error_event_ends_it():
    stream = fed(
        (1.0, delta(content="a")), (2.0, {"error": {"message": "lost"}}), (3.0, delta(content="b"))
    )

    assert stream.error == "error event: lost"
    assert len(stream.chunks) == 1


def test_garbage_is_an_error_not_an_exception():
    assert "no answer chunk" in fed((1.0, b"data: {oops\n\n")).error
    assert "longer than" in fed((1.0, b"x" * (MAX_LINE_BYTES + 1))).error


def test_nothing_counts_after_done():
    assert fed((1.0, b"data: [DONE]\n\n"), (2.0, delta(content="late"))).first_s is None


WHOLE = (
    event(delta(role="assistant"))
    + b": c\r\n\r\n"
    + b'data: {"choices":[{"delta":\r\ndata: {"content":"x"}}]}\r\n\r\n'
    + event(delta(content="y\n\u20ac"))
    + b"event: message\nid: 3\n"
    + event(b"[DONE]")
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_any_split_of_the_bytes_reads_the_same(cuts):
    cuts = sorted({0, *cuts, len(WHOLE)})
    stream = fed(*((1.0, WHOLE[a:b]) for a, b in itertools.pairwise(cuts)))

    assert stream.error is None
    assert stream.text == "xy\n\u20ac"
    assert len(stream.chunks) == 2
    assert stream.end_s == 1.0
