"""Collects request bodies, by length or in chunks; any split of the bytes gives the same result.

Pure.
"""

import re

from dynctl.http1.guard import Refused

MAX_EXTENSION_BYTES = 256
MAX_TRAILER_BYTES = 8 * 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})((?:;" + _TOKEN + rb"(?:=" + _TOKEN + rb")?)*)")
_TRAILER_LINE = re.compile(rb"(" + _TOKEN + rb"):[\t\x20-\x7e\x80-\xff]*")
_MAX_SIZE_LINE_BYTES = 15 + MAX_EXTENSION_BYTES
_FORBIDDEN_TRAILERS = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"authorization", b"connection", b"expect")
)


class LengthBody:
    """Collects a body of known length; `feed` until `is_complete`, then read `body` and `rest`."""

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes
        self._missing_bytes = length_bytes
        self._parts: list[bytes] = []
        self.body = b""
        self.is_complete = False
        self.rest = b""
        """Bytes that came after the end: the next request."""

    def feed(self, data: bytes) -> None:
        """Take more bytes."""
        self._parts.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes <= 0:
            whole = b"".join(self._parts)
            self._parts.clear()
            self.body = whole[: self._length_bytes]
            self.rest = whole[self._length_bytes :]
            self.is_complete = True


class ChunkedBody:
    """Collects a chunked body strictly; use as `LengthBody`."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._pending = bytearray()
        self._missing_bytes = 0
        self._is_in_trailers = False
        self._num_trailer_bytes = 0
        self._collected = bytearray()
        self.body = b""
        self.is_complete = False
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """Take more bytes.

        Raises: Refused when the framing is wrong or the body grows beyond its limit.
        """
        pending = self._pending
        pending += data
        position = 0
        while not self.is_complete:
            if self._missing_bytes:
                position, has_more = self._take_data(position)
            else:
                position, has_more = self._take_line(position)
            if not has_more:
                break
        if self.is_complete:
            self.rest = bytes(pending[position:])
            self.body = bytes(self._collected)
            pending.clear()
            self._collected.clear()
        else:
            del pending[:position]

    def _take_data(self, start: int) -> tuple[int, bool]:
        """Move chunk data into the body; the chunk's own CR LF counts as its last two bytes."""
        pending = self._pending
        wanted = self._missing_bytes
        available = len(pending) - start
        num_data = min(max(wanted - 2, 0), available)
        self._collected += pending[start : start + num_data]
        position = start + num_data
        self._missing_bytes -= num_data
        if self._missing_bytes > 2 or len(pending) - position < 2:
            return position, False
        if pending[position : position + 2] != b"\r\n":
            raise Refused(400, "framing", "chunk data does not end where its size says")
        self._missing_bytes = 0
        return position + 2, True

    def _take_line(self, start: int) -> tuple[int, bool]:
        pending = self._pending
        end = pending.find(b"\r\n", start)
        limit = MAX_TRAILER_BYTES if self._is_in_trailers else _MAX_SIZE_LINE_BYTES
        # Without a line end the last byte may be its CR, which is not part of the line.
        seen = end - start if end >= 0 else len(pending) - start - 1
        if seen > limit or pending.find(b"\n", start, start + seen + 1) >= 0:
            raise Refused(400, "framing", "malformed chunk size or trailer line")
        if end < 0:
            return start, False
        line = bytes(pending[start:end])
        if self._is_in_trailers:
            self._read_trailer(line)
        else:
            self._read_size(line)
        return end + 2, True

    def _read_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None or len(match[2]) > MAX_EXTENSION_BYTES:
            raise Refused(400, "framing", "malformed chunk size")
        size = int(match[1], 16)
        if size == 0:
            self._is_in_trailers = True
        elif len(self._collected) + size > self._max_body_bytes:
            raise Refused(413, "size", f"request body larger than {self._max_body_bytes} bytes")
        else:
            self._missing_bytes = size + 2

    def _read_trailer(self, line: bytes) -> None:
        if not line:
            self.is_complete = True
            return
        self._num_trailer_bytes += len(line) + 2
        match = _TRAILER_LINE.fullmatch(line)
        if match is None or self._num_trailer_bytes > MAX_TRAILER_BYTES:
            raise Refused(400, "framing", "malformed trailers")
        if match[1].lower().replace(b"_", b"-") in _FORBIDDEN_TRAILERS:
            raise Refused(400, "framing", "a trailer names a field that belongs in the head")
