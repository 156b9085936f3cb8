"""A head like the connection's last is read as if it were parsed anew, and nothing unsound becomes sound by that."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.http1.connection import KnownAnswer
from dynctl.http1.guard import KnownHead, Refused, read_head

MAX_BODY = 1000
NAMES = ("Host", "host", "Content-Length", "content-length", "CONTENT-LENGTH", "Authorization")
NAMES += ("authorization", "AUTHORIZATION", "Accept", "Connection", "Transfer-Encoding", "X-A_B")
NAMES += ("X-Request-Id", "x-request-id", "X-Request-ID", "X_Request_Id")
VALUES = ("a", "5", "007", "", "12 ", "0x5", "Bearer k", " Bearer k", "close", "chunked", "\x00")
VALUES += ("5\r\n 6", "1001", "999999999999999", "9999999999999999", "é", "content-length", "b\tc")
VALUES += ("r-1", "r_2:3.4", "r" * 128, "r" * 129, "r,s")

FACTS = (
    "method",
    "target",
    "path",
    "query",
    "headers",
    "body",
    "peer_name",
    "content_length_bytes",
    "request_id",
)
FACTS += ("is_chunked", "can_keep_alive", "expects_continue", "is_http10")

fields = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6)


def head_of(pairs):
    lines = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    return f"POST /v1/x HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def facts(request):
    names = {name for name, _ in request.headers} | {b"authorization", b"none"}
    values = {name: getattr(request, name) for name in FACTS}
    return values | {name: request.header(name) for name in names}


def read(head):
    try:
        return read_head(head, MAX_BODY)
    except Refused:
        return None


@given(fields, fields, st.sampled_from(VALUES), st.binary(max_size=3))
@settings(max_examples=600, deadline=None)
def test_a_known_head_reads_as_a_new_one(first, second, length, behind):
    head = head_of([("Host", "h"), *first])
    request = read(head)
    if request is None:
        return
    known = KnownHead(head, request)
    lengths = [
        (name, length if name.lower() == "content-length" else value) for name, value in first
    ]
    ids = [(name, length if name.lower() == "x-request-id" else value) for name, value in first]
    for pairs in (first, lengths, ids, second):
        other = head_of([("Host", "h"), *pairs])
        found = known.read(other + behind, MAX_BODY)
        anew = read(other)
        if found is not None:
            assert anew is not None
            assert (facts(found[0]), found[1]) == (facts(anew), len(other))
        else:
            assert other != head or "1001" in str(pairs)


def test_another_length_is_not_parsed_again_and_a_larger_one_is_not_let_through():
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\nx: y\r\n\r\n"
    known = KnownHead(head % 5, read_head(head % 5, MAX_BODY))
    request, end = known.read(head % 700 + b"body", MAX_BODY)
    assert (request.content_length_bytes, end) == (700, len(head % 700))
    assert request.header(b"x") == b"y"
    assert known.read(head % 1001, MAX_BODY) is None
    assert known.read((head % 700)[:-1], MAX_BODY) is None


def test_another_id_is_not_parsed_again_and_leaves_the_other_fields_as_they_are():
    head = b"POST / HTTP/1.1\r\nhost: a\r\nX-Request-Id: %b\r\nx: y\r\ncontent-length: %d\r\n\r\n"
    first = read_head(head % (b"one", 5), MAX_BODY)
    assert (first.request_id, first.headers) == (b"one", ((b"host", b"a"), (b"x", b"y")))
    known = KnownHead(head % (b"one", 5), first)
    request, end = known.read(head % (b"another.1", 70) + b"body", MAX_BODY)
    assert (request.request_id, request.content_length_bytes) == (b"another.1", 70)
    assert end == len(head % (b"another.1", 70))
    assert request.headers is first.headers
    for bad in (b"", b"a b", b"a\tb", b"a,b", b"a\r\nhost: b", b"\xff", b"i" * 129):
        assert known.read(head % (bad, 70), MAX_BODY) is None


def test_of_several_ids_the_first_plain_one_counts_and_an_odd_one_is_a_field_like_any():
    head = b"GET / HTTP/1.1\r\nhost: a\r\nx-request-id: %b\r\nx-request-id: %b\r\n\r\n"
    first = read_head(head % (b"one ", b"two"), MAX_BODY)
    assert (first.request_id, first.headers) == (b"one", ((b"host", b"a"),))
    known = KnownHead(head % (b"one ", b"two"), first)
    assert known.read(head % (b"one ", b"two"), MAX_BODY)[0].request_id == b"one"
    assert known.read(head % (b"one ", b"three"), MAX_BODY) is None
    odd = read_head(head % (b"o,ne", b"t wo"), MAX_BODY)
    assert (odd.request_id, odd.header(b"x-request-id")) == (b"", b"o,ne")


def test_bodies_and_peers_of_one_request_do_not_show_in_the_next():
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n"
    first = read_head(head, MAX_BODY)
    known = KnownHead(head, first)
    first.body = b"first"
    second, _ = known.read(head, MAX_BODY)
    assert second.body == b""
    second.body = b"other"
    assert known.read(head, MAX_BODY)[0].body == b""


def test_an_answer_like_the_last_is_taken_only_when_it_is_whole_and_alone():
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nx: y\r\n\r\n"
    fields = [(b"content-length", b"4"), (b"x", b"y")]
    known = KnownAnswer(head % 4, 200, fields)
    assert known.body_of(head % 4 + b"body") == b"body"
    assert known.fields is fields
    assert known.body_of(head % 6 + b"bodies") == b"bodies"
    assert known.fields == [(b"content-length", b"6"), (b"x", b"y")]
    for other in (
        head % 4 + b"bod",
        head % 4 + b"bodyH",
        (head % 4).replace(b"200", b"500") + b"body",
        (head % 4).replace(b"y", b"z") + b"body",
        (head % 4).replace(b": 4", b": +4") + b"body",
        (head % 4).replace(b": 4", b": 4 ") + b"body",
        (head % 4).replace(b"x: y", b"transfer-encoding: chunked") + b"body",
        b"",
    ):
        assert known.body_of(other) == b""
