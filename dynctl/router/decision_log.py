"""Keeps decisions on disk, beyond what the ring remembers: every n-th request's, once its end is known.

A request pays for an entry in a list. Lines are made a few at a time between other work of the loop, and written by a thread of
their own; what cannot be written is counted and forgotten. Not here: the format (`recorded`), files (`decision_files`).
IO: files, in a thread.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dynctl.core.text import clean
from dynctl.router.decision_files import DecisionFiles
from dynctl.router.decisions import Decision
from dynctl.router.findings import Finding
from dynctl.router.metrics import counter
from dynctl.router.recorded import RecordError, from_line, to_line

log = logging.getLogger("dynctl.router")

_EVERY_S = 0.5
_NUM_AT_ONCE = 8
"""Lines made between two turns of the loop: with 64 candidates each takes about 0.1 ms."""

_MAX_WAITING = 20_000
"""Of requests that run; more are not kept."""

_NUM_GOOD = 20
"""On a full disk a few lines fit now and then: so many writes in a row must work."""

_MAX_FOUND = 100
T = TypeVar("T")


class DecisionLog:
    """The log of one process; `run` it, then `close` it."""

    def __init__(self, directory: str, every: int, max_bytes: int) -> None:
        self._files = DecisionFiles(directory, max_bytes)
        self._every = every
        self._waiting: list[Decision] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decisions")
        self._fault = ""
        self._num_good = 0
        """Writes in a row that worked."""
        self._is_closed = False
        self.num_written = 0
        self.num_lost = 0

    def add(self, decision: Decision) -> None:
        """Keep a decision, if its request is among those that are; the decisions of one request are kept together."""
        if self._every > 1 and zlib.crc32(decision.request_id.encode()) % self._every:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.num_lost += 1
        else:
            self._waiting.append(decision)

    async def run(self) -> None:
        """Write what has ended, for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self, *, all_of_them: bool = False) -> None:
        """Write the decisions whose requests have ended, or all."""
        if self._is_closed:
            return
        waiting, self._waiting = self._waiting, []
        self._waiting += [one for one in waiting if not (one.outcome or all_of_them)]
        ended = [one for one in waiting if one.outcome or all_of_them]
        for start in range(0, len(ended), _NUM_AT_ONCE * 16):
            part = ended[start : start + _NUM_AT_ONCE * 16]
            lines = []
            for position, decision in enumerate(part, 1):
                lines += self._lines_of(decision)
                if position % _NUM_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await self._write(lines)

    def _lines_of(self, decision: Decision) -> list[bytes]:
        try:
            return [to_line(decision)]
        except Exception:  # whatever a decision holds, the router goes on
            log.exception("a decision cannot be written down")
            self.num_lost += 1
            return []

    async def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            await self._in_thread(lambda: self._files.write(b"".join(lines)))
        except OSError as error:
            self.num_lost += len(lines)
            if not self._fault:
                log.warning("the decision log cannot be written: %s", clean(str(error)))
            self._fault, self._num_good = error.strerror or str(error), 0
        else:
            self.num_written += len(lines)
            self._num_good += 1
            if self._fault and self._num_good >= _NUM_GOOD:
                log.info("the decision log is written again; %d decisions are lost", self.num_lost)
                self._fault = ""

    async def find(self, request_id: str) -> list[tuple[Decision, str]]:
        """What was written of a request, by either of its ids, the newest first; and the version that made each."""
        if self._is_closed:
            return []
        found = []
        for line in await self._in_thread(lambda: self._files.find(request_id, _MAX_FOUND)):
            try:
                decision, version = from_line(line)
            except RecordError:
                continue
            if request_id in {decision.request_id, decision.shown_id}:
                found.append((decision, version))
        return found

    def findings(self) -> list[Finding]:
        """Whether it cannot be written."""
        if not self._fault:
            return []
        return [
            Finding(
                "",
                "decision_log",
                f"decisions cannot be written to {self._files.directory}: {self._fault}; {self.num_lost} are lost",
                "make room or let the router's user write there; requests are not held up by it",
            )
        ]

    def exposition(self) -> Iterable[str]:
        """The metrics' lines."""
        written: dict[tuple[str, ...], float] = {
            ("written",): float(self.num_written),
            ("lost",): float(self.num_lost),
        }
        text = "Decisions for the log on disk."
        yield from counter("logged_decisions_total", text, written, ("result",))

    async def close(self) -> None:
        """Write what is left and end the thread; safe to call twice."""
        if self._is_closed:
            return
        await self.flush(all_of_them=True)
        self._is_closed = True
        self._thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
