"""A directory of decisions, one a line, in files that are begun anew by size; the oldest go when all reach a bound.

Several processes may write to one directory, each to files of its own. Files are opened for each write, so one that
somebody removes is made anew. Not here: when and what is written. IO: files; it blocks, so it belongs into a thread.
"""

import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"decisions-\d{8}T\d{9}-\d+\.jsonl")
_NUM_FILES = 8
"""The bound is kept by whole files: as many as this, so that an eighth is forgotten at once."""

_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link leads elsewhere, and a pipe would hold the thread for ever."""


class DecisionFiles:
    """The files of one directory, and the one this process writes to."""

    def __init__(self, directory: str, max_bytes: int) -> None:
        self.directory = Path(directory)
        self._max_bytes = max_bytes
        self._file_bytes = max(max_bytes // _NUM_FILES, 1)
        self._current: Path | None = None

    def write(self, lines: bytes) -> None:
        """Append whole lines; nothing is left of those that do not fit any more.

        Raises:
            OSError: when that cannot be done.
        """
        if len(lines) > self._max_bytes:
            raise OSError(0, f"{len(lines)} bytes at once are more than decision_log_max_bytes")
        path = self._current
        size = None if path is None else _size_of(path)
        if path is None or size is None or size + len(lines) > self._file_bytes:
            path = self._begin()
        self._make_room(path, len(lines))
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFULLY, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, lines)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def find(self, request_id: str, limit: int) -> list[bytes]:
        """Lines that have an id as a value, the newest first; files that are gone or unreadable hold none."""
        wanted = b'"' + request_id.encode() + b'"'
        found: list[bytes] = []
        for path in reversed(paths_in(self.directory)):
            try:
                data = _content(path)
            except OSError:
                continue
            at = len(data)
            while len(found) < limit and (at := data.rfind(wanted, 0, at)) >= 0:
                start = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                found.append(data[start : len(data) if end < 0 else end])
                at = start
        return found

    def _begin(self) -> Path:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        now_s = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_s)) + f"{int(now_s * 1e3) % 1000:03}"
        self._current = self.directory / f"decisions-{stamp}-{os.getpid()}.jsonl"
        return self._current

    def _make_room(self, current: Path, num_bytes: int) -> None:
        found = []
        for path in paths_in(self.directory):
            with suppress(OSError):
                facts = path.lstat()
                found.append((facts.st_mtime_ns, facts.st_size, path))
        total = sum([size for _, size, _ in found]) + num_bytes
        fault: OSError | None = None
        # By their last line: the one that a process with little to do writes to is not the oldest.
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            if path == current:
                continue
            try:
                path.unlink(missing_ok=True)
                total -= size
            except OSError as error:
                fault = error
        if fault is not None and total > self._max_bytes:
            raise fault


def paths_in(directory: Path) -> list[Path]:
    """The files of a directory, the oldest first."""
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if _NAME.fullmatch(path.name) and _size_of(path) is not None
        )
    except OSError:
        return []


def _size_of(path: Path) -> int | None:
    """None where somebody has removed it, or it is no file."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _content(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | _CAREFULLY), "rb") as file:
        return file.read()


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
