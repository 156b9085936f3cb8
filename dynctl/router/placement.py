"""Where a request goes: candidates from the table, overlaps from the index, a choice by the policy, booked at once.

Every path is booked here, at decision time, also retries and fall-backs. Not here: queues, sockets, clocks. Pure.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynctl.router.api.answers import Failure, no_engine
from dynctl.router.choosing import Choice, Need, Policy
from dynctl.router.config import Settings
from dynctl.router.decisions import Decision
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Prompt
from dynctl.router.workers import Booking, Worker, WorkerTable

_DECODE = frozenset(("decode",))
_PREFILL = frozenset(("prefill",))
_AGGREGATED = frozenset(("aggregated",))


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be placed."""

    request_id: str
    prompt: Prompt
    model: str | None
    """Model the engines must serve; None: any of this deployment."""
    max_tokens: int | None
    local_reason: str = ""
    """Why the engine that generates must prefill too (several sequences, prefill engines failed); empty: it need not."""
    excluded: frozenset[tuple[str, str]] = frozenset()
    """Engines (with incarnation) that failed this request."""
    may_repeat: bool = False
    """Whether an excluded engine may be tried again when there is no other."""


@dataclass(slots=True)
class Placed:
    """Engines booked for a request."""

    main: Booking | None
    """None: booked before."""
    prefill: Booking | None
    overlap_tokens: int | None
    """Expected cached on the engine that does the prefill; None: as known before."""
    local_reason: str = ""
    """Why a decode engine does its own prefill; empty where that is not the case."""
    decisions: list[Decision] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Nothing was booked."""

    failure: Failure | None
    """None: worth waiting for."""


class Placement:
    """Chooses and books; the policy can be changed at any time."""

    def __init__(
        self,
        workers: WorkerTable,
        index: PrefixIndex,
        policy: Policy,
        settings: Settings,
        rng: random.Random,
    ) -> None:
        self.workers = workers
        self.index = index
        self.policy = policy
        self._settings = settings
        self._rng = rng
        self._num_decisions = 0

    def place(self, order: Order, now_s: float) -> Placed | Unplaced:
        """Choose and book all engines a request needs."""
        roles = self._main_roles(order.model)
        mains = self._candidates(order, roles, now_s)
        if not mains:
            return Unplaced(self._why_none(order, roles))
        if roles is not _DECODE:
            booking, overlap, decision = self._book(order, "whole", mains)
            return Placed(booking, None, overlap, decisions=[decision])
        return self._place_split(order, mains, now_s)

    def place_main(self, order: Order, now_s: float) -> Placed | Unplaced:
        """Choose only the engine that generates from blocks another engine has ready."""
        mains = self._candidates(order, _DECODE, now_s)
        if not mains:
            return Unplaced(self._why_none(order, _DECODE))
        booking, _, decision = self._book(order, "decode", mains)
        return Placed(booking, None, None, decisions=[decision])

    def place_prefill(self, order: Order, now_s: float) -> Placed:
        """Choose another prefill engine for a request whose decode engine is booked; there may be none."""
        prefills = self._candidates(order, _PREFILL, now_s)
        if not prefills:
            return Placed(None, None, None, "no_prefill_engine")
        booking, overlap, decision = self._book(order, "prefill", prefills)
        return Placed(None, booking, overlap, decisions=[decision])

    def prefill_locally(self, prompt: Prompt, main: Booking) -> int:
        """Enter the whole prefill in the decode engine's books; return the overlap expected there."""
        overlap = self._overlaps(prompt, [main.worker])[0]
        main.prefill_here(max(prompt.num_tokens - overlap, 1))
        return overlap

    # Inside

    def _place_split(
        self, order: Order, mains: Sequence[Worker], now_s: float
    ) -> Placed | Unplaced:
        if order.local_reason:
            return self._place_local(order, mains, order.local_reason)
        if not self.workers.serving(_PREFILL, order.model):
            return self._place_local(order, mains, "no_prefill_engine")
        prefills = self._candidates(order, _PREFILL, now_s)
        if not prefills:
            # Prefill engines are full: queueing beats turning a decode engine into one. After a failure it does not.
            if order.excluded:
                return self._place_local(order, mains, "prefill_failed")
            return Unplaced(None)
        main, main_overlap, main_decision = self._book(order, "decode", mains)
        left = order.prompt.num_tokens - main_overlap
        if left <= self._settings.local_prefill_max_tokens:
            main.prefill_here(max(left, 1))
            return Placed(main, None, main_overlap, "short", [main_decision])
        prefill, overlap, decision = self._book(order, "prefill", prefills)
        return Placed(main, prefill, overlap, decisions=[main_decision, decision])

    def _place_local(self, order: Order, mains: Sequence[Worker], reason: str) -> Placed:
        booking, overlap, decision = self._book(order, "whole", mains)
        return Placed(booking, None, overlap, reason, [decision])

    def _main_roles(self, model: str | None) -> frozenset[str]:
        """Decode engines generate where there are any that serve; otherwise whole-request engines."""
        if self.workers.serving(_DECODE, model):
            return _DECODE
        if self.workers.serving(_AGGREGATED, model):
            return _AGGREGATED
        known = self.workers.readiness(_DECODE, model)
        return _DECODE if known.coming else _AGGREGATED

    def _candidates(self, order: Order, roles: frozenset[str], now_s: float) -> list[Worker]:
        serving = self.workers.serving(roles, order.model)
        fresh = [worker for worker in serving if worker.key not in order.excluded]
        if not fresh and order.may_repeat:
            fresh = serving
        return [worker for worker in fresh if worker.has_room(now_s)]

    def _why_none(self, order: Order, roles: frozenset[str]) -> Failure | None:
        readiness = self.workers.readiness(roles, order.model)
        serving = self.workers.serving(roles, order.model)
        if serving and order.excluded and not order.may_repeat:
            if all(worker.key in order.excluded for worker in serving) and not readiness.coming:
                return no_engine()
            return None
        return None if serving or readiness.coming else no_engine()

    def _book(
        self, order: Order, leg: str, workers: Sequence[Worker]
    ) -> tuple[Booking, int, Decision]:
        prompt, settings = order.prompt, self._settings
        overlaps = self._overlaps(prompt, workers)
        expected = max(1, int(self.workers.output_tokens.value))
        output = 1 if leg == "prefill" else min(order.max_tokens or expected, expected)
        need = Need(
            prompt.num_tokens,
            output,
            self._num_decisions,
            settings.transfer_ms_per_token if leg == "decode" else None,
            settings.near_ms,
            settings.near_ratio,
        )
        self._num_decisions += 1
        choice = self.policy.choose(need, workers, overlaps, self._rng)
        worker, overlap = workers[choice.position], overlaps[choice.position]
        uncached = 0 if leg == "decode" else max(prompt.num_tokens - overlap, 1)
        decision = _decision(order, leg, workers, overlaps, choice)
        return worker.book(prompt.num_tokens, uncached, output), overlap, decision

    def _overlaps(self, prompt: Prompt, workers: Sequence[Worker]) -> list[int]:
        """Tokens the index expects cached, per worker; 0 where nothing can be known."""
        if not prompt.is_known or not self.policy.uses_index:
            return [0] * len(workers)
        matches: dict[int, dict[str, int]] = {}
        overlaps = []
        for worker in workers:
            size = worker.block_size
            if size < 1 or worker.parity == "mismatch":
                overlaps.append(0)
                continue
            match = matches.get(size)
            if match is None:
                match = matches[size] = self.index.match(prompt.hashes(size))
            overlaps.append(match.get(worker.id, 0) * size)
        return overlaps


def _decision(
    order: Order, leg: str, workers: Sequence[Worker], overlaps: list[int], choice: Choice
) -> Decision:
    return Decision(
        request_id=order.request_id,
        leg=leg,
        prompt_tokens=order.prompt.num_tokens,
        is_tokenized=order.prompt.is_known,
        engines=tuple(worker.id for worker in workers),
        active_requests=tuple(worker.active_requests for worker in workers),
        overlaps_tokens=tuple(overlaps),
        names=choice.names,
        terms=choice.terms,
        position=choice.position,
    )
