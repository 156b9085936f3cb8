"""Has every relay told of its engines, and has every engine's cache been heard of? Before that a router is not ready: it would
place without knowing.

A relay that does not answer is waited for no longer than a while. The router asks each engine a question of its own soon after
it began to serve (`prober`), so a first block comes from any engine whose events can be read, within a second or two. One that
stays silent is waited for no longer than a while, then believed to hold what it was sent, and named (`Probes.degraded`). Once
all were heard of, or given up, the router stays ready.
Not here: reading events (`sources`), finding out why they are missing (`findings`). Pure: times are passed in.
"""

from collections.abc import Container, Iterable, MutableMapping

from dynctl.router.config import RelayTarget
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.probes import EngineNotes
from dynctl.router.text_blocks import TEXT_RANK
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

PATIENCE_S = 20.0
"""Three questions; a small part of what an engine takes to load."""


class FirstEvents:
    """What is awaited of the engines of one router."""

    def __init__(
        self,
        table: WorkerTable,
        index: PrefixIndex,
        notes: MutableMapping[str, EngineNotes],
        silent: Container[str],
        relays: Iterable[RelayTarget],
        *,
        asks: bool,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`silent`: hosts whose relays do not answer just now.

        `asks`: whether engines are asked questions; where not, to be told of an empty cache has to do.
        """
        self._table = table
        self._index = index
        self._notes = notes
        self._asks = asks
        self._patience_s = patience_s
        self._since_s: dict[tuple[str, str], float] = {}
        """By incarnation: when it was first seen serving."""
        self._told: set[tuple[str, str]] = set()
        """Incarnations that were heard of once: one whose cache is emptied or read anew is not silent."""
        self._is_over = False
        self._relays = tuple([relay.host_name for relay in relays])
        self._silent = silent
        self._begun_s: float | None = None

    def lack(self, now_s: float, *, is_matching: bool) -> str:
        """What a router that begins waits for, in words; empty for ever after there was nothing once.

        Only one that `is_matching` tokens waits for events.
        """
        relays = self._awaited_relays(now_s)
        if relays:
            return f"waiting for the engines of {', '.join(relays)}"
        engines = self.awaited(now_s) if is_matching else ()
        return f"waiting for the first KV events of {', '.join(engines)}" if engines else ""

    def _awaited_relays(self, now_s: float) -> tuple[str, ...]:
        if self._begun_s is None:
            self._begun_s = now_s
        if now_s - self._begun_s >= self._patience_s:
            self._relays = ()
        self._relays = tuple(name for name in self._relays if name in self._silent)
        return self._relays

    def awaited(self, now_s: float) -> tuple[str, ...]:
        """Name the engines that a router which begins waits for; none for ever after there was none once."""
        if self._is_over:
            return ()
        names = self.unheard(now_s)
        self._is_over = not names and any(worker.is_serving() for worker in self._table.all())
        return names

    def unheard(self, now_s: float) -> tuple[str, ...]:
        """Name the engines that serve, have not been heard of, and may be soon."""
        serving = [worker for worker in self._table.all() if worker.is_serving()]
        return tuple(worker.id for worker in serving if self._is_awaited(worker, now_s))

    def look(self, now_s: float) -> None:
        """Give up on those that stay silent, and believe those again that speak; call it every second."""
        living = {worker.key for worker in self._table.all()}
        for key in [key for key in self._since_s if key not in living]:
            del self._since_s[key]
        self._told &= living
        for worker in self._table.all():
            if worker.is_serving():
                since_s = self._since_s.setdefault(worker.key, now_s)
                is_late = now_s - since_s >= self._patience_s
                self._judge(worker, is_silent=is_late and not self._is_told(worker))

    def _is_awaited(self, worker: Worker, now_s: float) -> bool:
        since_s = self._since_s.setdefault(worker.key, now_s)
        if now_s - since_s >= self._patience_s or not worker.is_told or self._is_told(worker):
            return False
        notes = self._notes.get(worker.id)
        return notes is None or notes.is_caching is not False

    def _is_told(self, worker: Worker) -> bool:
        if worker.key not in self._told:
            index, name = self._index, worker.id
            if index.num_stored(name) > 0 if self._asks else index.is_told_of(name):
                self._told.add(worker.key)
        return worker.key in self._told

    def _judge(self, worker: Worker, *, is_silent: bool) -> None:
        notes = self._notes.get(worker.id)
        if notes is not None and notes.is_silent != is_silent:
            notes.is_silent = is_silent
            worker.is_told = notes.has_events_source and not is_silent
            if worker.is_told and not worker.is_stranger:
                # Its own events tell of evictions; what was believed meanwhile would stand for ever.
                self._index.end(Source(*worker.key, TEXT_RANK))
