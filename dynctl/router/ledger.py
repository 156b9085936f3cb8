"""One request's bookings and measurements: when what happened, what was predicted, what the engine said.

Not here: what happens next (`handoff`), connections (`flight`). IO: none of its own; times are passed in.
"""

from dynctl.router.api.shapes import Usage
from dynctl.router.bookings import Booking
from dynctl.router.decisions import Decision, DecisionRing
from dynctl.router.handoff import Leg
from dynctl.router.hits import HitBook, Outlook, scaled
from dynctl.router.metrics import Metrics
from dynctl.router.placement import Placed
from dynctl.router.probes import Probes
from dynctl.router.route_keys import KeySums
from dynctl.router.transfer_cost import Move
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker


class Ledger:
    """The figures of one request."""

    __slots__ = (
        "_cached_tokens",
        "_computed",
        "_decisions",
        "_first_s",
        "_key",
        "_loaded",
        "_metrics",
        "_move",
        "_num_tokens",
        "_outlook",
        "_prefill_ms",
        "_ring",
        "arrived_s",
        "booked",
        "bookings",
        "lapses_s",
        "last_s",
        "needs_prefill",
        "overlap_tokens",
        "queue_position",
        "sent_s",
        "source",
        "usage",
    )

    def __init__(
        self, metrics: Metrics, key: KeySums, ring: DecisionRing, arrived_s: float
    ) -> None:
        self._metrics = metrics
        self._key = key
        self._ring = ring
        self._decisions: dict[Leg, Decision] = {}
        self._cached_tokens: int | None = None
        self._first_s = 0.0
        self._computed: dict[Leg, int] = {}
        """Prompt tokens each leg's engine had to compute, as far as it said so."""
        self._loaded: dict[Leg, tuple[int, int]] = {}
        """Medium and tokens each leg's engine loaded, as far as that can be told."""
        self._prefill_ms: dict[Leg, float] = {}
        """How long each leg's prefill took, its turn in the engine's queue excluded."""
        self._outlook: Outlook | None = None
        self._move: Move | None = None
        """The transfer under way to the engine that generates."""
        self._num_tokens = 0
        self.arrived_s = arrived_s
        self.sent_s = 0.0
        """When the present leg was sent."""
        self.last_s = 0.0
        """When the last token came."""
        self.bookings: dict[Leg, Booking] = {}
        """Of the present attempt."""
        self.booked: list[Booking | Move] = []
        """All that ever was, entered as soon as it is."""
        self.source: Worker | None = None
        """The engine last chosen to prefill for another."""
        self.lapses_s = 0.0
        """Until when what it has ready should be taken."""
        self.needs_prefill = False
        """The engine that generates is booked without a prefill of its own."""
        self.overlap_tokens = 0
        """Expected cached on the engine that prefilled."""
        self.queue_position = 0
        """Where it stood when it began to wait for an engine, from 1; 0: it did not, or nobody asked."""
        self.usage: Usage | None = None

    def placed(self, placed: Placed, policy: str, unix_s: float) -> None:
        """Enter bookings and decisions."""
        if placed.main is not None:
            self.bookings[Leg.MAIN] = placed.main
            self.needs_prefill = placed.prefill is not None
        if placed.main is not None or placed.move is not None:
            self.drop_move()
            self._move = placed.move
        self._outlook = placed.outlook or self._outlook
        if placed.prefill is not None:
            self.bookings[Leg.PREFILL] = placed.prefill
            self.source = placed.prefill.worker
        if placed.overlap_tokens is not None:
            self.overlap_tokens = placed.overlap_tokens
        if placed.local_reason:
            self._metrics.local_prefill.add(placed.local_reason)
        for decision in placed.decisions:
            self._ring.add(decision, policy, unix_s)
            if decision.is_fallback:
                self._metrics.fallbacks.add()
            leg = Leg.PREFILL if decision.leg == "prefill" else Leg.MAIN
            before = self._decisions.get(leg)
            if before is not None and before is not decision and not before.outcome:
                # Its own attempt was well; what came of that was lost, and it is made again.
                before.outcome = "repeated"
            self._decisions[leg] = decision

    def first_token(self, leg: Leg, now_s: float) -> None:
        """Learn from a leg's first token: its prefill is over, and took so long."""
        booking = self.bookings[leg]
        self._first_s = self.last_s = now_s
        booking.worker.succeeded(now_s)
        ttft_ms = (now_s - self.sent_s) * 1e3
        decision = self._decisions.get(leg)
        if decision is not None:
            decision.ttft_ms = round(ttft_ms, 3)
            if decision.is_tokenized:
                error_ms = abs(ttft_ms - sum(decision.predicted_ms(decision.position).values()))
                self._metrics.ttft_error.observe(error_ms / 1e3)
            decision.waited_ms = (self.sent_s - self.arrived_s) * 1e3
        if booking.has_prefill:
            began_s = max(self.sent_s, booking.worker.prefill_ended_s)
            self._prefill_ms[leg] = (now_s - began_s) * 1e3
            self._learn_prefill(leg)
        elif self._move is not None and leg is Leg.MAIN:
            self._move.took(self.sent_s, now_s, booking.worker.step_ms)
            self._move = None
        booking.prefill_ended(now_s)

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """Note how many token events a stream has had by now; those read together share the gap before them."""
        new = num_tokens - self._num_tokens
        if new <= 0:
            return
        if self._num_tokens:
            self._metrics.itl.observe((now_s - self.last_s) / new, new)
        else:
            self._metrics.ttft.observe(now_s - self.arrived_s)
            self._key.first_token(now_s - self.arrived_s)
            if new > 1:
                self._metrics.itl.observe(0.0, new - 1)
        self._num_tokens = num_tokens
        self.last_s = now_s
        booking = self.bookings[Leg.MAIN]
        booking.num_seen = num_tokens
        booking.worker.last_token_s = now_s

    def answered(self, leg: Leg, usage: Usage | None) -> None:
        """Take an engine's count; a decode engine only repeats what the prefill engine had cached."""
        if leg is Leg.MAIN:
            self.usage = usage
            if self._move is not None:
                self._move.arrived()
                self._move = None
        decision = self._decisions.get(leg)
        if decision is not None:
            hit = decision.overlap_tokens
            if usage is not None and usage.cached_tokens is not None:
                # Rates are learned by the tokens they are asked with, which are ours.
                hit = scaled(usage.cached_tokens, decision.prompt_tokens, usage.prompt_tokens)
            self._computed[leg] = max(decision.prompt_tokens - hit, 1)
            if (found := decision.to_load) is not None and hit > found.device_tokens:
                self._loaded[leg] = (found.medium, hit - found.device_tokens)
            self._learn_prefill(leg)
        if usage is None:
            return
        if decision is not None and decision.leg != "decode":
            decision.cached_tokens = usage.cached_tokens
            decision.counted_tokens = usage.prompt_tokens
        if self._cached_tokens is None:
            self._cached_tokens = usage.cached_tokens

    def _learn_prefill(self, leg: Leg) -> None:
        """Learn once both are known, whichever came first: how long a prefill took, and how much was to be computed."""
        if leg in self._computed and leg in self._prefill_ms:
            worker = self.bookings[leg].worker
            computed, ms = self._computed.pop(leg), self._prefill_ms.pop(leg)
            loaded = self._loaded.pop(leg, None)
            if loaded is None:
                worker.prefill_took(computed, ms)
            elif loaded[
                0
            ]:  # from one medium: what computing the rest does not explain was the load
                worker.load_took(*loaded, max(ms - worker.prefill.at(computed), 0.0))

    def faulted(self, leg: Leg, reason: str) -> None:
        """Note the end of an attempt."""
        self._metrics.engine_failures.add(self.bookings[leg].worker.id, reason)
        if leg is Leg.MAIN and self._move is not None and not self.needs_prefill:
            self._move.failed(self.sent_s)
            self._move = None
        decision = self._decisions.get(leg)
        if decision is not None:
            decision.outcome = reason

    def ended(self, usage: Usage | None) -> None:
        """Take the engine's count of a stream that is whole, and learn how fast it generates beside its other sequences."""
        self.answered(Leg.MAIN, usage)
        booking = self.bookings.get(Leg.MAIN)
        num = self.usage.output_tokens if self.usage is not None else self._num_tokens
        if booking is None or self._num_tokens < 2 or num < 2:
            return
        itl_ms = (self.last_s - self._first_s) * 1e3 / (num - 1)
        booking.worker.gaps_took(itl_ms)

    def completed(
        self, prompt_tokens: int, workers: WorkerTable, hits: HitBook, probes: Probes
    ) -> None:
        """Count the tokens of a request that was served whole; `prompt_tokens` is our own count, for want of a better."""
        metrics, usage, own_tokens = self._metrics, self.usage, prompt_tokens
        if usage is not None:
            prompt_tokens = usage.prompt_tokens or prompt_tokens
            metrics.output_tokens.add(by=usage.output_tokens)
            if decision := self._decisions.get(Leg.MAIN):
                decision.output_tokens = usage.output_tokens
                workers.lengths.learn(decision.route_key, usage.output_tokens)
        metrics.prompt_tokens.add(by=prompt_tokens)
        self._key.took(prompt_tokens, 0 if usage is None else usage.output_tokens)
        overlap = scaled(self.overlap_tokens, prompt_tokens, own_tokens)
        metrics.predicted_hit_tokens.add(by=min(overlap, prompt_tokens))
        if self._outlook is not None:
            possible = hits.completed(self._outlook, prompt_tokens, self._cached_tokens)
            metrics.possible_hit_tokens.add(by=possible)
            probes.ended(self._outlook, self._cached_tokens, max(self.last_s, self.sent_s))
        if self._cached_tokens:
            metrics.engine_cached_tokens.add(by=self._cached_tokens)

    def concluded(self, outcome: str, code: int) -> None:
        """Write the end into the decisions that have none yet; `code` is what the client got."""
        self.drop_move()
        self._key.ended(code)
        for decision in self._decisions.values():
            decision.outcome = decision.outcome or outcome

    def is_unserved(self, leg: Leg) -> bool:
        """Whether the engine of a leg has brought nothing yet."""
        return not self._num_tokens if leg is Leg.MAIN else self.bookings[leg].has_prefill

    def expected_overlap(self, leg: Leg) -> int:
        """Tokens the index expected on the device of a leg's engine when it was chosen."""
        decision = self._decisions.get(leg)
        return 0 if decision is None else decision.device_tokens

    def give_back(self) -> None:
        """Take out of the books whatever is still in them."""
        self.bookings.clear()
        while self.booked:
            one = self.booked.pop()
            if isinstance(one, Move):
                one.dropped()
            elif not one.is_released:
                one.release()

    def drop_move(self) -> None:
        """Take the transfer out of the books: it will not happen."""
        if self._move is not None:
            self._move.dropped()
            self._move = None
