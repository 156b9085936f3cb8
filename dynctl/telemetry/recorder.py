"""Writes what is watched to a file that cannot grow without end. Not here: what a line holds (`recording`). IO: files, clock.

A file whose name ends in `.gz` is compressed. At half the limit the file becomes `FILE.1`, over the one before, and a new one
begins: the newest half at least is always there.
"""

import asyncio
import contextlib
import gzip
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import dynctl
from dynctl.core.snapshot import Snapshot
from dynctl.core.units import format_bytes
from dynctl.errors import UsageError
from dynctl.files import reason
from dynctl.telemetry.answers import Answers, Asks, num_decisions
from dynctl.telemetry.figures import Goals
from dynctl.telemetry.recording import (
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_PART_BYTES,
    SCHEMA,
    Entry,
    Header,
    encode,
    recordable,
    recordable_answers,
)
from dynctl.telemetry.watch import Watched

ASK_PERIOD_S = 5.0
"""Between two looks at routers' decisions and hits: screens are asked oftener, but only the one that is shown."""
GZIP_LEVEL = 6


class Recorder:
    """One recording. What cannot be written ends it: `failure` says why, and watching goes on."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        cluster: str,
        goals: Goals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Raises:
            UsageError: when there is such a file, or none can be written there.
        """
        self.path = path
        self.failure = ""
        self.num_snapshots = 0
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._num_lines = 0
        """Of this part, like its bytes before compression."""
        self._num_bytes = 0
        self._salt = secrets.token_bytes(16)
        self._started_s = clock()
        self._header = Header(
            SCHEMA, secrets.token_hex(8), 0, cluster, time.time(), dynctl.__version__, goals
        )
        if (older := older_part(path)).exists():
            raise UsageError(f"{older} exists: it would be overwritten", "record to another file")
        try:
            self._begin_part()
        except FileExistsError as error:
            raise UsageError(f"{path} exists", "record to another file, or remove it") from error
        except OSError as error:
            raise UsageError(f"cannot record to {path}: {reason(error)}") from error

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
        """End the file properly; one that never held anything goes, so that the next try may have its name."""
        if self._raw.closed:
            return
        try:
            self._close_part()
            if self.num_snapshots == 0 and not self.failure:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            self.failure = self.failure or reason(error)

    def take(self, snapshot: Snapshot) -> None:
        """Write a snapshot."""
        self._write(Entry(self._clock() - self._started_s, snapshot=recordable(snapshot)))
        self.num_snapshots += not self.failure

    def take_answers(self, answers: Answers) -> None:
        """Write what routers answered."""
        asked = recordable_answers(answers, self._salt)
        self._write(Entry(self._clock() - self._started_s, asked=asked))

    def _write(self, entry: Entry) -> None:
        if self.failure:
            return
        line = encode(entry)
        if len(line) > min(self._limit_bytes // 2, MAX_LINE_BYTES):
            self.failure = f"a line of {format_bytes(len(line))} is more than it can hold"
            self.close()
            return
        try:
            if self._has_no_room(len(line)):
                self._next_part()
            self._put(line)
            # What was written is in the file even if this process is killed now.
            self._out.flush()
        except OSError as error:
            self.failure = reason(error)
            self.close()

    def _has_no_room(self, num_bytes: int) -> bool:
        """Whether a line would make this part larger than promised, or than what is read again."""
        # Compressed it takes less; what is promised is only that it never takes more.
        return (
            self._raw.tell() + num_bytes > self._limit_bytes // 2
            or self._num_lines >= MAX_LINES
            or self._num_bytes + num_bytes > MAX_PART_BYTES
        )

    def _put(self, line: bytes) -> None:
        self._out.write(line)
        self._num_lines += 1
        self._num_bytes += len(line)

    def _next_part(self) -> None:
        self._close_part()
        older = older_part(self.path)
        self.path.replace(older)
        try:
            self._begin_part()
        except OSError:
            # What there is keeps the name that is asked for.
            older.replace(self.path)
            raise

    def _begin_part(self) -> None:
        """Begin a file; one that cannot hold a header is none."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._raw: IO[bytes] = os.fdopen(os.open(self.path, flags, 0o600), "wb")
        self._out: IO[bytes] = self._raw
        if is_compressed(self.path):
            self._out = gzip.GzipFile("", "wb", GZIP_LEVEL, self._raw, mtime=0)  # type: ignore[assignment]
        self._num_lines = self._num_bytes = 0
        self._header = replace(self._header, part=self._header.part + 1)
        try:
            self._put(encode(self._header))
            self._out.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._close_part()
            self.path.unlink()
            raise

    def _close_part(self) -> None:
        try:
            if not self._out.closed:
                self._out.close()
        finally:
            self._raw.close()


def older_part(path: Path) -> Path:
    """Name the part before the newest one."""
    return path.with_name(f"{path.name}.1")


def is_compressed(path: Path) -> bool:
    """Whether a recording of this name is written compressed; when read, that is seen from its content."""
    return path.suffix == ".gz"


class Recorded:
    """A watch that is written down while it is looked at: `async with Recorded(watched, recorder) as watched`."""

    def __init__(
        self, watched: Watched, recorder: Recorder, ask_period_s: float = ASK_PERIOD_S
    ) -> None:
        self._watched = watched
        self._recorder = recorder
        self._period_s = ask_period_s
        self._latest: Snapshot | None = None
        self._has_snapshot = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._ask(), name="record:ask")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        """Begin; every snapshot is in the file before it is shown."""
        async for snapshot in self._watched:
            if self._task.done():
                self._task.result()
            self._recorder.take(snapshot)
            self._latest = snapshot
            self._has_snapshot.set()
            yield snapshot

    async def answer(self, asks: Asks) -> Answers:
        """Ask for a screen; what comes of it is not recorded, what is asked all the time is."""
        return await self._watched.answer(asks)

    async def _ask(self) -> None:
        await self._has_snapshot.wait()
        while not self._recorder.failure:
            assert self._latest is not None
            num_engines = sum(len(host.engines) for host in self._latest.hosts)
            asks = Asks(num_decisions=num_decisions(num_engines), hits=True)
            self._recorder.take_answers(await self._watched.answer(asks))
            await asyncio.sleep(self._period_s)
