"""Whatever way bytes are cut, the result is the same."""

import asyncio
import itertools

import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynctl.http1.body import ChunkedBody
from dynctl.http1.guard import Refused, read_head
from dynctl.http1.server import Exchange, Server, ServerLimits
from dynctl.http1.server_connection import ServerConnection
from dynctl.http1.sse import EventSplitter, event_data

TOKEN = st.text("abcXYZ09-", min_size=1, max_size=8).map(str.encode)
VALUE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12).map(str.encode)


class FakeTransport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closing = False

    def write(self, data):
        self.written += data

    def close(self):
        self.closing = True

    abort = close

    def is_closing(self):
        return self.closing

    def can_write_eof(self):
        return False

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def set_write_buffer_limits(self, high):
        pass

    def get_extra_info(self, name):
        return None


@st.composite
def requests(draw):
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT"]))
    path = b"/" + draw(TOKEN)
    body = draw(st.binary(max_size=200))
    fields = [
        (b"x-" + name, value) for name, value in draw(st.lists(st.tuples(TOKEN, VALUE), max_size=4))
    ]
    lines = [b"%b: %b" % field for field in fields]
    if draw(st.booleans()) and body:
        lines.append(b"Transfer-Encoding: chunked")
        wire = b""
        rest = body
        while rest:
            size = draw(st.integers(1, len(rest)))
            wire += b"%x\r\n%b\r\n" % (size, rest[:size])
            rest = rest[size:]
        wire += b"0\r\n\r\n"
    else:
        lines.append(b"Content-Length: %d" % len(body))
        wire = body
    raw = b"%b %b HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n%b" % (method, path, b"\r\n".join(lines), wire)
    return raw, (method, path, body, tuple((name.lower(), value) for name, value in fields))


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % (len(raw) + 1) for place in places} | {0, len(raw)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def serve_pieces(pieces: list[bytes]) -> list[tuple]:
    """Feed pieces to one connection and return what the handler saw."""
    seen = []

    def handler(exchange: Exchange) -> None:
        request = exchange.request
        own = tuple(field for field in request.headers if field[0].startswith(b"x-"))
        seen.append((request.method.encode(), request.target, request.body, own))
        exchange.respond(200, b"")

    async def main() -> None:
        server = Server(handler, ServerLimits(), None)
        connection = ServerConnection(server)
        connection.connection_made(FakeTransport())
        for piece in pieces:
            connection.data_received(piece)
        # What stands behind an answered request is taken in the next turn of the loop.
        await asyncio.sleep(0)
        connection.connection_lost(None)
        await server.close(0)
        assert not server.num_rejected

    asyncio.run(main())
    return seen


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_of_valid_requests_is_served_the_same(batch, places):
    raw = b"".join(wire for wire, _ in batch)
    assert serve_pieces(cut(raw, places)) == [expected for _, expected in batch]


@settings(max_examples=20, deadline=None)
@given(requests())
def test_byte_by_byte_is_served_the_same(one):
    raw, expected = one
    assert serve_pieces([raw[i : i + 1] for i in range(len(raw))]) == [expected]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=6))
def test_arbitrary_bytes_never_break_a_connection(junk, places):
    async def main() -> None:
        server = Server(lambda exchange: exchange.respond(200, b""), ServerLimits(), None)
        connection = ServerConnection(server)
        connection.connection_made(FakeTransport())
        for piece in cut(b"POST / HTTP/1.1\r\nHost: a\r\n" + junk, places):
            connection.data_received(piece)
        connection.connection_lost(None)
        await server.close(0)

    asyncio.run(main())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.lists(st.integers(0, 200), max_size=6))
@example(b"3\r\nabc\r\n0\r\n\r\n", [4])
def test_a_chunked_body_is_read_or_refused_the_same_way_however_split(raw, places):
    def outcome(pieces: list[bytes]) -> object:
        body = ChunkedBody(64)
        for number, piece in enumerate(pieces):
            try:
                body.feed(piece)
            except Refused as refusal:
                return refusal.status
            if body.is_complete:
                return body.body, body.rest + b"".join(pieces[number + 1 :])
        return "incomplete"

    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw)
    for wire in (raw, framed):
        assert outcome(cut(wire, places)) == outcome([wire])


FIELD_LINES = st.sampled_from(
    [b"Host: a", b"Host: b", b"Content-Length: 3", b"Content-Length: 4", b"Transfer-Encoding: chunked",
     b"Transfer-Encoding: x", b"A: b ", b" c", b"A : b", b"A:\tb", b"Connection: close", b"C_d: e", b"A: \xff", b"A: b\x0b"]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([b"GET / HTTP/1.1", b"POST /a?b HTTP/1.0", b"POST /%41 HTTP/1.1"]),
    st.lists(FIELD_LINES, max_size=5),
)
def test_what_the_guard_lets_through_frames_the_same_for_a_second_parser(first, lines):
    raw = first + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    try:
        request = read_head(raw, 100)
    except Refused:
        return

    class Second:
        complete = False
        body = b""

        def on_body(self, data):
            self.body += data

        def on_message_complete(self):
            self.complete = True

    second = Second()
    parser = httptools.HttpRequestParser(second)
    payload = b"abc" if not request.is_chunked else b"3\r\nabc\r\n0\r\n\r\n"
    length = request.content_length_bytes
    if length or request.is_chunked:
        parser.feed_data(raw + (payload if request.is_chunked else b"abcd"[:length]))
        assert second.body == (b"abc" if request.is_chunked else b"abcd"[:length])
    else:
        parser.feed_data(raw)
    assert second.complete


EVENT_BITS = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"\n",
        b"\r\n",
        b"\r",
        b"\n\n",
        b"\r\n\r\n",
        b"\r\r",
        b": c",
        "data: ü€".encode(),
        b"y",
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(EVENT_BITS, max_size=14), st.lists(st.integers(0, 200), max_size=10))
@example([b"data: x", b"\n", b"\n", b"\n"], [])
@example([b"data: x", b"\r\n", b"\r"], [8, 9])
def test_events_are_the_same_however_the_stream_is_split(bits, places):
    raw = b"".join(bits)

    def outcome(pieces: list[bytes]) -> tuple[list[bytes], bool]:
        splitter = EventSplitter()
        events = [event for piece in pieces for event in splitter.feed(piece)]
        return events, splitter.has_rest

    whole = outcome([raw])
    joined = b"".join(whole[0])
    assert raw.startswith(joined)
    assert whole[1] == (joined != raw)
    assert outcome(cut(raw, places)) == whole
    assert outcome([raw[i : i + 1] for i in range(len(raw))]) == whole
    for event in whole[0]:
        # No border inside an event: after line ends are made alike there is one blank line, at the end.
        plain = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        assert plain.endswith(b"\n\n")
        assert b"\n\n" not in plain[:-1]


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])),
        min_size=1,
        max_size=3,
    )
)
def test_event_data_joins_lines(texts):
    lines = [text.encode() for text in texts]
    event = b"id: 1\n" + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"
    assert event_data(event) == b"\n".join(lines)
    assert event_data(event.replace(b"\n", b"\r\n")) == b"\n".join(lines)
