"""The framing guard: which request heads may exist at all, and what they say about their body.

httptools sees only a complete head of bounded size whose first line was read here; what it lets
through and proxies disagree about is refused afterwards. Bodies never reach it. Not here: sockets,
timeouts, routes.
Pure.
"""

import re
import string
from typing import Final

import httptools

from dynctl.http1.message import Header
from dynctl.http1.request import Request

MAX_TARGET_BYTES: Final = 8 * 1024
MAX_FIELDS: Final = 100

_METHODS: Final = {
    name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
}
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSION: Final = re.compile(rb"HTTP/\d(?:\.\d)?")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_PERCENT: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_DOT_SEGMENT: Final = re.compile(r"/\.{1,2}(?:/|$)")
_HOST_BYTES: Final = (string.ascii_letters + string.digits + "-._~%:[]!$&'()*+,;=").encode()
_TARGET_BYTES: Final = bytes(range(0x21, 0x7F))
_SPECIAL: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade")
)
_GUARDED: Final = _SPECIAL | {
    b"authorization",
    b"cookie",
    b"keep-alive",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"x-api-key",
}
"""Names that decide framing, rights or hops: an underscore must not imitate them."""
_KNOWN_TARGETS: dict[bytes, tuple[str, bytes]] = {}
_MAX_KNOWN_TARGETS: Final = 256
_MAX_LENGTH_DIGITS: Final = 15
_MAX_ID_BYTES: Final = 128
_ID_BYTES: Final = (string.ascii_letters + string.digits + "-._:").encode()
_CHANGING: Final = re.compile(
    rb"\r\n(?:content-length:[ \t]*(\d{1,15})|x-request-id:[ \t]*([\w.:-]{1,128}))(?=\r\n)",
    re.IGNORECASE,
)
"""What differs between heads of one client."""


class Refused(Exception):  # noqa: N818 - the guard's verdict, not a fault of ours
    """Raised when a request must not be served; the connection closes after the answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """Short name for counters: framing, header, target, size, method, version, expect."""
        self.message = message


class _Fields:
    """Collects header fields from httptools."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[Header] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.lower(), value))


class KnownHead:
    """The last head of a connection. A client sends the same one again and again but for its length and the request's id.

    One that was sound once is sound with other digits and another plain id, and is not parsed again. Its key is kept as
    long as the connection lasts.
    """

    __slots__ = ("_before", "_gaps", "_request")

    def __init__(self, head: bytes, request: Request) -> None:
        """`request` is what `head` was read as, still without a body."""
        found = list(_CHANGING.finditer(head))
        if head.lower().count(b"x-request-id") > 1:
            # Which of several counts depends on all of them.
            found = [one for one in found if one[1] is not None]
        starts = [one.start(one.lastindex or 0) for one in found] + [len(head)]
        ends = [one.end() for one in found]
        self._before = head[: starts[0]]
        self._gaps = [
            (one[1] is not None, head[end:start])
            for one, end, start in zip(found, ends, starts[1:], strict=True)
        ]
        """What changes, whether it is the length, and what stands behind it."""
        request.header(b"")  # every copy shares the look-up
        self._request = request.again()

    def read(self, data: bytes, max_body_bytes: int) -> tuple[Request, int] | None:
        """The request whose head `data` begins with, and where that ends; None when it is any other head, or not all there."""
        if not data.startswith(self._before):
            return None
        request = self._request.again()
        at = len(self._before)
        for is_length, behind in self._gaps:
            end = data.find(b"\r", at, at + _MAX_ID_BYTES + 1)
            value = data[at:end]
            if not value or not data.startswith(behind, end):
                return None
            if not is_length:
                request.request_id = _plain_id(value)
                if not request.request_id:
                    return None
            elif not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
                return None
            else:
                length = request.content_length_bytes = int(value)
                if length > max_body_bytes:
                    return None
            at = end + len(behind)
        return request, at


def read_head(head: bytes, max_body_bytes: int) -> Request:
    """Read one complete request head, ending in its blank line.

    Raises: Refused when it breaks a rule, with the status to answer.
    """
    request = _read_request_line(head[: head.find(b"\r\n")])
    fields = _Fields()
    try:
        httptools.HttpRequestParser(fields).feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        # What was collected so far often names the rule better than the parser does.
        _apply_fields(request, fields.pairs, max_body_bytes)
        raise Refused(400, "framing", f"malformed request head: {error}") from error
    pairs = fields.pairs
    if len(pairs) > MAX_FIELDS:
        raise Refused(431, "size", f"more than {MAX_FIELDS} header fields")
    if b"_" in head:
        pairs = _without_underscores(pairs)
    ids = [_plain_id(value.rstrip(b" \t")) for name, value in pairs if name == b"x-request-id"]
    request.request_id = next(filter(None, ids), b"")
    _apply_fields(request, pairs, max_body_bytes)
    return request


def check_partial_head(head: bytes | bytearray, max_head_bytes: int) -> None:
    """Refuse early what can no longer become a valid head.

    Raises: Refused when it is too large, has a bare line feed, or its first line is wrong.
    """
    line_end = head.find(b"\r\n")
    if _BARE_LF.search(head) or head[:1] in (b"\r", b" ", b"\t"):
        raise Refused(400, "framing", "lines must end in CR LF, and none may come first")
    if line_end < 0 and len(head) > MAX_TARGET_BYTES + 32:
        raise Refused(414, "target", f"request target longer than {MAX_TARGET_BYTES} bytes")
    if line_end >= 0:
        _read_request_line(bytes(head[:line_end]))
    elif head and not _TOKEN.match(head):
        raise Refused(400, "method", "the request does not begin with a method")
    if len(head) > max_head_bytes:
        raise Refused(431, "size", f"request head larger than {max_head_bytes} bytes")


def _read_request_line(line: bytes) -> Request:
    if len(line) > MAX_TARGET_BYTES + 32:
        raise Refused(414, "target", f"request target longer than {MAX_TARGET_BYTES} bytes")
    parts = line.split(b" ")
    if len(parts) == 2 and _TOKEN.fullmatch(parts[0]):
        raise Refused(505, "version", "HTTP/0.9 is not served")
    if len(parts) != 3:
        raise Refused(400, "framing", "malformed request line")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        status = 505 if _VERSION.fullmatch(version) else 400
        raise Refused(status, "version", "only HTTP/1.1 and HTTP/1.0 are served")
    name = _METHODS.get(method)
    if name is None:
        status = 501 if _TOKEN.fullmatch(method) else 400
        raise Refused(status, "method", "no such method is served")
    known = _KNOWN_TARGETS.get(target)
    if known is None:
        known = _read_target(target)
    request = Request(name, target, known[0], known[1])
    if version == b"HTTP/1.0":
        request.is_http10 = True
        request.can_keep_alive = False
    return request


def _read_target(target: bytes) -> tuple[str, bytes]:
    if len(target) > MAX_TARGET_BYTES:
        raise Refused(414, "target", f"request target longer than {MAX_TARGET_BYTES} bytes")
    if target[:1] != b"/" or b"#" in target or target.translate(None, _TARGET_BYTES):
        raise Refused(400, "target", "the request target must be an absolute path")
    raw_path, _, query = target.partition(b"?")
    path = _decode_path(raw_path)
    if len(_KNOWN_TARGETS) < _MAX_KNOWN_TARGETS and len(target) <= 128 and not query:
        _KNOWN_TARGETS[target] = (path, query)
    return path, query


def _decode_path(raw: bytes) -> str:
    """Percent-decode once and refuse every spelling that could mean another path."""
    num_escapes = raw.count(b"%")
    decoded, num_valid = _PERCENT.subn(lambda match: bytes((int(match[1], 16),)), raw)
    if num_escapes != num_valid:
        raise Refused(400, "target", "malformed percent escape in the path")
    try:
        path = decoded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(400, "target", "the path is not UTF-8") from error
    hides_slash = num_escapes > 0 and path.count("/") != raw.count(b"/")
    is_ambiguous = "//" in path or "\\" in path or _DOT_SEGMENT.search(path) is not None
    if hides_slash or is_ambiguous or not path.isprintable():
        raise Refused(400, "target", "the path is ambiguous")
    return path


def _without_underscores(pairs: list[Header]) -> list[Header]:
    kept = []
    for pair in pairs:
        if b"_" not in pair[0]:
            kept.append(pair)
        elif pair[0].replace(b"_", b"-") in _GUARDED:
            raise Refused(400, "header", "a header name imitates another with an underscore")
    return kept


def _apply_fields(request: Request, pairs: list[Header], max_body_bytes: int) -> None:
    """Read the fields that decide framing and connection, and set what they say."""
    seen: set[bytes] = set()
    named: set[bytes] = set()
    for name, value in pairs:
        if name not in _SPECIAL:
            continue
        value = value.rstrip(b" \t")  # noqa: PLW2901 - the parser strips only what comes before
        if name == b"connection":
            named |= _read_connection(request, value)
            continue
        if name in seen:
            raise Refused(400, "framing", f"{name.decode()} is repeated")
        seen.add(name)
        if name == b"host":
            if not value or value.translate(None, _HOST_BYTES):
                raise Refused(400, "header", "malformed Host")
        elif name == b"content-length":
            request.content_length_bytes = _read_length(value, max_body_bytes)
        elif name == b"transfer-encoding":
            _read_transfer_encoding(request, value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise Refused(417, "expect", "unknown expectation")
            request.expects_continue = not request.is_http10
        else:
            raise Refused(400, "header", "upgrades are not served")
    if request.is_chunked and b"content-length" in seen:
        raise Refused(400, "framing", "Content-Length and Transfer-Encoding together")
    if b"host" not in seen and not request.is_http10:
        raise Refused(400, "header", "exactly one Host is needed")
    named.add(b"content-length")
    if request.request_id:
        named.add(b"x-request-id")
    request.headers = tuple([pair for pair in pairs if pair[0] not in named])


def _plain_id(value: bytes) -> bytes:
    is_plain = len(value) <= _MAX_ID_BYTES and not value.translate(None, _ID_BYTES)
    return value if is_plain else b""


def _read_length(value: bytes, max_body_bytes: int) -> int:
    if not value.isdigit() or len(value) > 19:
        raise Refused(400, "framing", "malformed Content-Length")
    length = int(value)
    if length > max_body_bytes:
        raise Refused(413, "size", f"request body larger than {max_body_bytes} bytes")
    return length


def _read_transfer_encoding(request: Request, value: bytes) -> None:
    if request.is_http10:
        raise Refused(400, "framing", "Transfer-Encoding in HTTP/1.0")
    if value != b"chunked":
        status = 400 if value.lower() in (b"", b"chunked") else 501
        raise Refused(status, "framing", "only the transfer encoding `chunked` is served")
    request.is_chunked = True


def _read_connection(request: Request, value: bytes) -> set[bytes]:
    """Return the fields the client calls hop-by-hop besides the usual words."""
    if value == b"keep-alive":
        return set()
    tokens = {token.strip(b" \t").lower() for token in value.split(b",")}
    if b"upgrade" in tokens:
        raise Refused(400, "header", "upgrades are not served")
    if b"close" in tokens:
        request.can_keep_alive = False
    named = tokens - {b"close", b"keep-alive", b""}
    if named & _GUARDED:
        raise Refused(400, "header", "Connection names a header that is not hop-by-hop")
    return named
