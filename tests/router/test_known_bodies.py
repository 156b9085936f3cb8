"""A body like one before it is read as if it were parsed anew, and nothing unsound becomes sound by that."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.router.api.known_bodies import KnownBodies
from dynctl.router.api.requests import CHAT, COMPLETIONS, RefusedError, parse_request
from dynctl.router.config import Settings

SETTINGS = Settings()
TEXTS = (
    "",
    "w1",
    "user",
    "model",
    "prompt",
    "content",
    '":"',
    ":",
    ": ",
    ":\t",
    ",",
    ", ",
    "}",
    ":[",
    "}]}",
    "{[",
    "é\U0001f469",
    "\x7f\x80",
    "tab\t",
    'a"b',
    "c\\d",
)
RAW = (
    b"",
    b":",
    b": ",
    b", ",
    b":5,",
    b"plain",
    b"[{:,",
    b'"',
    b'","model":"other',
    b"\\",
    b"\\n",
    b"\\u0022",
    b"\n",
    b"\x00",
)
RAW += (b"\x7f", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b'"}]}', b"x" * 2000)

extras = st.dictionaries(
    st.sampled_from(
        ["stream", "max_tokens", "stream_options", "stop", "n", "seed", "user", "tools"]
    )
    | st.sampled_from(["request_id", "priority", "top_p", "max_completion_tokens", "é"]),
    st.sampled_from([True, False, None, 1, 7, 0.25, "user", "w1", ["a"], {"include_usage": True}]),
    max_size=4,
)
bodies = st.builds(
    lambda extra, text, first: (
        ({"model": "m", **extra} if first else {**extra, "model": "m"})
        | {
            "prompt": text,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}],
        }
    ),
    extras,
    st.sampled_from(TEXTS),
    st.booleans(),
)
gaps = st.sampled_from([":", ": ", ":\t", " :", ":\n"])
"""Between a key and its value: another one before the text than elsewhere may make the text look like it."""


def facts(read):
    try:
        request = read()
    except RefusedError as refused:
        return refused.failure.status
    values = (request.endpoint, request.body, request.encoded, request.model, request.is_stream)
    values += (request.num_sequences, request.has_usage_asked, request.max_tokens, request.kind)
    return (*values, request.num_chars, request.main_body("m", None), request.main_body("x", None))


def of(endpoint, body, gap):
    other, key = ("prompt", "content") if endpoint == CHAT else ("messages", "prompt")
    document = {key: value for key, value in body.items() if key != other}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return f'"{key}"{gap}'.join(text.rsplit(f'"{key}":', 1)).encode()


@given(
    st.lists(bodies, min_size=1, max_size=3),
    gaps,
    st.sampled_from([CHAT, COMPLETIONS]),
    st.lists(st.sampled_from(RAW), min_size=1, max_size=3),
    st.integers(0, 400),
)
@settings(max_examples=500, deadline=None)
def test_a_known_body_reads_as_a_new_one(documents, gap, endpoint, middles, place):
    known = KnownBodies()
    contents = [of(endpoint, document, gap) for document in documents]
    for content in contents:
        facts(lambda content=content: known.read(endpoint, content, SETTINGS))
    # The same again, with other bytes in the place of a text, and with bytes put in anywhere.
    changed = [content.replace(b'"w1"', b'"%b"' % raw) for content in contents for raw in middles]
    changed += [content[:place] + raw + content[place:] for content in contents for raw in middles]
    for content in (*contents, *changed):
        for where in (endpoint, CHAT, COMPLETIONS):
            anew = facts(
                lambda content=content, where=where: parse_request(where, content, SETTINGS)
            )
            found = facts(lambda content=content, where=where: known.read(where, content, SETTINGS))
            assert found == anew


def outcomes(endpoint, known_content, content):
    """As a client has it whose body before was another, and as one has it who comes first."""
    known = KnownBodies()
    facts(lambda: known.read(endpoint, known_content, SETTINGS))
    return (
        facts(lambda: known.read(endpoint, content, SETTINGS)),
        facts(lambda: parse_request(endpoint, content, SETTINGS)),
    )


@given(bodies, gaps, st.sampled_from([CHAT, COMPLETIONS]), st.sampled_from(RAW))
@settings(max_examples=300, deadline=None)
def test_what_stands_between_any_two_quotes_may_be_anything_else(body, gap, endpoint, raw):
    content = of(endpoint, body, gap)
    quotes = [place for place, byte in enumerate(content) if byte == ord('"')]
    for one, other in pairwise(quotes):
        found, anew = outcomes(endpoint, content, content[: one + 1] + raw + content[other:])
        assert found == anew


@pytest.mark.parametrize(
    ("learned", "content"),
    [
        (b'{"model":"m","prompt": ": "}', b'{"model":"m","prompt":": "}'),
        (b'{"model":"m","prompt": ": "}', b'{"model":"m","prompt"garbage": "}'),
        (b'{"model":"m","prompt": ": "}', b'{"model":"m","prompt":5,": "}'),
        (b'{"model":"m","prompt":":"}', b'{"model":"m","prompt":"another"}'),
        (b'{"model":"m","prompt":","}', b'{"model":"m"garbage"prompt":","}'),
        (b'{"model":"prompt","prompt":"prompt"}', b'{"model":"prompt","other":"prompt"}'),
        (
            b'{"user":"\\"","model":"m","prompt": ": "}',
            b'{"user":"\\"","model":"m","prompt":5": "}',
        ),
    ],
)
def test_a_prompt_that_looks_like_what_stands_around_it_is_not_taken_for_it(learned, content):
    found, anew = outcomes(COMPLETIONS, learned, content)
    assert found == anew


def body_of(text, **more):
    return json.dumps(
        {"model": "m", **more, "messages": [{"role": "user", "content": text}]}
    ).encode()


@pytest.mark.source
def test_only_the_text_may_differ_for_a_body_to_be_known(monkeypatch):
    parsed = []

    def parse(endpoint, content, limits):
        parsed.append(content)
        return parse_request(endpoint, content, limits)

    known = KnownBodies()
    monkeypatch.setattr("dynctl.router.api.known_bodies.parse_request", parse)

    def is_parsed(content):
        parsed.clear()
        known.read(CHAT, content, SETTINGS)
        return bool(parsed)

    assert is_parsed(body_of("one"))
    assert not is_parsed(body_of("another"))
    assert is_parsed(body_of("one", max_tokens=5))
    assert not is_parsed(body_of("two", max_tokens=5))
    assert not is_parsed(body_of("both are known now"))
    assert is_parsed(body_of('a "quoted" one'))
    for number in range(20):
        is_parsed(body_of("many kinds", max_tokens=number))
    assert is_parsed(body_of("one", max_tokens=100))
    assert is_parsed(body_of("two", max_tokens=100)), (
        "a client of many kinds is learned from no more"
    )
