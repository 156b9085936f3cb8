"""Looks, some time after a request ended, whether its engine published what it was sent: evidence for `findings`.

Not here: what the evidence means. Pure: times are passed in.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.findings import (
    SILENCE_S,
    Evidence,
    Finding,
    Look,
    are_far,
    diagnose,
    events_fault,
)
from dynctl.router.hits import Outlook
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Hashers
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

_DELAY_S = 1.0
"""Events of a request are there well before; so are those of a relay."""

_EVERY_S = 0.5
"""One check per engine at most this often."""

_MUCH = 8
"""This part of a cache, evicted while a prompt waits to be looked for."""

_MAX_WAITING = 1024
_LOSSES_S = 60.0
_MAX_LOSSES = 100
_OTHER_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class EngineNotes:
    """What sources noticed about an engine on the way; kept by engine id."""

    has_events_source: bool = True
    is_silent: bool = False
    """Its events were waited for long enough."""
    was_connected: bool = True
    """Whether its events could be reached at all; only told where somebody reads them."""
    events_at: str = ""
    """Where this router reads its events itself."""
    other_topic: str = ""
    """The topic of its events, where it isn't the one subscribed to."""
    num_undecodable: int = 0
    is_caching: bool | None = None
    parity_detail: str = ""
    num_keyed: int = 0
    """Blocks without a parent that carried a LoRA, a salt or other extra keys."""
    num_other_ranks: int = 0
    """Event batches of data-parallel ranks not expected where they came from."""
    num_other_groups: int = 0
    """Events of groups of layers whose blocks do not stand for a prefix."""
    num_lost: int = 0
    """Times that its events were missing for good, since this router hears of them."""
    lost_before: int | None = None
    """Such times until then: a relay may have read them for long; None: nothing was heard."""
    num_orphans: int = 0
    """Events of blocks whose beginnings nobody told."""
    num_ranks: int = 0
    """Data-parallel ranks it says it has; 0: it does not say."""
    num_ranks_read: int = 0
    """Whose events are read; 0: whoever reads them does not say."""


@dataclass(frozen=True, slots=True)
class _Check:
    due_s: float
    worker: Worker
    blocks: PromptBlocks
    num_blocks: int
    """That were to be cached."""
    num_gone: int
    """Blocks the engine had evicted when the prompt ended."""


def _losses() -> deque[float]:
    return deque(maxlen=_MAX_LOSSES)


@dataclass(slots=True)
class _Seen:
    """How far an engine's own blocks had come."""

    num_stored: int = 0
    empty_since_s: float | None = None
    """Since when there were none."""
    grew_s: float = 0.0
    """When more of them were seen for the last time."""
    agreed_s: float = 0.0
    """When predicted and reported hits were about the same for the last time."""
    num_keyed: int = 0
    """When a prompt was found for the last time."""
    found_s: float = 0.0
    """When that was."""
    num_lost: int = 0
    losses_s: deque[float] = field(default_factory=_losses)
    """When events were missing for good."""
    num_orphans: int = 0
    orphaned_s: float = -inf
    """When there were more of those for the last time."""


class Probes:
    """Evidence on all engines."""

    def __init__(self, table: WorkerTable, index: PrefixIndex, hashers: Hashers) -> None:
        self._table = table
        self._index = index
        self._hashers = hashers
        self._unseeded = Hashers("")
        self._evidence: dict[str, tuple[str, Evidence, _Seen]] = {}
        self._next_s: dict[str, float] = {}
        self._waiting: deque[_Check] = deque(maxlen=_MAX_WAITING)
        self._found: dict[str, Finding] = {}
        self.notes: dict[str, EngineNotes] = {}

    def ended(self, outlook: Outlook, reported_tokens: int | None, now_s: float) -> None:
        """Note a request that ended well on the engine that did its prefill."""
        worker, blocks = outlook.worker, outlook.blocks
        evidence, _ = self._of(worker)
        evidence.num_ended += 1
        evidence.num_reported += reported_tokens is not None
        if outlook.predicted:
            evidence.repeats.append((outlook.predicted, reported_tokens or 0))
        if reported_tokens is not None and not outlook.is_text:
            told = (outlook.num_tokens, outlook.predicted, reported_tokens)
            evidence.told_hits.append(told)
        evidence.num_text += outlook.is_text
        # The engine has no names for blocks of text.
        if outlook.is_text or not blocks.num_blocks or now_s < self._next_s.get(worker.id, 0.0):
            return
        self._next_s[worker.id] = now_s + _EVERY_S
        num_blocks = max(outlook.num_cacheable, 1)
        num_gone = self._num_gone(worker.id)
        self._waiting.append(_Check(now_s + _DELAY_S, worker, blocks, num_blocks, num_gone))

    def tick(self, now_s: float) -> list[Finding]:
        """Do the checks that are due; return the findings that are new."""
        for worker in self._table.all():
            self._note_growth(worker, now_s)
            self._note_difference(worker, now_s)
            self._note_losses(worker, now_s)
        while self._waiting and self._waiting[0].due_s <= now_s:
            check = self._waiting.popleft()
            if self._table.get(check.worker.id) is check.worker:
                self._look(check, *self._of(check.worker))
        before, self._found = self._found, {}
        for worker in self._table.all():
            if finding := diagnose(self._complete(worker)):
                self._found[worker.id] = finding
        # Figures in its text change: that is no news.
        return [
            f for id_, f in self._found.items() if id_ not in before or before[id_].cause != f.cause
        ]

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

    def _of(self, worker: Worker) -> tuple[Evidence, _Seen]:
        known = self._evidence.get(worker.id)
        if known is None or known[0] != worker.incarnation:
            known = self._evidence[worker.id] = (worker.incarnation, Evidence(worker.id), _Seen())
        return known[1:]

    def _complete(self, worker: Worker) -> Evidence:
        notes = self.notes.get(worker.id, EngineNotes())
        evidence, _ = self._of(worker)
        return replace(
            evidence,
            has_events_source=notes.has_events_source,
            was_connected=notes.was_connected,
            events_at=notes.events_at,
            other_topic=notes.other_topic,
            num_other_ranks=notes.num_other_ranks,
            num_other_groups=notes.num_other_groups,
            num_ranks=notes.num_ranks,
            num_ranks_read=notes.num_ranks_read,
            num_undecodable=notes.num_undecodable,
            is_caching=notes.is_caching,
            num_stored_blocks=self._index.num_stored(worker.id),
            parity=worker.parity,
            parity_detail=notes.parity_detail,
            block_size=worker.block_size,
        )

    def _note_growth(self, worker: Worker, now_s: float) -> None:
        num_stored = self._index.num_stored(worker.id)
        evidence, seen = self._of(worker)
        if num_stored or seen.empty_since_s is None:
            seen.empty_since_s = now_s
        evidence.empty_for_s = now_s - seen.empty_since_s
        if num_stored != seen.num_stored:
            seen.num_stored, seen.grew_s = num_stored, now_s
            evidence.num_unheard = 0

    def _note_difference(self, worker: Worker, now_s: float) -> None:
        evidence, seen = self._of(worker)
        if not are_far(evidence.told_hits):
            seen.agreed_s = now_s
        evidence.differs_for_s = now_s - seen.agreed_s

    def _note_losses(self, worker: Worker, now_s: float) -> None:
        evidence, seen = self._of(worker)
        notes = self.notes.get(worker.id, EngineNotes())
        # Who reads them anew counts anew; a host may say any number.
        seen.losses_s.extend([now_s] * min(notes.num_lost - seen.num_lost, _MAX_LOSSES))
        if notes.num_orphans > seen.num_orphans:
            seen.orphaned_s = now_s
        seen.num_lost, seen.num_orphans = notes.num_lost, notes.num_orphans
        old_s = min(now_s - _LOSSES_S, seen.found_s)
        while seen.losses_s and seen.losses_s[0] < old_s:
            seen.losses_s.popleft()
        evidence.num_lost = len(seen.losses_s)
        evidence.has_orphans = now_s - seen.orphaned_s <= _LOSSES_S

    def _look(self, check: _Check, evidence: Evidence, seen: _Seen) -> None:
        if not seen.num_stored:
            # Nothing of it came yet: that says nothing about names.
            return
        quiet_s = check.due_s - seen.grew_s
        was_well = Look.FOUND in evidence.looks
        if was_well and quiet_s > 2 * _DELAY_S and not self._holds(check, check.num_blocks):
            # Its names are right, but where are they? A moment later this says more.
            evidence.num_unheard += quiet_s > SILENCE_S
            return
        look = self._look_for(check, evidence, seen)
        if look is Look.FOUND or not self._may_be_evicted(check):
            evidence.looks.append(look)

    def _may_be_evicted(self, check: _Check) -> bool:
        """Whether the engine let go of much of its cache since the prompt ended: then it says nothing that it is not there."""
        engine = check.worker.id
        num_gone = self._num_gone(engine) - check.num_gone
        return num_gone * _MUCH > self._index.num_blocks(engine)

    def _num_gone(self, engine: str) -> int:
        index = self._index
        num_held = index.num_blocks(engine) + index.num_slower_blocks(engine)
        return index.num_stored(engine) - num_held

    def _holds(self, check: _Check, depth: int) -> bool:
        return self._index.is_published(check.worker.id, check.blocks.hash_at(depth))

    def _look_for(self, check: _Check, evidence: Evidence, seen: _Seen) -> Look:
        num_keyed = self.notes.get(check.worker.id, EngineNotes()).num_keyed
        has_first = self._holds(check, 1)
        # The last one too: what a prompt begins with may be known from before something broke.
        if has_first and self._holds(check, check.num_blocks):
            seen.num_keyed, seen.found_s = num_keyed, check.due_s
            return Look.FOUND
        other = None if has_first else self._under_another_name(check, evidence)
        if other is not None:
            return other
        if num_keyed > seen.num_keyed:
            return Look.KEYED
        return Look.LOST if evidence.num_lost or evidence.has_orphans else Look.MISSING

    def _under_another_name(self, check: _Check, evidence: Evidence) -> Look | None:
        """Look for what a prompt begins with as it would be called if one thing were different."""
        blocks, engine = check.blocks, check.worker.id
        for size in _OTHER_SIZES:
            other = self._hashers.of(size).again(blocks)
            if size == check.worker.block_size or not other.num_blocks:
                continue
            if self._index.is_published(engine, other.hash_at(1)):
                evidence.other_size = size
                return Look.OTHER_SIZE
        unseeded = self._unseeded.of(check.worker.block_size).again(blocks)
        return Look.UNSEEDED if self._index.is_published(engine, unseeded.hash_at(1)) else None
