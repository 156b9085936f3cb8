"""Keeps decisions on disk, beyond what the ring remembers: every n-th request's, once its end is known.

A request pays for an entry in a list. Lines are made a few at a time between other work of the loop, and written by a thread of
their own; what cannot be written is counted and forgotten. Short requests that went well explain little, and a line costs a
third of one: few of them are written. Not here: the format (`recorded`), files (`decision_files`).
IO: files, in a thread.
"""

import asyncio
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from dynctl.core.text import clean
from dynctl.files import reason
from dynctl.router.config import RouterConfig
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
"""On a full disk a few lines fit now and then: so many writes in a row must work, …"""

_QUIET_S = 60.0
"""… or one, and none must fail for so long."""

_CLOSE_S = 3.0
"""A disk that hangs holds the end of the router up no longer, …"""

_FIND_S = 5.0
"""… and a question for so long."""

_HUNG_S = 5.0
"""A write that takes longer does not end soon."""

_MAX_FOUND = 100
T = TypeVar("T")


class DecisionLog:
    """The log of one process; `run` it, then `close` it."""

    def __init__(
        self,
        directory: str,
        every: int,
        max_bytes: int,
        short_every: int = 1,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`short_every`: of the short requests among `every`-th ones that went well; 0: of none."""
        self._files = DecisionFiles(directory, max_bytes)
        self._every = every
        self._short_every = short_every
        self._now_s = now_s
        self._waiting: list[Decision] = []
        self._thread = _Thread()
        self._turn = asyncio.Lock()
        self._flushes: set[asyncio.Task[None]] = set()
        self._fault = ""
        self._failed_s = 0.0
        self._began_s: float | None = None
        """When the write under way was asked for."""
        self._loss = ""
        """Why some were lost though no write failed."""
        self._lost_s = 0.0
        self._num_good = 0
        """Writes in a row that worked."""
        self._is_closed = False
        self.num_written = 0
        self.num_lost = 0

    def add(self, decision: Decision) -> None:
        """Keep a decision, if its request is among those that are; the decisions of one request are kept together."""
        if self._every > 1 and zlib.crc32(decision.request_id.encode()) % self._every:
            return
        if self._is_closed:
            self.num_lost += 1
        elif len(self._waiting) >= _MAX_WAITING:
            self._lose(f"{_MAX_WAITING} wait, and no more are kept")
        else:
            self._waiting.append(decision)

    async def run(self) -> None:
        """Write what has ended, for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self, *, all_of_them: bool = False) -> None:
        """Write the decisions whose requests have ended, or all. Goes on when its caller is cancelled; `close` waits for it."""
        await asyncio.shield(self._begin(all_of_them=all_of_them))

    def _begin(self, *, all_of_them: bool) -> asyncio.Task[None]:
        task = asyncio.create_task(self._flush(all_of_them=all_of_them), name="decisions")
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)
        return task

    async def _flush(self, *, all_of_them: bool) -> None:
        async with self._turn:
            waiting, self._waiting = self._waiting, []
            self._waiting += [one for one in waiting if not (one.outcome or all_of_them)]
            ended = [one for one in waiting if one.outcome or all_of_them]
            ended = [one for one in ended if self._tells_something(one)]
            try:
                while ended:
                    await self._write_some(ended[: _NUM_AT_ONCE * 16])
                    del ended[: _NUM_AT_ONCE * 16]
            finally:
                self._waiting += ended

    def _tells_something(self, decision: Decision) -> bool:
        """Whether it is not one of many short requests that were answered."""
        if decision.policy != "short" or decision.outcome != "done" or self._short_every == 1:
            return True
        if not self._short_every:
            return False
        # Those of every `every`-th request are here.
        number = zlib.crc32(decision.request_id.encode()) // self._every
        return number % self._short_every == 0

    async def _write_some(self, ended: list[Decision]) -> None:
        lines = []
        for position, decision in enumerate(ended, 1):
            lines += self._lines_of(decision)
            if position % _NUM_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._write(lines)

    def _lines_of(self, decision: Decision) -> list[bytes]:
        try:
            return [to_line(decision)]
        except Exception:  # whatever a decision holds, the router goes on
            log.exception("a decision cannot be written down")
            self._lose("one could not be written down, which the router's own log tells of")
            return []

    def _lose(self, why: str) -> None:
        """Count a decision that is lost though no write failed."""
        now_s = self._now_s()
        if not self._loss or now_s - self._lost_s >= _QUIET_S:
            log.warning("decisions are missing in the decision log: %s", why)
        self.num_lost += 1
        self._loss, self._lost_s = why, now_s

    async def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._began_s = self._now_s()
        try:
            await self._thread.does(lambda: self._files.write(b"".join(lines)))
        except OSError as error:
            self.num_lost += len(lines)
            if not self._fault:
                log.warning("the decision log cannot be written: %s", clean(reason(error)))
            self._fault, self._num_good = reason(error), 0
            self._failed_s = self._now_s()
        else:
            self.num_written += len(lines)
            self._num_good += 1
            self._forgive()
        finally:
            self._began_s = None

    def _forgive(self) -> None:
        """Forget a fault that is over."""
        if not (self._fault and self._num_good):
            return
        if self._num_good >= _NUM_GOOD or self._now_s() - self._failed_s >= _QUIET_S:
            log.info("the decision log is written again; %d decisions are lost", self.num_lost)
            self._fault = ""

    async def find(self, request_id: str) -> list[tuple[Decision, str]]:
        """What was written of a request, by either of its ids, the newest first; and the version that made each."""
        if self._is_closed:
            return []
        found: list[tuple[Decision, str]] = []
        try:
            async with asyncio.timeout(_FIND_S):
                lines = await self._thread.does(lambda: self._files.find(request_id, _MAX_FOUND))
        except TimeoutError:
            log.warning("nothing was read of the decision log within %g s", _FIND_S)
            return found
        for line in lines:
            try:
                decision, version = from_line(line)
            except RecordError:
                continue
            if request_id in {decision.request_id, decision.shown_id}:
                found.append((decision, version))
        return found

    def findings(self) -> list[Finding]:
        """Whether it cannot be written, or has gaps since a minute ago."""
        self._forgive()
        where, now_s = self._files.directory, self._now_s()
        if self._began_s is not None and now_s - self._began_s >= _HUNG_S:
            cause = "decision_log_lost"
            text = (
                f"a write to {where} has not ended for {now_s - self._began_s:.0f} s; "
                f"{len(self._waiting)} decisions wait for it, {self.num_lost} are lost"
            )
            hint = "the disk or server it lies on hangs (dmesg, df there); what waits is written once it answers"
        elif self._fault:
            cause = "decision_log"
            text = (
                f"decisions cannot be written to {where}: {self._fault}; {self.num_lost} are lost"
            )
            hint = "make room or let the router's user write there"
        elif self._loss and now_s - self._lost_s < _QUIET_S:
            cause = "decision_log_lost"
            text = f"decisions are missing in {where}, {self.num_lost} so far: {self._loss}"
            hint = "a faster disk, or those of fewer requests: decision_log_every"
        else:
            return []
        return [Finding("", cause, text, f"{hint}; requests are not held up by it")]

    def exposition(self) -> Iterable[str]:
        """The metrics' lines."""
        written: dict[tuple[str, ...], float] = {
            ("written",): float(self.num_written),
            ("lost",): float(self.num_lost),
        }
        text = "Decisions for the log on disk."
        yield from counter("logged_decisions_total", text, written, ("result",))

    async def close(self) -> None:
        """Write what is left and end the thread, soon even where the disk hangs; safe to call twice, or again when cancelled."""
        if self._is_closed:
            return
        self._begin(all_of_them=True)
        flushes = {*self._flushes}
        _, late = await asyncio.wait(flushes, timeout=_CLOSE_S)
        self._is_closed = True
        for task in late:
            task.cancel()
        await asyncio.gather(*flushes, return_exceptions=True)
        if self._waiting:
            self.num_lost += len(self._waiting)
            log.warning("the last %d decisions may not be in the log", len(self._waiting))
            self._waiting.clear()
        self._thread.end()


def open_log(config: RouterConfig) -> DecisionLog | None:
    """The log a router is to keep; None where it is to keep none."""
    settings = config.settings
    if not config.decision_log or not settings.decision_log_every:
        return None
    return DecisionLog(
        config.decision_log,
        settings.decision_log_every,
        settings.decision_log_max_bytes,
        settings.decision_log_short_every,
    )


class _Thread:
    """A thread that does one thing after another. The end of the process does not wait for it, as it does for an executor's."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="decisions", daemon=True).start()

    def does(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have something done there; what it returns or raises."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                future.set_exception(error)

        self._work.put(do)
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """End once all is done."""
        self._work.put(None)

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            do()
