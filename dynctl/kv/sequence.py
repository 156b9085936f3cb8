"""The order of one publisher's batches: duplicates, gaps, replays, restarts (K1 to K8), as decisions without sockets.

A caller feeds what arrives and the clock; each answer says, in this order: forget everything (`reset`), apply these
payloads, ask the replay socket from this sequence number on. Replays are asked one at a time, each on a new socket,
so that an answer always belongs to the last request.
Not here: decoding, sockets, timers. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import xxhash

MAX_HELD = 1000
"""Batches held during a repair; newer ones are asked for again instead."""
REPLAY_SILENCE_S = 5.0
REORDER_S = 1.0
"""Where nobody can replay, what is missing may still come late for so long (K4)."""
MAX_ATTEMPTS = 5
"""Replays in a row that may bring nothing before the gap is given up."""
_MAX_REMEMBERED = 1024


@dataclass(slots=True)
class Verdict:
    """What to do now: forget everything if `reset`, apply `apply` in order, ask for `replay_from` if not None."""

    reset: bool = False
    apply: list[tuple[int, bytes]] = field(default_factory=list)
    replay_from: int | None = None


@dataclass(slots=True)
class SequenceCounts:
    """How often each case was met."""

    num_duplicates: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_lost: int = 0
    """Gaps nobody could fill: everything was forgotten."""
    num_restarts: int = 0


class EventSequence:
    """The cursor of one publisher. `can_replay` is False where the engine has no replay endpoint."""

    def __init__(self, can_replay: bool = True) -> None:
        self._can_replay = can_replay
        self._next: int | None = None
        self._highest = -1
        self._held: dict[int, bytes] = {}
        self._remembered: OrderedDict[int, int] = OrderedDict()
        self._is_repairing = False
        self._is_unanswered = False
        self._num_attempts = 0
        self._asked = 0
        self._wanted = 0
        self._compare_from: int | None = None
        """Set while it is unsure whether the publisher is still the same."""
        self._heard_s = 0.0
        self._gap_since_s: float | None = None
        """Without replay: since when something is missing."""
        self.counts = SequenceCounts()

    @property
    def is_repairing(self) -> bool:
        """Tell whether batches are awaited just now: missing ones, or what may have been lost unseen."""
        return self._is_repairing or self._gap_since_s is not None

    @property
    def is_missing(self) -> bool:
        """Tell whether batches are known to be missing, or the publisher may be another one: what is known is doubtful."""
        if not self._next:
            return False  # nothing is known yet
        return self._next <= self._highest or bool(self._held) or self._compare_from is not None

    @property
    def last(self) -> int:
        """The last sequence number applied, -1 before the first."""
        return -1 if self._next is None else self._next - 1

    def start(self, now_s: float) -> Verdict:
        """Join: ask for everything the publisher still has, so that an engine that ran before us is known."""
        return self._finish(Verdict(), now_s) if self._can_replay else Verdict()

    def takes(self, seq: int, payload: bytes) -> bool:
        """Take a batch that is simply the next one, as nearly all are; False where `live` has more to decide."""
        is_plain = seq == self._next and seq > self._highest and not self._held
        if not is_plain or self.is_repairing or self._compare_from is not None:
            return False
        self._remember(seq, payload)
        self._highest = seq
        self._next = seq + 1
        return True

    def live(self, seq: int, payload: bytes, now_s: float) -> Verdict:
        """Take a batch from the subscription."""
        verdict = Verdict()
        if self._is_from_restart(seq, payload):
            self._restart(verdict)
        self._highest = max(self._highest, seq)
        if self._next is not None and seq < self._next:
            self.counts.num_duplicates += 1
            return verdict
        if self._next is None and (seq == 0 or not self._can_replay):
            self._next = seq
        if seq in self._held:
            self.counts.num_duplicates += 1
        elif len(self._held) < MAX_HELD or seq == self._next:
            self._held[seq] = payload
        self._drain(verdict)
        return self._finish(verdict, now_s)

    def replayed(self, seq: int, payload: bytes, now_s: float) -> Verdict:
        """Take a batch from the replay socket."""
        self._heard_s = now_s
        verdict = Verdict()
        if not self._is_repairing:
            self.counts.num_duplicates += 1
            return verdict
        is_first, self._is_unanswered = self._is_unanswered, False
        self._compare_from = None
        if self._next is None:
            self._join_at(seq)
        elif self._contradicts(seq, payload):
            self._restart(verdict)
            return self._ask(verdict, now_s)
        elif is_first and seq > self._next and self._is_gap_confirmed(verdict, seq, now_s):
            return verdict
        self._highest = max(self._highest, seq)
        if self._next is not None and seq >= self._next:
            if len(self._held) < MAX_HELD or seq == self._next:
                self._held[seq] = payload
            self._drain(verdict)
        return verdict

    def replay_ended(self, now_s: float) -> Verdict:
        """Take the replay's end marker: what the publisher still had has been sent."""
        return self._after_attempt(now_s, has_answered=True)

    def tick(self, now_s: float) -> Verdict:
        """Look at the clock (a few times a second): a silent replay is asked again, never waited for."""
        if self._is_repairing and now_s - self._heard_s >= REPLAY_SILENCE_S:
            return self._after_attempt(now_s, has_answered=False)
        if self._gap_since_s is not None:
            return self._finish(Verdict(), now_s)
        return Verdict()

    def not_asked_yet(self, now_s: float) -> None:
        """Take the news that a replay asked for has to wait its turn: its time begins later."""
        self._heard_s = now_s

    def connected(self, now_s: float) -> Verdict:
        """Take the news that the subscription has connected for the first time: what was sent before was not heard."""
        return self._ask(Verdict(), now_s) if self._can_replay else Verdict()

    def reconnected(self, now_s: float) -> Verdict:
        """Take the news that the subscription has connected again: the publisher may be another process.

        What it still has of what we applied is compared, so that a new one is noticed at once, whatever its numbers.
        """
        if not self._can_replay:
            return Verdict()
        self._compare_from = next(iter(self._remembered), 0)
        return self._ask(Verdict(), now_s)

    def audit(self, now_s: float) -> Verdict:
        """Ask for what may have been lost at the tail of a publisher that went quiet (K5)."""
        if self._is_repairing or not self._can_replay:
            return Verdict()
        return self._ask(Verdict(), now_s)

    def _join_at(self, seq: int) -> None:
        """Begin at the oldest batch the publisher still has."""
        self._next = seq
        for early in [held for held in self._held if held < seq]:
            del self._held[early]

    def _is_gap_confirmed(self, verdict: Verdict, seq: int, now_s: float) -> bool:
        """Judge an answer that begins after the gap: ask once more, then believe that the batches are gone (K2).

        Returns True when the answer under way is to be dropped for a new one.
        """
        if self._num_attempts == 0:
            self._num_attempts = 1
            self._ask(verdict, now_s)
            return True
        self._give_up(verdict, seq)
        return False

    def _after_attempt(self, now_s: float, has_answered: bool) -> Verdict:
        """Judge a replay that is over: repaired, ask again for the rest, or give the gap up."""
        verdict = Verdict()
        if not self._is_repairing:
            return verdict
        self._is_repairing = False
        if has_answered:
            self._compare_from = None
        if has_answered and self._is_unanswered and self._asked in self._remembered:
            self._restart(verdict)  # it does not know the batch we had last
            return self._ask(verdict, now_s)
        if self._next is None and has_answered and not self._held:
            self._next = 0  # the publisher has sent nothing yet
        if self._is_complete():
            self._num_attempts = 0
            return verdict
        has_progressed = self._next is not None and self._next > self._wanted
        self._num_attempts = 0 if has_progressed else self._num_attempts + 1
        if self._num_attempts >= MAX_ATTEMPTS:
            self._give_up(verdict, self._highest + 1)
        return self._finish(verdict, now_s)

    def _give_up(self, verdict: Verdict, seq: int) -> None:
        """Forget everything and go on after the gap: at `seq`, or at the first batch held before it (K2)."""
        self._num_attempts = 0
        self._compare_from = None
        # Before the first batch nothing was known that could be forgotten.
        self.counts.num_lost += bool(self._next)
        verdict.reset = True
        verdict.apply.clear()
        self._next = min([seq, *self._held])
        self._drain(verdict)

    def _finish(self, verdict: Verdict, now_s: float) -> Verdict:
        """Start a repair if batches are missing and none is under way."""
        if self._is_repairing or (self._next is not None and self._is_complete()):
            self._gap_since_s = None
            return verdict
        if not self._can_replay:
            self._wait_for_late(verdict, now_s)
            return verdict
        if self._next is not None and self._num_attempts == 0:
            self.counts.num_gaps += 1
        return self._ask(verdict, now_s)

    def _wait_for_late(self, verdict: Verdict, now_s: float) -> None:
        """Where nobody can replay: give a gap up once it is old, or too much is held behind it."""
        if self._gap_since_s is None:
            self._gap_since_s = now_s
            self.counts.num_gaps += 1
        if now_s - self._gap_since_s >= REORDER_S or len(self._held) >= MAX_HELD:
            self._give_up(verdict, self._highest + 1)
            self._gap_since_s = None if self._is_complete() else now_s

    def _ask(self, verdict: Verdict, now_s: float) -> Verdict:
        self._is_repairing = True
        self._is_unanswered = True
        self._heard_s = now_s
        # From the last batch we have, not the next: whether it is the same tells a restarted publisher (K8).
        self._wanted = self._next or 0
        compare_from = self._compare_from
        self._asked = max(0, self._wanted - 1) if compare_from is None else compare_from
        self.counts.num_replays += 1
        verdict.replay_from = self._asked
        return verdict

    def _is_complete(self) -> bool:
        has_all = self._next is not None and not self._held and self._next > self._highest
        return has_all and self._compare_from is None

    def _drain(self, verdict: Verdict) -> None:
        while self._next is not None and self._next in self._held:
            payload = self._held.pop(self._next)
            verdict.apply.append((self._next, payload))
            self._remember(self._next, payload)
            self._next += 1

    def _remember(self, seq: int, payload: bytes) -> None:
        self._remembered[seq] = xxhash.xxh3_64_intdigest(payload)
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def _is_from_restart(self, seq: int, payload: bytes) -> bool:
        """Tell a restarted publisher from a duplicate: an old number with other content, or too old to say."""
        if self._next is not None and seq < self._next:
            return self._remembered.get(seq) != xxhash.xxh3_64_intdigest(payload)
        held = self._held.get(seq)
        return held is not None and held != payload

    def _contradicts(self, seq: int, payload: bytes) -> bool:
        """Tell whether a replayed batch differs from the one applied under its number."""
        known = self._remembered.get(seq)
        return known is not None and known != xxhash.xxh3_64_intdigest(payload)

    def _restart(self, verdict: Verdict) -> None:
        """Begin again at 0; an answer still under way belongs to the old publisher's numbers (K8)."""
        self.counts.num_restarts += 1
        verdict.reset = True
        self._next = 0
        self._highest = -1
        self._compare_from = None
        self._held.clear()
        self._remembered.clear()
        self._is_repairing = False
        self._gap_since_s = None
        self._num_attempts = 0
