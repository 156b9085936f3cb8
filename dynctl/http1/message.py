"""What heads are made of: status lines, fields, and what of them may travel on. No sockets, no parsing. Pure."""

import http
import json
from collections.abc import Iterable
from typing import Final

Header = tuple[bytes, bytes]
"""Name in lower case, value; space after the value may remain, see `request.Request.header`."""

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in http.HTTPStatus
}

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Fields that concern one connection only. Source: RFC 9110 section 7.6.1."""

_NOT_FORWARDED: Final = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class Rejection:
    """An answer given before the body was read; the connection closes after it."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[Header] = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = tuple(headers)


def error_body(message: str, code: str, kind: str = "invalid_request_error") -> bytes:
    """Build an error document in the shape OpenAI clients read."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def status_line(status: int) -> bytes:
    """Give the first line of an answer, with its line end."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def field_lines(headers: Iterable[Header]) -> bytes:
    """Write header fields as lines.

    Raises: ValueError when a line end hides in a name or value, which would start another message.
    """
    parts = [b"%b: %b\r\n" % pair for pair in headers]
    lines = b"".join(parts)
    if lines.count(b"\n") != len(parts) or lines.count(b"\r") != len(parts):
        raise ValueError("a header name or value contains a line end")
    return lines


def forwardable(headers: Iterable[Header]) -> list[Header]:
    """Keep what may travel to the next hop: no hop-by-hop, framing, host or expect fields."""
    pairs = headers if isinstance(headers, list | tuple) else tuple(headers)
    kept = [pair for pair in pairs if pair[0] not in _NOT_FORWARDED]
    for name, value in pairs:
        if name == b"connection" and value != b"keep-alive":
            named = {token.strip().lower() for token in value.split(b",")}
            kept = [pair for pair in kept if pair[0] not in named]
    return kept
