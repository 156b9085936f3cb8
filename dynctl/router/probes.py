"""Looks, some time after a request ended, whether its engine published what it was sent: evidence for `findings`.

Not here: what the evidence means. Pure: times are passed in.
"""

from collections import deque
from dataclasses import dataclass, replace

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.findings import Evidence, Finding, diagnose, events_fault
from dynctl.router.hits import Outlook
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Hashers
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

_DELAY_S = 1.0
"""Events of a request are there well before; so are those of a relay."""

_EVERY_S = 0.5
"""One check per engine at most this often."""

_MAX_WAITING = 1024
_OTHER_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class EngineNotes:
    """What sources noticed about an engine on the way; kept by engine id."""

    has_events_source: bool = True
    is_silent: bool = False
    """Its events were waited for long enough."""
    was_connected: bool = True
    """Whether its events could be reached at all; only told where somebody reads them."""
    other_topic: str = ""
    """The topic of its events, where it isn't the one subscribed to."""
    num_undecodable: int = 0
    is_caching: bool | None = None
    parity_detail: str = ""
    num_keyed: int = 0
    """Blocks without a parent that carried a LoRA, a salt or other extra keys."""


@dataclass(frozen=True, slots=True)
class _Check:
    due_s: float
    worker: Worker
    blocks: PromptBlocks


class Probes:
    """Evidence on all engines."""

    def __init__(self, table: WorkerTable, index: PrefixIndex, hashers: Hashers) -> None:
        self._table = table
        self._index = index
        self._hashers = hashers
        self._unseeded = Hashers("")
        self._evidence: dict[str, tuple[str, Evidence]] = {}
        self._next_s: dict[str, float] = {}
        self._waiting: deque[_Check] = deque(maxlen=_MAX_WAITING)
        self._found: dict[str, Finding] = {}
        self.notes: dict[str, EngineNotes] = {}

    def ended(self, outlook: Outlook, reported_tokens: int | None, now_s: float) -> None:
        """Note a request that ended well on the engine that did its prefill."""
        worker, blocks = outlook.worker, outlook.blocks
        evidence = self._of(worker)
        evidence.num_ended += 1
        if reported_tokens is not None:
            evidence.num_reported += 1
            evidence.reported_tokens += reported_tokens
        evidence.repeated_tokens += outlook.predicted
        evidence.num_text += outlook.is_text
        # The engine has no names for blocks of text.
        if outlook.is_text or not blocks.num_blocks or now_s < self._next_s.get(worker.id, 0.0):
            return
        self._next_s[worker.id] = now_s + _EVERY_S
        self._waiting.append(_Check(now_s + _DELAY_S, worker, blocks))

    def tick(self, now_s: float) -> list[Finding]:
        """Do the checks that are due; return the findings that are new."""
        while self._waiting and self._waiting[0].due_s <= now_s:
            check = self._waiting.popleft()
            if self._table.get(check.worker.id) is check.worker:
                self._look(check, self._of(check.worker))
        before, self._found = self._found, {}
        for worker in self._table.all():
            if finding := diagnose(self._complete(worker)):
                self._found[worker.id] = finding
        return [f for engine, f in self._found.items() if before.get(engine) != f]

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong now."""
        return tuple(self._found.values())

    def degraded(self) -> list[Finding]:
        """Name engines whose events do not come, before any request has shown it: they are placed by what they were sent."""
        found = []
        for worker in self._table.all():
            is_caching = self.notes.get(worker.id, EngineNotes()).is_caching
            if worker.is_serving() and (not worker.is_told or is_caching is False):
                fault = events_fault(self._complete(worker))
                if fault is not None:
                    found.append(Finding(worker.id, *fault))
        return found

    def _of(self, worker: Worker) -> Evidence:
        incarnation, evidence = self._evidence.get(worker.id, ("", None))
        if evidence is None or incarnation != worker.incarnation:
            evidence = Evidence(worker.id)
            self._evidence[worker.id] = (worker.incarnation, evidence)
        return evidence

    def _complete(self, worker: Worker) -> Evidence:
        notes = self.notes.get(worker.id, EngineNotes())
        evidence = self._of(worker)
        return replace(
            evidence,
            has_events_source=notes.has_events_source,
            was_connected=notes.was_connected,
            other_topic=notes.other_topic,
            num_undecodable=notes.num_undecodable,
            is_caching=notes.is_caching,
            num_stored_blocks=self._index.num_stored(worker.id),
            parity=worker.parity,
            parity_detail=notes.parity_detail,
            block_size=worker.block_size,
            num_keyed=notes.num_keyed,
        )

    def _look(self, check: _Check, evidence: Evidence) -> None:
        blocks, engine = check.blocks, check.worker.id
        if not self._index.num_stored(engine):
            # Nothing of it came yet: that says nothing about names.
            return
        evidence.num_checked += 1
        if self._index.is_published(engine, blocks.hash_at(1)):
            evidence.num_found += 1
            return
        for size in _OTHER_SIZES:
            other = self._hashers.of(size).again(blocks)
            if size == check.worker.block_size or not other.num_blocks:
                continue
            if self._index.is_published(engine, other.hash_at(1)):
                evidence.num_found_at_other_size += 1
                evidence.other_size = size
                return
        unseeded = self._unseeded.of(check.worker.block_size).again(blocks)
        if self._index.is_published(engine, unseeded.hash_at(1)):
            evidence.num_unseeded += 1
