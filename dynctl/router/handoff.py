"""One request's way through the engines as a state machine: events in, actions out.

    placing ── placed(prefill) ──▶ prefilling ── prefilled ──▶ main ── first_byte ──▶ streaming ── ended ──▶ done
       │  └─── placed(no prefill) ─────────────────────────────▲ │                       └─ fault ──▶ broken
       └ unplaced ▶ waiting ── resumed ▶ placing      fault: back to placing, or failed

Every engine the driver booked is released by exactly one Release action; every request ends in exactly one of the
terminal phases. An event that does not fit the phase (a late answer, a second end) changes nothing.

Not here: choosing engines, sockets, clocks (the driver says whether a retry is allowed). Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dynctl.router.api.answers import Failure

_MAX_FAILED_TRANSFERS = 2
"""After so many the engine that generates does the prefill itself."""


class Leg(StrEnum):
    """A part of the way: the prefill for another engine, or the generation (with its own prefill or not)."""

    PREFILL = "prefill"
    MAIN = "main"


class Phase(StrEnum):
    """Where a request is."""

    PLACING = "placing"
    WAITING = "waiting"
    """No engine has room; in the queue."""
    PREFILLING = "prefilling"
    MAIN = "main"
    """Sent to the engine that generates; no byte has gone to the client."""
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    """Answered with an error."""
    BROKEN = "broken"
    """Ended with an error event after the first byte."""
    GONE = "gone"
    """The client left."""


TERMINAL = frozenset((Phase.DONE, Phase.FAILED, Phase.BROKEN, Phase.GONE))


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt on an engine failed."""

    reason: str
    """A label: `connect`, `closed`, `protocol`, `timeout`, `status_500`, `bad_answer`, `stale`, …"""
    failure: Failure
    """What the client is told when nothing else can be tried."""
    was_sent: bool = True
    """False: the engine certainly never saw the request."""


# Actions


@dataclass(frozen=True, slots=True)
class Place:
    """Choose and book engines, then call `placed` or `unplaced`."""

    wants_prefill: bool
    """Whether a prefill engine is wanted (never again once transfer parameters are in hand)."""
    wants_main: bool
    """Whether the engine that generates is to be chosen too, or is booked already."""
    num_retries: int
    """0: the first attempt; later ones wait a short random time first."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Queue; call `resumed` when an engine may have room, `expired` when the time is over."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a leg to the engine booked for it."""

    leg: Leg
    transfer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Close the connection of the leg under way, so that its engine sees it."""


@dataclass(frozen=True, slots=True)
class Release:
    """Take the leg's booking out of the books."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the client with an error."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Break:
    """End the client's stream with one error event."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Finish:
    """End the client's answer properly."""


@dataclass(frozen=True, slots=True)
class Count:
    """Count something that happened: a metric's name and its labels."""

    name: str
    labels: tuple[str, ...]


Action = Place | Wait | Send | Cancel | Release | Answer | Break | Finish | Count


_FIRST_PLACES = {wants: Place(wants, wants_main=True, num_retries=0) for wants in (False, True)}
_SENDS = {leg: Send(leg) for leg in Leg}
_RELEASES = {leg: Release(leg) for leg in Leg}
_FINISH = Finish()
"""What every request needs is made once."""


class Handoff:
    """The way of one request. Methods are events; each returns what is to be done, in order."""

    __slots__ = (
        "_held",
        "_is_transfer_used",
        "_last_fault",
        "_max_retries",
        "_num_failed_transfers",
        "_transfer",
        "_wants_prefill",
        "num_retries",
        "phase",
    )

    def __init__(self, *, wants_prefill: bool, max_retries: int) -> None:
        self.phase = Phase.PLACING
        self.num_retries = 0
        self._wants_prefill = wants_prefill
        self._max_retries = max_retries
        self._held: set[Leg] = set()
        self._transfer: dict[str, Any] | None = None
        self._is_transfer_used = False
        self._num_failed_transfers = 0
        self._last_fault: Fault | None = None

    @property
    def has_unused_transfer(self) -> bool:
        """Whether checked parameters wait for an engine to use them."""
        return self._transfer is not None and not self._is_transfer_used

    @property
    def has_used_transfer(self) -> bool:
        """Whether the present attempt builds on another engine's blocks: its failure may be that engine's."""
        return self._transfer is not None and self._is_transfer_used

    @property
    def is_over(self) -> bool:
        """Whether a terminal phase is reached."""
        return self.phase in TERMINAL

    def started(self) -> list[Action]:
        """Begin."""
        return [self._place()]

    def placed(self, *, has_prefill: bool) -> list[Action]:
        """Take note of bookings: what Place wanted, a prefill engine only where `has_prefill`."""
        if self.phase is not Phase.PLACING:
            return []
        self._held.add(Leg.MAIN)
        if has_prefill:
            self._held.add(Leg.PREFILL)
            self.phase = Phase.PREFILLING
            return [_SENDS[Leg.PREFILL]]
        return self._send_main()

    def unplaced(self, failure: Failure | None) -> list[Action]:
        """Take note that nothing was booked: wait in the queue, or fail with `failure`."""
        if self.phase is not Phase.PLACING:
            return []
        if failure is None:
            self.phase = Phase.WAITING
            return [Wait()]
        # After a fault the client hears about the fault, not about what was missing to mend it.
        return self._fail(self._last_fault.failure if self._last_fault else failure)

    def resumed(self) -> list[Action]:
        """Try again to be placed."""
        if self.phase is not Phase.WAITING:
            return []
        self.phase = Phase.PLACING
        return [self._place()]

    def expired(self, failure: Failure) -> list[Action]:
        """Give up waiting in the queue."""
        if self.phase is not Phase.WAITING:
            return []
        return self._fail(self._last_fault.failure if self._last_fault else failure)

    def prefilled(self, transfer: dict[str, Any]) -> list[Action]:
        """Take the prefill engine's parameters, already checked against it."""
        if self.phase is not Phase.PREFILLING:
            return []
        self._transfer = transfer
        self._is_transfer_used = False
        return [self._release(Leg.PREFILL), *self._send_main()]

    def faulted(self, leg: Leg, fault: Fault, *, may_retry: bool) -> list[Action]:
        """Take the failure of an attempt."""
        if self.phase is Phase.PREFILLING and leg is Leg.PREFILL:
            return self._prefill_faulted(fault, may_retry=may_retry)
        if leg is not Leg.MAIN:
            return []
        if self.phase is Phase.STREAMING:
            self.phase = Phase.BROKEN
            return [
                self._release(Leg.MAIN),
                Count("stream_broken", (fault.reason,)),
                Break(fault.failure),
            ]
        if self.phase is Phase.MAIN:
            return self._main_faulted(fault, may_retry=may_retry)
        return []

    def refused(self, leg: Leg, failure: Failure) -> list[Action]:
        """Take an engine's verdict that the request itself is wrong: no other engine is asked."""
        if not self._is_at(leg):
            return []
        return [*self._release_all(), *self._fail(failure)]

    def first_byte(self) -> list[Action]:
        """Note that the client has got something: from now on nothing can be replaced."""
        if self.phase is Phase.MAIN:
            self.phase = Phase.STREAMING
            return self._transfer_worked()
        return []

    def ended(self) -> list[Action]:
        """Take the proper end of the engine's answer."""
        if self.phase not in {Phase.MAIN, Phase.STREAMING}:
            return []
        worked = self._transfer_worked() if self.phase is Phase.MAIN else []
        self.phase = Phase.DONE
        return [*worked, self._release(Leg.MAIN), _FINISH]

    def gone(self) -> list[Action]:
        """The client left: cancel and release whatever is held."""
        if self.is_over:
            return []
        phase, self.phase = self.phase, Phase.GONE
        return [
            *_cancels(phase),
            *self._release_all(),
            Count("client_gone", (_GONE_LABEL[phase],)),
        ]

    def cut(self, fault: Fault) -> list[Action]:
        """The router stops: cancel and release whatever is held, and say so to the client."""
        if self.is_over:
            return []
        ending: list[Action] = [*_cancels(self.phase), *self._release_all()]
        if self.phase is not Phase.STREAMING:
            return [*ending, *self._fail(fault.failure)]
        self.phase = Phase.BROKEN
        return [*ending, Count("stream_broken", (fault.reason,)), Break(fault.failure)]

    def transfer_lapsed(self) -> list[Action]:
        """Drop unused parameters whose lease is nearly over, when about to be placed: prefill again."""
        if self.phase is not Phase.PLACING or self._transfer is None:
            return []
        self._transfer = None
        self._wants_prefill = True
        return [self._place()]

    # Inside

    def _place(self) -> Place:
        if not self.num_retries and not self._held:
            return _FIRST_PLACES[self._wants_prefill]
        return Place(self._wants_prefill, Leg.MAIN not in self._held, self.num_retries)

    def _send_main(self) -> list[Action]:
        self.phase = Phase.MAIN
        self._is_transfer_used = self._transfer is not None
        return [_SENDS[Leg.MAIN] if self._transfer is None else Send(Leg.MAIN, self._transfer)]

    def _prefill_faulted(self, fault: Fault, *, may_retry: bool) -> list[Action]:
        actions: list[Action] = [self._release(Leg.PREFILL)]
        self._last_fault = fault
        if may_retry and self.num_retries < self._max_retries:
            self.num_retries += 1
            self.phase = Phase.PLACING
            return [*actions, Count("retries", (Leg.PREFILL, fault.reason)), self._place()]
        # No prefill engine is left to try: the engine that generates does the prefill itself.
        self._wants_prefill = False
        return [*actions, Count("local_prefill", ("prefill_failed",)), *self._send_main()]

    def _main_faulted(self, fault: Fault, *, may_retry: bool) -> list[Action]:
        actions: list[Action] = [self._release(Leg.MAIN)]
        self._last_fault = fault
        if self._transfer is not None and fault.was_sent:
            actions.append(Count("handoffs", ("failed",)))
            self._num_failed_transfers += 1
        if not may_retry or self.num_retries >= self._max_retries:
            return [*actions, *self._fail(fault.failure)]
        self.num_retries += 1
        if fault.was_sent:
            # Parameters an engine may have seen are spent: a second use could read freed blocks.
            self._transfer = None
        self._is_transfer_used = False
        can_hand_over = self._num_failed_transfers < _MAX_FAILED_TRANSFERS
        if self._wants_prefill and not can_hand_over:
            actions.append(Count("local_prefill", ("transfer_failed",)))
        self._wants_prefill = self._wants_prefill and self._transfer is None and can_hand_over
        self.phase = Phase.PLACING
        return [*actions, Count("retries", (Leg.MAIN, fault.reason)), self._place()]

    def _transfer_worked(self) -> list[Action]:
        return [Count("handoffs", ("ok",))] if self._transfer is not None else []

    def _is_at(self, leg: Leg) -> bool:
        return self.phase is (Phase.PREFILLING if leg is Leg.PREFILL else Phase.MAIN)

    def _release(self, leg: Leg) -> Release:
        self._held.remove(leg)
        return _RELEASES[leg]

    def _release_all(self) -> list[Action]:
        held = sorted(self._held)
        self._held.clear()
        return [Release(leg) for leg in held]

    def _fail(self, failure: Failure) -> list[Action]:
        releases = self._release_all()
        self.phase = Phase.FAILED
        return [*releases, Answer(failure)]


_GONE_LABEL = {
    Phase.PLACING: "queued",
    Phase.WAITING: "queued",
    Phase.PREFILLING: "prefill",
    Phase.MAIN: "main",
    Phase.STREAMING: "streaming",
}


def _cancels(phase: Phase) -> list[Action]:
    return [Cancel()] if phase in {Phase.PREFILLING, Phase.MAIN, Phase.STREAMING} else []
