"""Heads seen before are read as if they were parsed anew, and nothing unsound becomes sound by having been seen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.http1 import guard
from dynctl.http1.guard import Refused, read_head

NAMES = ("Host", "host", "Content-Length", "content-length", "CONTENT-LENGTH", "Authorization")
NAMES += ("authorization", "AUTHORIZATION", "Accept", "Connection", "Transfer-Encoding", "X-A_B")
VALUES = (
    "a",
    "5",
    "",
    "12 ",
    "0x5",
    "Bearer k",
    " Bearer k",
    "close",
    "chunked",
    "\x00",
    "5\r\n 6",
)
VALUES += ("999999999999999", "é", "content-length", "b\tc")

fields = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6)


def head_of(pairs):
    lines = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    return f"POST /v1/x HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def outcome(read, head):
    try:
        request = read(head, 1000)
    except Refused as refused:
        return refused.status, refused.reason
    facts = {name: getattr(request, name) for name in request.__slots__ if name != "known"}
    names = {name for name, _ in request.headers} | {b"content-length", b"authorization", b"none"}
    return facts | {name: request.header(name) for name in names}


@given(st.lists(fields, min_size=1, max_size=6), st.booleans())
@settings(max_examples=600, deadline=None)
def test_a_known_head_reads_as_a_new_one(heads, has_host):
    for pairs in heads:
        head = head_of([("Host", "h"), *pairs] if has_host else pairs)
        assert outcome(read_head, head) == outcome(guard._parse_head, head)


def test_length_and_key_of_a_known_head_are_its_own():
    guard._known_heads.clear()
    for length, key in ((5, b"Bearer one"), (700, b"Bearer two")):
        head = (
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\nauthorization: %b\r\nx: y\r\n\r\n"
            % (length, key)
        )
        request = read_head(head, 1000)
        assert request.content_length_bytes == length
        assert request.header(b"content-length") == b"%d" % length
        assert request.header(b"authorization") == key
        assert request.header(b"x") == b"y"
    assert len(guard._known_heads) == 1
    with pytest.raises(Refused) as refused:
        read_head(head.replace(b"700", b"1001"), 1000)
    assert refused.value.status == 413


def test_keys_of_clients_are_not_kept():
    guard._known_heads.clear()
    for name in (b"authorization", b"Authorization", b"AUTHORIZATION"):
        head = b"GET / HTTP/1.1\r\nhost: a\r\n%b: Bearer geheim\r\n\r\n" % name
        assert read_head(head, 1000).header(b"authorization") == b"Bearer geheim"
    kept = repr([(shape, known._headers) for shape, known in guard._known_heads.items()])
    assert len(guard._known_heads) == 2
    assert "geheim" not in kept


def test_the_table_of_known_heads_is_bounded():
    for number in range(2000):
        read_head(b"GET / HTTP/1.1\r\nhost: a\r\nx-id: %d\r\n\r\n" % number, 1000)
        assert len(guard._known_heads) <= 512
    long = b"GET / HTTP/1.1\r\nhost: a\r\nx: %b\r\n\r\n" % (b"y" * 4000)
    before = len(guard._known_heads)
    assert read_head(long, 1000).header(b"x") == b"y" * 4000
    assert len(guard._known_heads) == before
