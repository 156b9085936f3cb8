"""Streams are followed the same way however they are cut, and never made to look whole when they are not."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.router.api.streams import StreamFollower, read_answer

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def chunk(text, finish=None, **extra):
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps(
            {"choices": [choice], **extra}, separators=(",", ":"), ensure_ascii=False
        ).encode()
        + b"\n\n"
    )


def tail(**extra):
    return (
        b"data: " + json.dumps({"choices": [], **extra}, separators=(",", ":")).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
TEXTS = st.lists(st.text(alphabet='aé日👩"\\,:{}\n usage', max_size=12), min_size=1, max_size=5)


def feed(pieces, *, hides_usage):
    follower = StreamFollower(hides_usage=hides_usage)
    return follower, b"".join(follower.feed(piece) for piece in pieces)


@given(TEXTS, st.lists(st.integers(1, 400), max_size=12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same_bytes(texts, cuts, is_asked):
    clean = b"".join(chunk(t) for t in texts) + chunk("x", "stop")
    nulled = b"".join(chunk(t, usage=None) for t in texts) + chunk("x", "stop", usage=None)
    stream = nulled + tail(usage=USAGE) + DONE
    places = sorted({cut % len(stream) for cut in cuts})
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]

    follower, out = feed(pieces, hides_usage=not is_asked)

    assert out == (stream if is_asked else clean + DONE)
    assert follower.is_done
    assert follower.ended() == ""
    assert follower.usage.prompt_tokens == 5
    assert follower.usage.cached_tokens == 3
    assert follower.num_token_events == sum(map(bool, texts)) + 1


def chat(text, finish=None, **extra):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, **extra}
    document = {"id": "c", "usage": None, "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def test_events_of_a_shape_seen_before_are_counted_whatever_the_read_holds():
    first, more = chat(" one"), [chat(f" {i}") for i in range(40)]
    stream = b"".join([first, *more, chat("", "stop"), DONE])
    for size in (1, 7, 97, 98, 99, 1000, len(stream)):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        follower, out = feed(pieces, hides_usage=False)
        assert out == stream
        assert follower.num_token_events == 41
        assert follower.is_done


def test_nothing_hides_behind_a_shape_seen_before():
    good = chat("a")
    shape = len(good) - len(b"a")
    for bad, why in (
        (chat("b", "error"), "the engine ended it with error"),
        (
            chat("b").replace(b'"b"', b'"b\n\ndata: [DONE]\n\n"'),
            "an event that is no completion chunk",
        ),
        (chat("b").replace(b'"content": "b"', b'"content": 5'), ""),
        (b'data: {"error":{"message":"boom"}}\n\n', "the engine reported an error"),
        (good[:-2] + b"}\n\n", "an event that is no completion chunk"),
    ):
        for pieces in ([good, good, bad + good], [good, good + bad + good], [good + good + bad]):
            follower, out = feed(pieces, hides_usage=False)
            if why:
                assert follower.broken == why, bad
                assert out == good + good
            else:
                assert out == b"".join(pieces)
            assert not follower.is_done
    assert shape > 0


def test_events_without_text_do_not_count_as_tokens_after_ones_that_do():
    pieces = [
        chat("a"),
        chat(""),
        chat("") + chat("b"),
        chat("c") + chat(""),
        chat("", "stop"),
        DONE,
    ]
    follower, out = feed(pieces, hides_usage=False)
    assert out == b"".join(pieces)
    assert follower.num_token_events == 3


def test_a_stream_that_changes_its_shape_is_still_counted_right():
    choices = [chat("x", index=i % 3) for i in range(30)]
    reasoning = [
        b'data: {"choices":[{"index":0,"delta":{"reasoning":"%b"}}]}\n\n' % word
        for word in (b"so", b"then")
    ]
    stream = [*reasoning, *choices, chat('say \\"usage\\"'), chat("", "stop"), DONE]
    follower, out = feed(stream, hides_usage=False)
    assert out == b"".join(stream)
    assert follower.num_token_events == 33


def test_usage_beside_choices_is_cut_out_alone():
    stream = chunk("a", "stop", usage=USAGE) + DONE

    _, out = feed([stream], hides_usage=True)

    assert out == chunk("a", "stop") + DONE


def test_text_that_looks_like_usage_is_left_alone():
    stream = chunk(',"usage":null}') + chunk("x", "stop") + DONE

    _, out = feed([stream], hides_usage=True)

    assert out == stream


def test_broken_streams_are_noticed_and_what_was_sound_before_still_goes_out():
    good = chunk("a")
    for bad in (
        b'data: {"choices":[{"index":0,"text":"b"\n\n',
        b'data: {"error":{"message":"boom"}}\n\n',
        b"event: x\n\n",
        b"<html></html>\n\n",
        b"data: [DONE]\n\n",
        chunk("", "abort"),
        chunk("", "error"),
        b"data: " + b"x" * (1 << 20) + b"\n\n",
        b'data: {"choices":[{"index":0,"text":5}]}\n\n',
    ):
        follower, out = feed([good, bad, DONE], hides_usage=True)
        assert out == good, bad[:40]
        assert follower.broken, bad[:40]
        assert not follower.is_done
        assert follower.ended()


def test_what_follows_the_end_is_dropped():
    follower, out = feed([chunk("a", "stop") + DONE + chunk("b") + DONE], hides_usage=True)

    assert out == chunk("a", "stop") + DONE
    assert follower.is_done


def test_comments_pass_and_count_as_nothing():
    stream = b": ping\n\n" + chunk("a", "stop") + DONE
    follower, out = feed([stream], hides_usage=True)

    assert out == stream
    assert follower.num_token_events == 1


def test_chat_events_count_content_reasoning_and_tool_calls_only():
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "r"},
        {"content": "x"},
        {"tool_calls": [{}]},
    ]
    follower = StreamFollower(hides_usage=True)
    counts = []
    for delta in deltas:
        follower.feed(
            b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
        )
        counts.append(follower.num_token_events)

    assert counts == [0, 1, 2, 3]


def test_an_answer_that_only_looks_like_one_is_a_fault():
    good = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": USAGE}
    assert read_answer(json.dumps(good).encode()).fault == ""
    for bad in (
        {"choices": []},
        {},
        {"error": {"message": "x"}},
        {"choices": [{"finish_reason": "error", "text": "x"}]},
        {"choices": [{"finish_reason": "stop"}]},
    ):
        assert read_answer(json.dumps(bad).encode()).fault, bad
    assert read_answer(b"<html>").fault
