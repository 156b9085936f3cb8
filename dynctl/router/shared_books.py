"""The books of load of several router processes on one port: each writes its own rows in shared memory and reads the others'.

A row holds what one process has booked on one engine: levels (requests, tokens, prefills that have not ended)
and a count (requests sent). What the others have booked is added to the table's own workers, so that every decision
sees the load of all. No locks: a row has one writer, and a number read a moment too early only steers.
IO: shared memory.
"""

import asyncio
import functools
import mmap
import operator
import os
import struct
import time

import xxhash

from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

MAX_ENGINES = 1024
_ROW = 6
"""Key, requests, tokens, prefill tokens, prefills, sent; 64-bit words."""

_HEAD = 3
"""Before a process's rows: how many of them are in use, a stamp that is another whenever a key is, and how many requests
are under way."""

_SHARE = _HEAD + MAX_ENGINES * _ROW
_facts = struct.Struct("5q")
"""A row behind its key, in the machine's own format: whole words are written and read."""
EXCHANGE_S = 0.002
"""Decisions see what others did up to so long ago: at 2,000 requests a second four of them."""


def make_books(num_processes: int) -> int:
    """Make empty books; returns the descriptor of their memory, to be inherited and closed."""
    descriptor = os.memfd_create("dynctl-books", 0)
    os.ftruncate(descriptor, num_processes * _SHARE * 8)
    return descriptor


def clear_share(descriptor: int, process: int) -> None:
    """Empty the rows of a process that has died."""
    os.pwrite(descriptor, bytes(_SHARE * 8), process * _SHARE * 8)


class SharedBooks:
    """One process's view; `close` it."""

    def __init__(
        self, descriptor: int, process: int, num_processes: int, table: WorkerTable
    ) -> None:
        self._map = mmap.mmap(descriptor, num_processes * _SHARE * 8)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._own = process * _SHARE
        self._others = [p * _SHARE for p in range(num_processes) if p != process]
        self._table = table
        self._rows: dict[str, int] = {}
        """Where our row of an engine begins."""
        self._seen: dict[tuple[str, str], tuple[int, ...]] = {}
        """What was last added to a worker on behalf of the others."""
        self._places: dict[int, tuple[int, dict[int, int]]] = {}
        """By process: its stamp when its rows were last looked up, and at which byte each engine's facts begin."""
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_untold = False
        """Something has ended since the last exchange."""
        for at in range(self._own, self._own + _SHARE):
            self._words[at] = 0

    def close(self) -> None:
        """Let go of the memory; what we had booked is no load any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._words[self._own] = self._words[self._own + 2] = 0
        self._words.release()
        self._bytes.release()
        self._map.close()

    def under_way(self, number: int) -> None:
        """Tell the others at once how many requests this process has."""
        self._words[self._own + 2] = number

    def others_under_way(self) -> int:
        """How many requests the other processes have."""
        return sum([self._words[share + 2] for share in self._others])

    def exchange_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the others know that something ended, also when nothing begins for a while."""
        self._is_untold = True
        if self._timer is None:
            self._timer = loop.call_later(EXCHANGE_S, self._exchange_now, loop)

    def _exchange_now(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._is_untold:
            return
        self.exchange(loop.time())
        if self._is_untold:
            # Requests that began have exchanged just now: what ended behind that waits for its turn.
            self.exchange_soon(loop)

    def exchange(self, now_s: float) -> None:
        """Write what we booked and add what others did, unless that was done just now."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + EXCHANGE_S
        self._is_untold = False
        workers = self._table.all()
        places = [self._places_of(share) for share in self._others]
        for worker in workers:
            key = worker.key
            seen = self._seen.get(key, _NONE)
            self._write(worker, seen)
            sums = self._sums_of(worker.id, places)
            if sums != seen:
                self._seen[key] = sums
                _apply(self._table, worker, seen, sums, now_s)
        if len(self._seen) > len(workers):
            keys = {worker.key for worker in workers}
            self._seen = {key: seen for key, seen in self._seen.items() if key in keys}

    def _write(self, worker: Worker, seen: tuple[int, ...]) -> None:
        row = self._rows.get(worker.id)
        if row is None:
            row = self._new_row(worker.id)
        requests, tokens, prefill_tokens, prefills, sent = seen
        _facts.pack_into(
            self._map,
            (row + 1) * 8,
            worker.active_requests - requests,
            worker.reserved_tokens - tokens,
            worker.pending_prefill_tokens - prefill_tokens,
            worker.pending_prefills - prefills,
            worker.num_sent - sent,
        )

    def _new_row(self, engine_id: str) -> int:
        living = {worker.id for worker in self._table.all()}
        free = next((old for old in self._rows if old not in living), None)
        if free is not None:
            row = self._rows.pop(free)
        else:
            number = self._words[self._own]
            if number >= MAX_ENGINES:
                # More engines than rows: the last row is shared, and means less.
                return self._own + _HEAD + (MAX_ENGINES - 1) * _ROW
            row = self._own + _HEAD + number * _ROW
            self._words[self._own] = number + 1
        self._words[row] = key_of(engine_id)
        self._words[self._own + 1] = time.monotonic_ns()
        self._rows[engine_id] = row
        return row

    def _places_of(self, share: int) -> dict[int, int]:
        words = self._words
        number, stamp = words[share], words[share + 1]
        known = self._places.get(share)
        if known is not None and known[0] == stamp and len(known[1]) == number:
            return known[1]
        first = share + _HEAD
        rows = range(first, first + number * _ROW, _ROW)
        places = {words[row]: (row + 1) * 8 for row in rows}
        self._places[share] = (stamp, places)
        return places

    def _sums_of(self, engine_id: str, places: list[dict[int, int]]) -> tuple[int, ...]:
        """What the other processes have booked on an engine."""
        key, sums = key_of(engine_id), _NONE
        for rows in places:
            at = rows.get(key)
            if at is not None:
                facts = _facts.unpack_from(self._map, at)
                sums = facts if sums is _NONE else tuple(map(operator.add, sums, facts))
        return sums


_NONE: tuple[int, ...] = (0, 0, 0, 0, 0)


@functools.lru_cache(maxsize=4 * MAX_ENGINES)
def key_of(engine_id: str) -> int:
    """Name an engine in 63 bits, the same in every process."""
    return int(xxhash.xxh3_64_intdigest(engine_id.encode())) >> 1


def _apply(
    table: WorkerTable,
    worker: Worker,
    seen: tuple[int, ...],
    sums: tuple[int, ...],
    now_s: float,
) -> None:
    requests, tokens, prefill_tokens, prefills, sent = (
        new - old for new, old in zip(sums, seen, strict=True)
    )
    worker.active_requests += requests
    worker.active_tokens += tokens
    worker.pending_prefill_tokens += prefill_tokens
    worker.pending_prefills += prefills
    worker.num_sent += sent
    if sent > 0:
        table.num_sent += sent
        worker.recent += sent * table.recent_unit(now_s)
    base, slope = worker.prefill.base, worker.prefill.slope
    if prefills > 0:
        added_ms = prefills * base + max(prefill_tokens, 0) * slope
        worker.free_at_s = max(worker.free_at_s, now_s) + added_ms / 1e3
    elif prefills < 0 or prefill_tokens < 0:
        # Somebody's prefill has ended: what is left is counted from here, as after one of our own.
        left_ms = worker.pending_prefills * base + worker.pending_prefill_tokens * slope
        worker.free_at_s = now_s + left_ms / 1e3
    worker.changed()
