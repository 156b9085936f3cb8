"""Opens a recording: finds its lines, and reads any of them. Not here: what a line holds (`recording`). IO: files.

Opening reads every line as JSON with a time; what is in it is checked when it is read. Nothing in a file is trusted: lines,
their number and what a compressed file unpacks to are bounded.
"""

import gzip
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from dynctl.errors import UsageError
from dynctl.files import reason
from dynctl.telemetry.recorder import older_part
from dynctl.telemetry.recording import (
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_PART_BYTES,
    DamagedError,
    Entry,
    Header,
    decode_entry,
    decode_header,
    decode_stamp,
)

_GZIP_MAGIC = b"\x1f\x8b"
_FIRST_ENTRY_LINE = 2
_CUT = b"\0"


@dataclass(slots=True)
class _Part:
    """One file."""

    path: Path
    file: IO[bytes]
    header: Header
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    snapshots: "array[int]" = field(default_factory=lambda: array("q"))
    """Which of its entries are snapshots."""
    is_cut: bool = False


class Tape:
    """An open recording; entries are counted from 0 over its parts."""

    def __init__(self, path: Path) -> None:
        """Open a file, and the part before it where there is one.

        Raises:
            UsageError: with file and line, when it is no recording, damaged, or empty.
        """
        self._parts: list[_Part] = []
        try:
            newest = _opened(path)
            self._parts.append(newest)
            older = older_part(path)
            if newest.header.part > 1 and older.is_file():
                before = _opened(older)
                self._parts.insert(0, before)
                if before.header.id != newest.header.id:
                    self._parts.pop(0).file.close()
            self._index()
        except BaseException:
            self.close()
            raise
        self.header = newest.header
        self.is_cut = newest.is_cut
        """Whether its end is missing, as when what wrote it was killed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.file.close()

    def _index(self) -> None:
        self.times_s = array("d")
        """By entry, since the start of the recording."""
        self.snapshots = array("q")
        """The entries that are snapshots."""
        for part in self._parts:
            if self.times_s and part.times_s and part.times_s[0] < self.times_s[-1]:
                raise _damaged(part.path, _FIRST_ENTRY_LINE, "it is older than the part before it")
            self.snapshots.extend(len(self.times_s) + at for at in part.snapshots)
            self.times_s.extend(part.times_s)
        if not self.snapshots:
            raise UsageError(f"{self._parts[-1].path} holds no snapshot", "was it just begun?")

    def entry(self, number: int) -> Entry:
        """Read an entry.

        Raises:
            UsageError: with file and line, when it is damaged.
        """
        for part in self._parts:
            if number < len(part.offsets):
                break
            number -= len(part.offsets)
        with _line(part.path, number + _FIRST_ENTRY_LINE):
            part.file.seek(part.offsets[number])
            return decode_entry(part.file.readline(MAX_LINE_BYTES))

    def first_from(self, at_s: float) -> int:
        """Number the first snapshot, among snapshots, that is not before a time; the last one when all are."""
        entry = bisect_left(self.times_s, at_s)
        return min(bisect_left(self.snapshots, entry), len(self.snapshots) - 1)


def _opened(path: Path) -> _Part:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file", "a recording is read more than once")
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file = cast("IO[bytes]", gzip.GzipFile(path, "rb")) if is_packed else path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    try:
        return _scanned(path, file)
    except BaseException:
        file.close()
        raise


def _scanned(path: Path, file: IO[bytes]) -> _Part:
    """Read a file from its first line to its last."""
    with _line(path, 1):
        first = file.readline(MAX_LINE_BYTES + 1)
        part = _Part(path, file, decode_header(first))
    at = len(first)
    while True:
        number = len(part.offsets) + _FIRST_ENTRY_LINE
        with _line(path, number):
            line = _next_line(file)
            if not line.endswith(b"\n"):
                part.is_cut = line != b""
                return part
            if number > MAX_LINES or at > MAX_PART_BYTES:
                raise DamagedError("there is more of it than a recording can have")
            stamp = decode_stamp(line)
            if part.times_s and stamp.at_s < part.times_s[-1]:
                raise DamagedError("it is older than the line before it")
        if stamp.is_snapshot:
            part.snapshots.append(len(part.offsets))
        part.offsets.append(at)
        part.times_s.append(stamp.at_s)
        at += len(line)


def _next_line(file: IO[bytes]) -> bytes:
    """Read a line; one that the end of the file cuts has no line end, nothing at all is the proper end."""
    try:
        line = file.readline(MAX_LINE_BYTES + 1)
    except EOFError:
        return _CUT
    if len(line) > MAX_LINE_BYTES:
        raise DamagedError(f"it is longer than {MAX_LINE_BYTES} bytes")
    return line


@contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    """Say of what fails inside where it is."""
    try:
        yield
    except DamagedError as error:
        raise _damaged(path, number, str(error)) from error
    except EOFError as error:
        raise _damaged(path, number, "it ends in the middle") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, number, "its compressed data are damaged") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error


def _damaged(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        f"{path}:{number}: this line is none of a recording: {why}",
        "dynctl top --record FILE writes recordings",
    )
