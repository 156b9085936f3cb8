"""Where a request goes: candidates from the table, overlaps from the index, a choice by the policy, booked at once.

With pools, whether the prompt is computed where it is generated or copied there is decided per request by cost
(`transfer_cost`). Every path is booked here, at decision time, also retries and fall-backs. Not here: queues,
sockets, clocks. IO: a log line when a policy fails.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynctl.core.kv_links import LinkClasses
from dynctl.router.api.answers import Failure, no_engine
from dynctl.router.bookings import Booking
from dynctl.router.choosing import Load, Need, Policy
from dynctl.router.config import Settings
from dynctl.router.decisions import Decision
from dynctl.router.fallback import RoutingBreaker
from dynctl.router.hits import Outlook
from dynctl.router.loading import Held
from dynctl.router.overlaps import Overlaps
from dynctl.router.paths import Pick, fitting, lacking, unfit, way, with_moves
from dynctl.router.policies.least_loaded import POLICY as PLAIN
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Prompt
from dynctl.router.sessions import Following, Sessions
from dynctl.router.shadow import Shadow
from dynctl.router.transfer_cost import Links, Move
from dynctl.router.worker_table import DECODE, View, WorkerTable
from dynctl.router.workers import Worker

log = logging.getLogger("dynctl.router")

_PREFILL = frozenset(("prefill",))


class Order(NamedTuple):
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
    route_key: str = ""
    """What kind of request this is; lengths of answers are learned per kind."""
    shown_id: str = ""
    """The request id the client reads; its own where it sent one."""
    may_repeat: bool = False
    """Whether an excluded engine may be tried again when there is no other."""
    session: bytes = b""
    """The session it says it belongs to; empty: none."""
    booked: list[Booking | Move] | None = None
    """Takes all that is booked as soon as it is; whoever gives it gives that back, also where placing fails midway."""


@dataclass(slots=True)
class Placed:
    """Engines booked for a request."""

    main: Booking | None
    """None: booked before."""
    prefill: Booking | None
    overlap_tokens: int | None
    """Expected cached on the engine that does the prefill; None: as known before."""
    move: Move | None = None
    """The transfer this leads to."""
    outlook: Outlook | None = None
    """What was known of the prompt on the engine that prefills it; None: no tokens, or no index asked."""
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
        sessions: Sessions | None = None,
        classes: LinkClasses | None = None,
    ) -> None:
        self.workers = workers
        self.overlaps = Overlaps(index)
        self.policy = policy
        self.links = Links(settings.transfer_setup_ms, settings.transfer_ms_per_token, classes)
        self.breaker = RoutingBreaker()
        self.sessions = sessions or Sessions(settings.session_ttl_s)
        self.shadow: Shadow | None = None
        """Another policy, asked the same and not obeyed."""
        self.stickiness = settings.stickiness
        self._settings = settings
        self._rng = rng
        self._num_prefills = self._num_mains = -1
        """Number of the last decision of either side of a hand-over: counted together, turns would fall on the same half of two engines."""

    def place(self, order: Order, now_s: float) -> Placed | Unplaced:
        """Choose and book all engines a request needs."""
        roles = self.workers.main_roles(order.model, now_s)
        view = self.workers.view(roles, order.model, now_s)
        mains = self._candidates(order, "whole", view, now_s)
        if not mains:
            return Unplaced(self._why_none(order, roles))
        if roles is not DECODE:
            pick = self._pick(order, "whole", view, mains, now_s)
            booking, decision = self._book(order, pick)
            return Placed(
                booking,
                None,
                decision.overlap_tokens,
                None,
                self._outlook(order, pick),
                decisions=[decision],
            )
        return self._place_split(order, view, mains, now_s)

    def place_main(self, order: Order, source: Worker | None, now_s: float) -> Placed | Unplaced:
        """Choose only the engine that generates from blocks that `source` has ready."""
        view = self.workers.view(DECODE, order.model, now_s)
        mains = self._candidates(order, "decode", view, now_s)
        sources = [] if source is None else [source]
        mains = fitting(self.workers, mains, sources)
        if not mains:
            return Unplaced(self._why_none(order, DECODE))
        pick = self._pick(order, "decode", view, mains, now_s, others=sources)
        booking, decision = self._book(order, pick)
        return Placed(booking, None, None, decisions=[decision])

    def has_taker(self, source: Worker | None, now_s: float) -> bool:
        """Whether blocks that `source` has ready are of use to any engine that generates, as far as there are any."""
        if source is None:
            return True
        workers = self.workers.view(DECODE, source.info.model, now_s).workers
        return not workers or bool(fitting(self.workers, workers, [source]))

    def place_prefill(self, order: Order, main: Worker, now_s: float) -> Placed:
        """Choose another prefill engine for a request that is booked on the decode engine `main`; there may be none."""
        view = self.workers.view(_PREFILL, order.model, now_s)
        if view.workers and not fitting(self.workers, view.workers, [main]):
            return Placed(None, None, None, local_reason="other_kv")
        prefills = fitting(self.workers, self._candidates(order, "prefill", view, now_s), [main])
        if not prefills:
            return Placed(None, None, None, local_reason="no_prefill_engine")
        pick = self._pick(order, "prefill", view, prefills, now_s, others=[main])
        booking, decision = self._book(order, pick)
        outlook = self._outlook(order, pick)
        move = self._book_move(order, pick.worker, main, now_s)
        self._note_move(move, now_s, decision)
        held = decision.overlap_tokens
        return Placed(None, booking, held, move, outlook, decisions=[decision])

    def prefill_locally(self, prompt: Prompt, main: Booking, now_s: float) -> int:
        """Enter the whole prefill in the decode engine's books; return the overlap expected there."""
        view = View([main.worker], self.workers.tally)
        held = self._try_overlaps(prompt, view, view.workers, now_s, may_load=False)
        overlap = held.tokens[0] if held else 0
        self._prefill_here(main, max(prompt.num_tokens - overlap, 1), now_s)
        return overlap

    # Pools

    def _place_split(
        self, order: Order, view: View, mains: Sequence[Worker], now_s: float
    ) -> Placed | Unplaced:
        if order.local_reason:
            return self._place_local(order, view, mains, order.local_reason, now_s)
        prefill_view = self.workers.view(_PREFILL, order.model, now_s)
        if not prefill_view.workers:
            return self._place_local(order, view, mains, "no_prefill_engine", now_s)
        if not fitting(self.workers, prefill_view.workers, mains):
            return self._place_local(order, view, mains, "other_kv", now_s)
        prefills = fitting(
            self.workers, self._candidates(order, "prefill", prefill_view, now_s), mains
        )
        if not prefills:
            # Prefill engines are full: queueing beats turning a decode engine into one. After a failure it does not.
            if order.excluded:
                return self._place_local(order, view, mains, "prefill_failed", now_s)
            return Unplaced(None)
        prefill = self._pick(order, "prefill", prefill_view, prefills, now_s, others=mains)
        settings, policy = self._settings, self.policy
        is_weighed = bool(settings.conditional_prefill) and policy.uses_index
        if not is_weighed:
            mains = fitting(self.workers, mains, [prefill.worker])
        main = self._pick(order, "decode", view, mains, now_s, prefill)
        reason, costs = way(settings, self.links, main, prefill, now_s, is_weighed=is_weighed)
        main.decision.costs = prefill.decision.costs = costs
        if costs is not None:
            basis = self.links.basis(prefill.worker.id, main.worker.id, now_s)
            main.decision.link_price = prefill.decision.link_price = basis
        main.decision.path_reason = prefill.decision.path_reason = reason or "copy"
        if reason:
            booking, decision = self._book(order, main)
            decision.leg = "whole"
            self._prefill_here(booking, max(order.prompt.num_tokens - main.overlap, 1), now_s)
            outlook = self._outlook(order, main)
            held = decision.overlap_tokens
            return Placed(booking, None, held, None, outlook, reason, [decision])
        booking, decision = self._book(order, main)
        prefill_booking, prefill_decision = self._book(order, prefill)
        outlook = self._outlook(order, prefill)
        move = self._book_move(order, prefill.worker, main.worker, now_s, main.overlap)
        self._note_move(move, now_s, decision, prefill_decision)
        return Placed(
            booking,
            prefill_booking,
            prefill_decision.overlap_tokens,
            move,
            outlook,
            "",
            [decision, prefill_decision],
        )

    def _prefill_here(self, booking: Booking, tokens: int, now_s: float) -> None:
        """Let a decode engine compute a prompt itself; what comes over its links waits for that."""
        booking.prefill_here(tokens, now_s)
        self.links.hold(booking.worker.id, booking.worker.free_at_s, now_s)

    def _book_move(
        self, order: Order, source: Worker, target: Worker, now_s: float, overlap: int = 0
    ) -> Move:
        """Book the transfer from a prefill engine just booked; what the decode engine has cached stays there."""
        tokens = max(order.prompt.num_tokens - overlap, 1)
        move = self.links.book(source.id, target.id, tokens, source.free_at_s, now_s)
        if order.booked is not None:
            order.booked.append(move)
        return move

    def _note_move(self, move: Move, now_s: float, *decisions: Decision) -> None:
        basis = self.links.basis(move.source, move.target, now_s)
        for decision in decisions:
            decision.link_price = basis
            decision.link = self.links.classes.of(move.source, move.target)
            decision.move_tokens = move.tokens
            decision.move_bytes = move.tokens * self._settings.kv_bytes_per_token

    def _place_local(
        self, order: Order, view: View, mains: Sequence[Worker], reason: str, now_s: float
    ) -> Placed:
        pick = self._pick(order, "whole", view, mains, now_s)
        pick.decision.path_reason = reason
        booking, decision = self._book(order, pick)
        self.links.hold(booking.worker.id, booking.worker.free_at_s, now_s)
        outlook = self._outlook(order, pick)
        return Placed(booking, None, decision.overlap_tokens, None, outlook, reason, [decision])

    # One choice

    def _candidates(self, order: Order, leg: str, view: View, now_s: float) -> Sequence[Worker]:
        workers: Sequence[Worker] = view.workers
        if order.excluded:
            fresh = [worker for worker in workers if worker.key not in order.excluded]
            if fresh or not order.may_repeat:
                workers = fresh
        table, prompt = self.workers, order.prompt
        tokens = prompt.num_tokens + self._output_tokens(order, leg)
        if tokens > table.tally.small_tokens or table.may_limit(now_s):
            return table.with_room(workers, now_s, prompt, tokens)
        return workers

    def _output_tokens(self, order: Order, leg: str) -> int:
        """What an answer is expected to have."""
        if leg == "prefill":
            return 1
        return self.workers.lengths.expected(order.route_key, order.max_tokens)

    def _why_none(self, order: Order, roles: frozenset[str]) -> Failure | None:
        are_coming = self.workers.are_coming(roles, order.model)
        serving = self.workers.serving(roles, order.model)
        if serving and order.excluded and not order.may_repeat:
            if all(worker.key in order.excluded for worker in serving) and not are_coming:
                return no_engine()
            return None
        return None if serving or are_coming else no_engine()

    def _pick(
        self,
        order: Order,
        leg: str,
        view: View,
        workers: Sequence[Worker],
        now_s: float,
        sender: Pick | None = None,
        others: Sequence[Worker] = (),
    ) -> Pick:
        """Choose among candidates; `sender` is who does the prefill for a decode leg, where that is chosen now.

        `others` may be at the other end of a hand-over.
        """
        settings, prompt, table = self._settings, order.prompt, self.workers
        held = self._try_overlaps(prompt, view, workers, now_s, may_load=leg != "decode")
        need = self._need(order, leg, now_s)
        loads = [worker.cached_load or worker.load() for worker in workers]
        apart = unfit(self.workers, view, others if sender is None else [sender.worker])
        if leg == "decode":
            is_weighed = settings.conditional_prefill and self.policy.uses_index
            lefts = lacking(prompt, held) if is_weighed else ()
            loads = with_moves(
                *(self.links, loads, sender, settings.decode_stall, now_s, apart, lefts)
            )
        wanted: Policy = self.policy
        if order.session and wanted.uses_index:
            wanted = self.sessions.following(wanted, order.session, leg, workers, now_s)
        policy, overlaps, position, draw = self._choose(wanted, need, loads, held)
        decision = Decision(
            order.request_id,
            leg,
            prompt.is_known,
            need,
            loads,
            overlaps,
            draw,
            position,
            policy,
            order.shown_id,
            order.route_key,
        )
        if len(workers) < len(view.workers):
            left_out = table.left_out(view.workers, workers, order.excluded, now_s, apart)
            decision.left_out = left_out
        if held is not None and overlaps is held.tokens:
            decision.loadable = held.loadable
            if isinstance(policy, Following):
                _, decision.session = policy.look(loads, overlaps)
        else:
            decision.is_fallback = True
        return Pick(workers, decision)

    def _need(self, order: Order, leg: str, now_s: float) -> Need:
        settings, prompt, table = self._settings, order.prompt, self.workers
        if leg == "prefill":
            self._num_prefills += 1
        else:
            self._num_mains += 1
        return Need(
            prompt.num_tokens,
            self._output_tokens(order, leg),
            self._num_prefills if leg == "prefill" else self._num_mains,
            now_s,
            table.recent_unit(now_s),
            table.tally.prefill.slope,
            leg == "decode",
            1.0 if prompt.popularity is None else prompt.popularity,
            table.tally.least_prefill_ms,
            table.tally.least_ms_per_token,
            settings.near_ms,
            settings.near_ratio,
            self.stickiness,
        )

    def _try_overlaps(
        self, prompt: Prompt, view: View, workers: Sequence[Worker], now_s: float, *, may_load: bool
    ) -> Held | None:
        """Ask the index; None where it failed, or routing did too often lately."""
        if self.breaker.is_open(now_s):
            return None
        try:
            if self.policy.uses_index:
                return self.overlaps.of(prompt, view, workers, now_s, may_load=may_load)
            return Held([0] * len(workers))
        except Exception:  # whatever the index does wrong
            log.exception("the index failed; the least loaded engine is taken")
            self.breaker.record(now_s, is_failure=True)
            return None

    def _choose(
        self, policy: Policy, need: Need, loads: list[Load], held: Held | None
    ) -> tuple[Policy, list[int], int, float]:
        """Ask the policy; where that fails the plain rule decides: requests never fail by routing."""
        draw = self._rng.random()
        if held is not None:
            try:
                position = policy.choose(need, loads, held.tokens, draw)
            except Exception:  # whatever a policy does wrong
                log.exception("the policy failed; the least loaded engine is taken")
                self.breaker.record(need.now_s, is_failure=True)
            else:
                self.breaker.record(need.now_s, is_failure=False)
                return policy, held.tokens, position, draw
        overlaps = [0] * len(loads)
        plain: Policy = PLAIN
        return plain, overlaps, plain.choose(need, loads, overlaps, draw), draw

    def _book(self, order: Order, pick: Pick) -> tuple[Booking, Decision]:
        decision, worker, prompt = pick.decision, pick.worker, order.prompt
        need = decision.need
        self.workers.num_sent += 1
        if order.session:
            result = decision.session
            self.sessions.sent(order.session, decision.leg, worker, need.now_s, result)
        uncached = 0 if decision.leg == "decode" else max(need.prompt_tokens - pick.overlap, 1)
        if self.policy.uses_index:
            self._expect(prompt, worker, decision.device_tokens, need.now_s)
        booking = worker.book(
            *(need.prompt_tokens, uncached, need.output_tokens, need.now_s, need.recent_unit),
            prompt,
        )
        if order.booked is not None:
            order.booked.append(booking)
        if self.shadow is not None and decision.leg != "decode":
            self._follow(self.shadow, decision, prompt, pick.workers)
        return booking, decision

    def _expect(self, prompt: Prompt, worker: Worker, overlap: int, now_s: float) -> None:
        try:
            self.overlaps.expect(prompt, worker, overlap)
        except Exception:  # whatever the index does wrong; the request goes on
            log.exception("what an engine will hold could not be noted")
            self.breaker.record(now_s, is_failure=True)

    def unexpect(self, prompt: Prompt, worker: Worker, overlap: int) -> None:
        """Take back what a booking let the index expect: the engine did not take the prompt."""
        if self.policy.uses_index and self.workers.get(worker.id) is worker:
            self.overlaps.unexpect(prompt, worker, overlap)

    def _follow(
        self, shadow: Shadow, decision: Decision, prompt: Prompt, workers: Sequence[Worker]
    ) -> None:
        try:
            shadow.follow(decision, prompt, workers)
        except Exception:  # a policy on trial must not harm the one that serves
            log.exception("the shadow policy %s failed and is stopped", shadow.name)
            self.shadow = None

    def _outlook(self, order: Order, pick: Pick) -> Outlook | None:
        decision = pick.decision
        if not decision.asked.uses_index:
            return None
        held, own = decision.most_held_tokens, decision.overlap_tokens
        return self.overlaps.outlook(order.prompt, pick.worker, held, own)
