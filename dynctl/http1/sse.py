"""Finds where server-sent events end, whatever way their bytes were cut. Bytes stay untouched.

Not here: what an event means.
Pure.
"""

import re
from typing import Final

from dynctl.errors import DynctlError

MAX_EVENT_BYTES: Final = 1024 * 1024

# A line ends in CR LF, LF or CR; a CR at the end of the input may still become CR LF, so it waits.
_LINE_END: Final = rb"(?:\r\n|\n|\r(?=[^\n]))"
_BORDER: Final = re.compile(_LINE_END + _LINE_END)
_LONGEST_BORDER_BYTES: Final = 4
_TOO_LONG: Final = f"a server-sent event is longer than {MAX_EVENT_BYTES} bytes"


class EventTooLongError(DynctlError):
    """Raised when an event does not end within its limit."""


class EventSplitter:
    """Cuts a byte stream into events: `feed` returns those that became complete."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def has_rest(self) -> bool:
        """Whether the last piece ended inside an event: never so at the end of a sound stream."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        r"""Return the events that `data` completed, each with its terminating blank line.

        Raises: EventTooLongError when an event exceeds 1 MiB.
        """
        rest = self._rest
        if not rest and data.endswith(b"\n\n") and b"\r" not in data:
            # The usual case: one or several whole events, ended by LF LF.
            return self._split_plain(data)
        scan_from = max(0, len(rest) - _LONGEST_BORDER_BYTES)
        rest += data
        # In place: a long event that arrives in small pieces is not copied at every piece.
        ends = [match.end() for match in _BORDER.finditer(rest, scan_from)]
        events = []
        start = 0
        for end in ends:
            events.append(bytes(rest[start:end]))
            start = end
        del rest[:start]
        if len(rest) > MAX_EVENT_BYTES or any(len(event) > MAX_EVENT_BYTES for event in events):
            raise EventTooLongError(_TOO_LONG)
        return events

    def _split_plain(self, data: bytes) -> list[bytes]:
        """Split text whose only line end is LF."""
        events = []
        start = 0
        while (end := data.find(b"\n\n", start) + 2) >= 2:
            events.append(data[start:end])
            start = end
        self._rest += data[start:]
        if len(data) > MAX_EVENT_BYTES and max(map(len, events)) > MAX_EVENT_BYTES:
            raise EventTooLongError(_TOO_LONG)
        return events


def event_data(event: bytes) -> bytes | None:
    """Return the payload of an event's `data` lines joined by LF, or None when it has none.

    An event of comments only (a keep-alive) has none.
    """
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found = [
        line[6:] if line.startswith(b"data: ") else line[5:]
        for line in lines
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(found) if found else None
