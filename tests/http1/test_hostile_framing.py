"""The framing rows R1–R13: each hostile head or body with the status it must get."""

import asyncio

import pytest

from dynctl.http1.body import ChunkedBody
from dynctl.http1.guard import Refused, check_partial_head, read_head
from dynctl.http1.server import ServerLimits

MAX_BODY = 1000


def head(*lines: bytes, first: bytes = b"POST / HTTP/1.1", host: bytes = b"Host: a") -> bytes:
    return b"\r\n".join((first, *((host,) if host else ()), *lines)) + b"\r\n\r\n"


def get(target: bytes) -> bytes:
    return head(first=b"GET " + target + b" HTTP/1.1")


TE = b"Transfer-Encoding: chunked"

HEADS = [
    ("R1 length and chunks", 400, head(b"Content-Length: 3", TE)),
    ("R1 chunks and length", 400, head(TE, b"Content-Length: 3")),
    ("R2 repeated length", 400, head(b"Content-Length: 3", b"Content-Length: 4")),
    ("R2 repeated equal length", 400, head(b"Content-Length: 3", b"Content-Length: 3")),
    ("R2 repeated zero length", 400, head(b"Content-Length: 0", b"Content-Length: 0")),
    ("R2 comma list", 400, head(b"Content-Length: 3, 3")),
    ("R2 plus sign", 400, head(b"Content-Length: +3")),
    ("R2 minus sign", 400, head(b"Content-Length: -3")),
    ("R2 hexadecimal", 400, head(b"Content-Length: 0x3")),
    ("R2 underscore digits", 400, head(b"Content-Length: 1_0")),
    ("R2 arabic digit", 400, head("Content-Length: ٣".encode())),
    ("R2 inner space", 400, head(b"Content-Length: 1 0")),
    ("R2 twenty digits", 400, head(b"Content-Length: 00000000000000000003")),
    ("R2 empty", 400, head(b"Content-Length:")),
    ("R3 unknown coding", 501, head(b"Transfer-Encoding: gzip")),
    ("R3 coding before chunked", 501, head(b"Transfer-Encoding: gzip, chunked")),
    ("R3 coding after chunked", 400, head(b"Transfer-Encoding: chunked, identity")),
    ("R3 chunked in quotes", 501, head(b'Transfer-Encoding: "chunked"')),
    ("R3 looks like chunked", 501, head(b"Transfer-Encoding: xchunked")),
    ("R3 vertical tab", 400, head(b"Transfer-Encoding:\x0bchunked")),
    ("R3 other case", 400, head(b"Transfer-Encoding: Chunked")),
    ("R3 empty", 400, head(b"Transfer-Encoding:")),
    ("R3 twice", 400, head(TE, TE)),
    ("R3 list of two", 400, head(b"Transfer-Encoding: chunked, chunked")),
    ("R3 in HTTP/1.0", 400, head(TE, first=b"POST / HTTP/1.0")),
    ("R4 folded line", 400, head(b"A: b", b" c")),
    ("R4 folded by tab", 400, head(b"A: b", b"\tc")),
    ("R4 folded first line", 400, b"GET / HTTP/1.1\r\n Host: a\r\n\r\n"),
    ("R4 space before colon", 400, head(b"A : b")),
    ("R4 tab before colon", 400, head(b"Content-Length\t: 3")),
    ("R4 no colon", 400, head(b"A")),
    ("R4 empty name", 400, head(b": b")),
    ("R4 NUL in value", 400, head(b"A: b\0c")),
    ("R4 CR in value", 400, head(b"A: b\rc")),
    ("R4 LF in value", 400, head(b"A: b\nContent-Length: 3")),
    ("R4 delete in value", 400, head(b"A: b\x7f")),
    ("R4 high byte in name", 400, head(b"A\xff: b")),
    ("R4 parenthesis in name", 400, head(b"A(b): c")),
    ("R4 length with underscore", 400, head(b"Content_Length: 3")),
    ("R4 coding with underscore", 400, head(b"transfer_encoding: chunked")),
    ("R4 rights with underscore", 400, head(b"X_Api_Key: k")),
    ("R4 hop with underscore", 400, head(b"Proxy_Connection: close")),
    ("R7 no host", 400, head(host=b"")),
    ("R7 two hosts", 400, head(b"Host: b")),
    ("R7 two equal hosts", 400, head(b"Host: a")),
    ("R7 empty host", 400, head(host=b"Host:")),
    ("R7 host with path", 400, head(host=b"Host: a/b")),
    ("R7 host with query", 400, head(host=b"Host: a?b")),
    ("R7 host with fragment", 400, head(host=b"Host: a#b")),
    ("R7 host with user", 400, head(host=b"Host: a@b")),
    ("R7 host with space", 400, head(host=b"Host: a b")),
    ("R7 host with high byte", 400, head(host=b"Host: \xc3\xa4")),
    ("R8 absolute form", 400, get(b"http://evil/")),
    ("R8 authority form", 400, get(b"a:80")),
    ("R8 asterisk form", 400, head(first=b"OPTIONS * HTTP/1.1")),
    ("R8 fragment", 400, get(b"/a#b")),
    ("R8 parent", 400, get(b"/a/../b")),
    ("R8 parent at the end", 400, get(b"/a/..")),
    ("R8 same folder", 400, get(b"/./a")),
    ("R8 encoded parent", 400, get(b"/a/%2e%2e/b")),
    ("R8 half-encoded parent", 400, get(b"/a/.%2E/b")),
    ("R8 encoded slash", 400, get(b"/a%2fb")),
    ("R8 encoded backslash", 400, get(b"/a%5cb")),
    ("R8 backslash", 400, get(b"/a\\b")),
    ("R8 double slash", 400, get(b"//a")),
    ("R8 inner double slash", 400, get(b"/a//b")),
    ("R8 NUL", 400, get(b"/a\0")),
    ("R8 encoded NUL", 400, get(b"/a%00")),
    ("R8 encoded line end", 400, get(b"/a%0d%0ax")),
    ("R8 overlong UTF-8", 400, get(b"/%c0%ae%c0%ae/")),
    ("R8 broken UTF-8", 400, get(b"/%ff")),
    ("R8 raw high byte", 400, get("/ä".encode())),
    ("R8 broken escape", 400, get(b"/a%2")),
    ("R8 no hexadecimal", 400, get(b"/a%zz")),
    ("R9 HTTP/2.0", 505, head(first=b"GET / HTTP/2.0")),
    ("R9 HTTP/2 preface", 505, b"PRI * HTTP/2.0\r\n\r\n"),
    ("R9 HTTP/1.2", 505, head(first=b"GET / HTTP/1.2")),
    ("R9 HTTP/0.9", 505, b"GET /\r\n\r\n"),
    ("R9 lower-case version", 400, head(first=b"GET / http/1.1")),
    ("R9 long version", 400, head(first=b"GET / HTTP/1.10")),
    ("R9 unknown method", 501, head(first=b"BREW / HTTP/1.1")),
    ("R9 tunnel", 501, head(first=b"CONNECT a:80 HTTP/1.1")),
    ("R9 trace", 501, head(first=b"TRACE / HTTP/1.1")),
    ("R9 lower-case method", 501, head(first=b"get / HTTP/1.1")),
    ("R9 malformed method", 400, head(first=b"G(T / HTTP/1.1")),
    ("R9 two spaces", 400, head(first=b"GET  / HTTP/1.1")),
    ("R9 tab for space", 400, head(first=b"GET\t/ HTTP/1.1")),
    ("R9 leading space", 400, head(first=b" GET / HTTP/1.1")),
    ("R9 h2c", 400, head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c")),
    ("R9 upgrade alone", 400, head(b"Upgrade: websocket")),
    ("R9 connection upgrade alone", 400, head(b"Connection: upgrade")),
    ("R9 connection names host", 400, head(b"Connection: host")),
    ("R9 connection names rights", 400, head(b"Connection: close, Authorization")),
    ("R10 unknown expectation", 417, head(b"Expect: 200-ok")),
    ("R12 fields", 431, head(*(b"A%d: b" % n for n in range(100)))),
    ("R12 target", 414, get(b"/" + b"a" * 9000)),
    ("R13 declared body", 413, head(b"Content-Length: 1001")),
    ("R13 largest number", 413, head(b"Content-Length: 9999999999999999999")),
]

PARTIAL_HEADS = [
    ("R4 bare line feeds", 400, b"GET / HTTP/1.1\nHost: a\n\n"),
    ("R4 leading blank line", 400, b"\r\nGET / HTTP/1.1\r\n"),
    ("R9 HTTP/0.9", 505, b"GET /\r\n"),
    ("R9 TLS on a plain port", 400, b"\x16\x03\x01\x02\x00\x01\x00"),
    ("R12 head", 431, b"GET / HTTP/1.1\r\nA: " + b"b" * 33_000),
    ("R12 target", 414, b"GET /" + b"a" * 9000),
]

CHUNKS = [
    ("R5 line feed only", 400, b"3\nabc\r\n0\r\n\r\n"),
    ("R5 wrong end", 400, b"3\r\nabcd\r\n0\r\n\r\n"),
    ("R5 line feed after data", 400, b"3\r\nabc\n0\r\n\r\n"),
    ("R5 hexadecimal prefix", 400, b"0x3\r\nabc\r\n0\r\n\r\n"),
    ("R5 sign", 400, b"+3\r\nabc\r\n0\r\n\r\n"),
    ("R5 negative", 400, b"-1\r\n"),
    ("R5 no size", 400, b"\r\nabc"),
    ("R5 space", 400, b"3 \r\nabc\r\n0\r\n\r\n"),
    ("R5 underscore", 400, b"1_0\r\n"),
    ("R5 sixteen digits", 400, b"0000000000000003\r\nabc"),
    ("R5 beyond 64 bits", 400, b"FFFFFFFFFFFFFFFFF\r\n"),
    ("R5 long extension", 400, b"3;" + b"a" * 300 + b"\r\nabc\r\n0\r\n\r\n"),
    ("R5 endless size line", 400, b"3;" + b"a" * 300),
    ("R5 quoted extension", 400, b'3;a="\r\n0\r\n\r\n"\r\n'),
    ("R5 carriage return in extension", 400, b"3;a\rb\r\nabc\r\n0\r\n\r\n"),
    ("R5 line feed in extension", 400, b"3;a\nb\r\nabc\r\n0\r\n\r\n"),
    ("R6 length", 400, b"0\r\nContent-Length: 3\r\n\r\n"),
    ("R6 coding", 400, b"0\r\ntransfer-encoding: chunked\r\n\r\n"),
    ("R6 host", 400, b"0\r\nHost: b\r\n\r\n"),
    ("R6 rights", 400, b"0\r\nAuthorization: b\r\n\r\n"),
    ("R6 rights with underscore", 400, b"0\r\nContent_Length: 3\r\n\r\n"),
    ("R6 too long", 400, b"0\r\n" + b"A: " + b"b" * 9000 + b"\r\n\r\n"),
    ("R6 too many", 400, b"0\r\n" + b"A: bbbbbbbb\r\n" * 900 + b"\r\n"),
    ("R6 malformed", 400, b"0\r\nA b\r\n\r\n"),
    ("R6 folded", 400, b"0\r\nA: b\r\n c\r\n\r\n"),
    ("R6 line feed", 400, b"0\r\nA: b\nB: c\r\n\r\n"),
    ("R13 one chunk", 413, b"3E9\r\n"),
    ("R13 many chunks", 413, b"1F4\r\n" + b"a" * 500 + b"\r\n1F5\r\n"),
    ("R13 huge chunk", 413, b"FFFFFFFFFFFFFFF\r\n"),
]

FINE = [
    ("R2 leading zero", head(b"Content-Length: 03")),
    ("R2 space around", head(b"Content-Length: \t 3 \t")),
    ("R3 chunked with space around", head(b"Transfer-Encoding:  chunked ")),
    ("R4 other name with underscore", head(b"my_header: b")),
    ("R4 high bytes in value", head(b"A: \xc3\xa4")),
    ("R4 empty value", head(b"A:")),
    ("R7 port and brackets", head(host=b"Host: [::1]:8000")),
    ("R7 HTTP/1.0 without host", head(first=b"GET / HTTP/1.0", host=b"")),
    ("R8 query may hold anything", get(b"/a?b=../%00//http://")),
    ("R8 dots in names", get(b"/a..b/...c/.d")),
    ("R8 one decode only", get(b"/%252e%252e")),
    ("R9 close", head(b"Connection: close")),
    ("R10 continue", head(b"Expect: 100-Continue", b"Content-Length: 3")),
    ("R12 just as many fields", head(*(b"A%d: b" % n for n in range(99)))),
    ("R13 just as large", head(b"Content-Length: 1000")),
]


@pytest.mark.parametrize(("status", "raw"), [row[1:] for row in HEADS], ids=[r[0] for r in HEADS])
def test_a_hostile_head_is_refused(status, raw):
    with pytest.raises(Refused) as caught:
        read_head(raw, MAX_BODY)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("status", "raw"), [row[1:] for row in PARTIAL_HEADS], ids=[r[0] for r in PARTIAL_HEADS]
)
def test_a_head_that_cannot_become_valid_is_refused_before_its_end(status, raw):
    with pytest.raises(Refused) as caught:
        check_partial_head(raw, 32 * 1024)
    assert caught.value.status == status


@pytest.mark.parametrize(("status", "raw"), [row[1:] for row in CHUNKS], ids=[r[0] for r in CHUNKS])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_hostile_chunked_body_is_refused_however_it_is_split(status, raw, size):
    body = ChunkedBody(MAX_BODY)

    def feed_all() -> None:
        for start in range(0, len(raw), size):
            body.feed(raw[start : start + size])

    with pytest.raises(Refused) as caught:
        feed_all()
    assert caught.value.status == status


@pytest.mark.parametrize("raw", [row[1] for row in FINE], ids=[r[0] for r in FINE])
def test_an_unusual_but_sound_head_is_let_through(raw):
    check_partial_head(raw, 32 * 1024)
    request = read_head(raw, MAX_BODY)
    assert all(name == name.lower() for name, _ in request.headers)
    assert all(request.header(name) == value.strip() for name, value in request.headers)


def test_a_plain_chunk_extension_and_trailers_are_dropped():
    body = ChunkedBody(MAX_BODY)
    body.feed(b"3;a;b=c\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\nGET")
    assert (body.body, body.rest, body.is_complete) == (b"abc", b"GET", True)


def test_underscored_and_connection_named_fields_do_not_reach_the_handler():
    request = read_head(head(b"my_header: b", b"X-Hop: c", b"Connection: x-hop", b"D: e"), MAX_BODY)
    assert dict(request.headers) == {b"host": b"a", b"connection": b"x-hop", b"d": b"e"}


def test_the_path_is_decoded_once():
    request = read_head(get(b"/a%20%252e/%C3%A4?q=%41"), MAX_BODY)
    assert (request.path, request.query) == ("/a %2e/ä", b"q=%41")


def test_target_memory_is_bounded_and_gives_the_same_answer_twice():
    for number in range(1000):
        for _ in range(2):
            request = read_head(get(b"/%d" % number), MAX_BODY)
            assert (request.path, request.query) == (f"/{number}", b"")


@pytest.mark.parametrize(
    ("status", "raw"),
    [row[1:] for row in HEADS + PARTIAL_HEADS],
    ids=[r[0] for r in HEADS + PARTIAL_HEADS],
)
def test_over_the_wire_the_answer_closes_and_nothing_is_served(server_at, talk, status, raw):
    async def main():
        limits = ServerLimits(max_body_bytes=MAX_BODY, linger_s=0.2)
        async with server_at(limits=limits) as server:
            # Behind it a well-formed request that a confused server would answer.
            answer = await talk(server.port, raw + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.split(b" ")[1] == b"%d" % status
            assert answer.count(b"content-length: ") == 1
            assert b"connection: close\r\n" in answer
            assert server.num_requests == 0
            assert sum(server.num_rejected.values()) == 1

    asyncio.run(main())


def test_a_head_that_is_complete_but_too_large_is_431(server_at, talk):
    async def main():
        async with server_at() as server:
            raw = head(*(b"A%d: %b" % (n, b"b" * 1000) for n in range(40)))
            answer = await talk(server.port, raw)
            assert answer.startswith(b"HTTP/1.1 431 ")

    asyncio.run(main())
