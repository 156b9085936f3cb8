"""The log file of one unit: bounded, readable while it is written, never a reason for a process to wait.

Not here: what a line means (`causes`). Programs write to the file themselves with O_APPEND; when it grows too large
its tail is copied to `NAME.1` and it is cut, so no program need reopen anything. Lines written in between are lost.
IO: files.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LogLimits:
    """How much of a unit's output is kept: at most twice `max_bytes`, plus what comes between two looks."""

    max_bytes: int = 16 * 1024 * 1024


class LogFile:
    """One unit's output."""

    def __init__(self, path: Path, limits: LogLimits) -> None:
        self.path = path
        self._limits = limits
        self.start_offset = 0
        """Where the present start's lines begin; 0 after the file was cut."""

    def mark_start(self, line: str) -> None:
        """Write a line of our own and note that a new start's output begins here."""
        with self.path.open("ab") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(line.encode() + b"\n")
            self.start_offset = file.tell()

    @property
    def is_too_large(self) -> bool:
        """Whether it is time to cut it."""
        return self.size_bytes() > self._limits.max_bytes

    def rotate(self) -> None:
        """Keep the tail in `NAME.1` and cut the file."""
        size = self.size_bytes()
        older = self.path.with_name(self.path.name + ".1")
        with self.path.open("r+b") as file:
            file.seek(max(0, size - self._limits.max_bytes))
            try:
                with older.open("wb") as target:
                    os.fchmod(target.fileno(), 0o600)
                    while piece := file.read(_CHUNK_BYTES):
                        target.write(piece)
                        if target.tell() > self._limits.max_bytes:
                            break
            finally:
                # Also on a full disk: that is when cutting matters most.
                file.truncate(0)
        self.start_offset = 0

    def last_lines(self, count: int, *, this_start: bool = False) -> list[str]:
        """Return the last lines; with `this_start` only those since `mark_start`."""
        lower = self.start_offset if this_start else 0
        lines = _tail(self.path, count, lower)
        if len(lines) < count and not this_start:
            older = self.path.with_name(self.path.name + ".1")
            lines = _tail(older, count - len(lines), 0) + lines
        return lines

    def size_bytes(self) -> int:
        """How long the file is now, 0 when there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read_from(self, offset: int) -> tuple[bytes, int]:
        """Return what was written since `offset` (one piece) and the next offset; starts over after a cut."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(offset if offset <= size else 0)
                return file.read(_CHUNK_BYTES), file.tell()
        except FileNotFoundError:
            return b"", 0


def _tail(path: Path, count: int, lower: int) -> list[str]:
    """Read backwards only as far as needed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        at = file.seek(0, os.SEEK_END)
        lower = lower if lower <= at else 0
        parts: deque[bytes] = deque()
        newlines = 0
        while at > lower and newlines <= count:
            step = min(_CHUNK_BYTES, at - lower)
            at -= step
            file.seek(at)
            piece = file.read(step)
            newlines += piece.count(b"\n")
            parts.appendleft(piece)
    lines = b"".join(parts).decode("utf-8", "replace").splitlines()
    return lines[-count:] if count else []
