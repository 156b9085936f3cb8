"""One request under way: does what its hand-off says, with real connections, and tells it what came back.

Callbacks only; a request has no task of its own. Not here: decisions on retries and ends (`handoff`), choosing
engines (`placement`), figures (`ledger`), reading answers (`legs`). IO: event loop, upstream connections.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from dynctl.core.text import clean
from dynctl.http1.server import Exchange
from dynctl.http1.upstream import Call, UpstreamError
from dynctl.router import verdicts
from dynctl.router.admission import backoff_s, draining
from dynctl.router.api.answers import Failure
from dynctl.router.api.requests import CHAT, ApiRequest
from dynctl.router.api.shapes import Usage
from dynctl.router.api.streams import read_answer
from dynctl.router.deadlines import overdue_leg
from dynctl.router.decisions import explained
from dynctl.router.desk import Desk
from dynctl.router.handoff import (
    Action,
    Answer,
    Break,
    Cancel,
    Count,
    Fault,
    Finish,
    Handoff,
    Leg,
    Phase,
    Place,
    Release,
    Send,
    Wait,
)
from dynctl.router.ledger import Ledger
from dynctl.router.legs import LegSink
from dynctl.router.orders import local_reason, session_of
from dynctl.router.placement import Order, Placed, Unplaced
from dynctl.router.prompt import Prompt
from dynctl.router.reply import Reply
from dynctl.router.tokens import Tokenized
from dynctl.router.transfer import transfer_fault

log = logging.getLogger("dynctl.router")


class Flight:
    """A request from its acceptance to its end."""

    __slots__ = (
        "_body",
        "_call",
        "_desk",
        "_exchange",
        "_excluded",
        "_handoff",
        "_has_retried",
        "_is_concluded",
        "_is_text",
        "_ledger",
        "_may_repeat",
        "_num_sent",
        "_prompt",
        "_reply",
        "_shown_id",
        "_timer",
        "model",
        "request",
        "request_id",
    )

    def __init__(
        self,
        desk: Desk,
        exchange: Exchange,
        request: ApiRequest,
        model: str | None,
        request_id: str,
        shown_id: bytes,
    ) -> None:
        """`shown_id` is what the client reads in X-Request-Id."""
        self.request = request
        self.model = model
        self.request_id = request_id
        """Ours, unique; engines get it."""
        self._desk = desk
        self._exchange = exchange
        self._shown_id = shown_id
        self._reply = Reply(exchange, shown_id)
        self._handoff = Handoff(
            wants_prefill=request.num_sequences == 1, max_retries=desk.settings.max_retries
        )
        key = desk.route_keys.sums.of(request.route_key)
        self._ledger = Ledger(desk.metrics, key, desk.ring, desk.loop.time())
        self._prompt: Prompt
        self._excluded: set[tuple[str, str]] = set()
        self._is_text = False
        """Blocks of text stand for blocks of tokens."""
        self._may_repeat = False
        self._has_retried = False
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_sent = 0
        self._body = b""
        self._is_concluded = False

    @property
    def is_over(self) -> bool:
        """Whether the client has its answer, or is gone."""
        return self._handoff.is_over

    def begin(self) -> None:
        """Start on the way."""
        self._enter()
        self._desk.tokens.submit(self.request, self._on_tokens)

    def adopt(self, prompt: Prompt, placed: Placed, call: Call, sent_s: float) -> None:
        """Go on from where a short request has got: placed, and sent once."""
        self._enter()
        self._prompt = prompt
        self._ledger.arrived_s = self._ledger.sent_s = sent_s
        self._ledger.placed(placed, "short", time.time())
        self._call, self._num_sent = call, 1
        self._handoff.started()
        self._handoff.placed(has_prefill=False)

    def follow(self, reply: Reply, num_tokens: int, now_s: float) -> None:
        """Go on with a stream whose first events are with the client, since then."""
        self._reply = reply
        self._note_tokens(num_tokens, now_s)

    def _enter(self) -> None:
        exchange = self._exchange
        exchange.on_gone, exchange.on_pause = self.gone, self._on_pause
        exchange.on_resume = self._on_resume
        self._desk.enter(self)

    def resume(self) -> bool:
        """Try again to be placed; False when still waiting."""
        self._do(self._handoff.resumed())
        return self._handoff.phase is not Phase.WAITING

    def expire(self, failure: Failure) -> None:
        """Give up waiting."""
        self._do(self._handoff.expired(failure))

    def gone(self) -> None:
        """The client has left."""
        self._do(self._handoff.gone())

    def cut(self) -> None:
        """End at once: the router stops."""
        self._do(self._handoff.cut(Fault("stopped", draining())))

    def check(self, now_s: float) -> None:
        """Act on a passed deadline."""
        phase, is_stream = self._handoff.phase, self.request.is_stream
        leg = overdue_leg(phase, self._ledger, self._desk.settings, now_s, is_stream=is_stream)
        if leg is None or (self._call is not None and self._call.is_paused):
            return
        self._cancel_call()
        self._faulted(leg, verdicts.late(is_open=phase is Phase.STREAMING))

    # The client's connection tells…

    def _on_pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def _on_resume(self) -> None:
        self._ledger.last_s = self._desk.loop.time()
        if self._call is not None:
            self._call.resume()

    # The tokenizer tells…

    def _on_tokens(self, tokenized: Tokenized) -> None:
        if self.is_over:
            return
        desk = self._desk
        desk.metrics.tokenized.add(tokenized.how)
        self._is_text = tokenized.how == "text"
        self._prompt = tokenized.prompt(desk.hashers, self.request)
        self._do(self._handoff.started())

    # The engine tells (through `legs`)…

    def on_refused(self, leg: Leg, failure: Failure) -> None:
        """Take an engine's verdict that the request itself is wrong."""
        if not self.is_over:
            self._do(self._handoff.refused(leg, failure))

    def on_failed(self, leg: Leg, error: UpstreamError) -> None:
        """Take the news that a leg's connection is lost."""
        is_open = self._handoff.phase is Phase.STREAMING
        self.on_fault(leg, verdicts.from_upstream(error, is_open=is_open))

    def on_fault(self, leg: Leg, fault: Fault) -> None:
        """Take the news that an attempt failed."""
        if self.is_over:
            return
        if fault.reason == "busy":
            pause_s = fault.failure.retry_after_s or 1
            self._ledger.bookings[leg].worker.saturated(self._desk.loop.time(), pause_s)
        self._faulted(leg, fault)

    def on_events(self, out: bytes, num_tokens: int) -> None:
        """Take events for the client; the first time there is a token among them."""
        if not self.is_over:
            self._note_tokens(num_tokens, self._desk.now_s())
            self._reply.write(out)

    def on_stream_done(self, out: bytes, num_tokens: int, usage: Usage | None) -> None:
        """Take the last events of a stream, which ended properly."""
        if self.is_over:
            return
        self._note_tokens(num_tokens, self._desk.now_s())
        # They leave in one write with the end.
        self._body = out
        self._desk.afterwards.guard(self._ledger.ended, usage)
        self._do(self._handoff.ended())

    def _note_tokens(self, num_tokens: int, now_s: float) -> None:
        if self._handoff.phase is Phase.MAIN:
            self._do(self._handoff.first_byte())
            self._reply.stream()
            self._ledger.first_token(Leg.MAIN, now_s)
            if self._call is not None:
                self._call.gathers = True
            self._served(Leg.MAIN)
        self._ledger.tokens(num_tokens, now_s)

    def on_broken(self, why: str, leg: Leg) -> None:
        """Take an answer that is not to be believed any more."""
        if self.is_over:
            return
        self._cancel_call()
        self._faulted(leg, verdicts.bad_answer(why, is_open=self._handoff.phase is Phase.STREAMING))

    def on_answer(self, leg: Leg, body: bytes) -> None:
        """Take a leg's whole 200."""
        if self.is_over:
            return
        if (answer := read_answer(body)).fault:
            self._faulted(leg, verdicts.bad_answer(answer.fault, is_open=False))
            return
        self._desk.afterwards.guard(self._ledger.answered, leg, answer.usage)
        if leg is Leg.MAIN:
            self._body = body
            self._ledger.bookings[leg].worker.succeeded(self._desk.loop.time())
            self._served(leg)
            self._do(self._handoff.ended())
        else:
            self._on_transfer(answer.transfer, answer.usage)

    def _on_transfer(self, transfer: Any, usage: Usage | None) -> None:  # noqa: ANN401 - an engine's JSON, checked here
        now_s, settings = self._desk.loop.time(), self._desk.settings
        worker = self._ledger.bookings[Leg.PREFILL].worker
        num_tokens = self._prompt.num_tokens if self._prompt.is_known else None
        wrong = transfer_fault(transfer, worker, usage.prompt_tokens if usage else num_tokens)
        if wrong:
            self._desk.metrics.handoffs.add("rejected")
            log.warning("engine %s: transfer parameters refused: %s", clean(worker.id), wrong)
            self._faulted(Leg.PREFILL, Fault("bad_transfer", verdicts.failed()))
            return
        self._ledger.first_token(Leg.PREFILL, now_s)
        self._served(Leg.PREFILL)
        self._ledger.lapses_s = now_s + settings.kv_lease_s - settings.kv_lease_margin_s
        self._do(self._handoff.prefilled(transfer))

    def _served(self, leg: Leg) -> None:
        """Note that an engine has computed the prompt, where it does not tell itself in names of ours."""
        worker = self._ledger.bookings[leg].worker
        is_untold = self._is_text or worker.is_stranger or not worker.is_told
        if is_untold and not (leg is Leg.MAIN and self._handoff.has_used_transfer):
            self._desk.texts.served(worker, self._prompt)

    def _faulted(self, leg: Leg, fault: Fault) -> None:
        desk, call = self._desk, self._call
        worker = self._ledger.bookings[leg].worker
        self._ledger.faulted(leg, fault.reason)
        self._excluded.add(worker.key)
        may_retry = self._has_retried or desk.budget.allows(len(desk.flights))
        # An engine that failed on another's blocks may be well itself.
        may_be_peer = self._handoff.has_used_transfer and fault.reason in verdicts.ANSWERED_BADLY
        self._may_repeat = leg is Leg.MAIN and (may_be_peer or fault.reason in verdicts.REPEATABLE)
        if not may_be_peer:
            if verdicts.blames_engine(fault, call):
                worker.failed(desk.loop.time())
            may_retry = may_retry and (fault.reason != "error_500" or not self._handoff.num_retries)
        self._do(self._handoff.faulted(leg, fault, may_retry=may_retry))

    # What the hand-off says

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            _DOERS[type(action)](self, action)
        if self._handoff.is_over and not self._is_concluded:
            self._conclude()

    def _place(self, action: Place) -> None:
        if action.num_retries:
            delay_s = backoff_s(action.num_retries, self._desk.rng.random)
            self._timer = self._desk.loop.call_later(delay_s, self._place_now, action)
        elif self._desk.must_wait(self):
            self._do(self._handoff.unplaced(None))
        else:
            self._place_now(action)

    def _place_now(self, action: Place) -> None:
        self._timer = None
        desk, handoff, now_s = self._desk, self._handoff, self._desk.loop.time()
        source, lapses_s = self._ledger.source, self._ledger.lapses_s
        has_taker = desk.placement.has_taker
        if handoff.has_unused_transfer and (now_s > lapses_s or not has_taker(source, now_s)):
            self._do(handoff.transfer_lapsed())
            return
        if desk.books is not None:
            desk.books.exchange(now_s)
        started_s = time.perf_counter()
        order = Order(
            self.request_id,
            self._prompt,
            self.model,
            self.request.max_tokens,
            local_reason(self.request, wants_prefill=action.wants_prefill),
            frozenset(self._excluded),
            self.request.route_key,
            self._shown_id.decode(),
            self._may_repeat,
            session_of(self._exchange.request) if desk.settings.session_ttl_s else b"",
        )
        result: Placed | Unplaced
        if not action.wants_main:
            main = self._ledger.bookings[Leg.MAIN].worker
            result = desk.placement.place_prefill(order, main, now_s)
        elif handoff.has_unused_transfer:
            result = desk.placement.place_main(order, self._ledger.source, now_s)
        else:
            result = desk.placement.place(order, now_s)
        if isinstance(result, Unplaced):
            self._do(handoff.unplaced(result.failure))
            return
        self._ledger.placed(result, desk.policy_name, time.time())
        desk.metrics.decision.observe(time.perf_counter() - started_s)
        if self._exchange.request.header(b"x-dynctl-explain") is not None:
            ledger, waited_ms = self._ledger, (now_s - self._ledger.arrived_s) * 1e3
            self._reply.extra = explained(result.decisions, waited_ms, ledger.queue_position)
        if not handoff.num_retries:
            desk.metrics.queue.observe(now_s - self._ledger.arrived_s)
        self._do(handoff.placed(has_prefill=result.prefill is not None))

    def _release(self, action: Release) -> None:
        leg, ledger = action.leg, self._ledger
        if self._handoff.phase is not Phase.DONE and ledger.is_unserved(leg):
            worker = ledger.bookings[leg].worker
            self._desk.placement.unexpect(self._prompt, worker, ledger.expected_overlap(leg))
        ledger.bookings.pop(leg).release()
        self._desk.pump_soon()

    def _send(self, action: Send) -> None:
        leg, transfer = action.leg, action.transfer
        desk, ledger, now_s = self._desk, self._ledger, self._desk.loop.time()
        worker = (booking := ledger.bookings[leg]).worker
        if leg is Leg.MAIN and ledger.needs_prefill and transfer is None:
            ledger.drop_move()
            ledger.overlap_tokens = desk.placement.prefill_locally(self._prompt, booking, now_s)
        if leg is Leg.MAIN:
            ledger.needs_prefill = False
        route = desk.fleet.routes.get(worker.id)
        if route is None or desk.workers.get(worker.id) is not worker:
            self._faulted(leg, Fault("stale", verdicts.failed(), was_sent=False))
            return
        request, model, is_main = self.request, worker.info.model, leg is Leg.MAIN
        body = request.main_body(model, transfer) if is_main else request.prefill_body(model)
        # Engines refuse an id that is in use, and an abandoned attempt may still be.
        attempt = f"{self.request_id}-{self._num_sent}" if self._num_sent else self.request_id
        self._num_sent += 1
        ledger.sent_s = now_s
        sink = LegSink(self, leg, is_relayed=route.is_relayed)
        self._call = route.send(request.endpoint, attempt, body, sink)

    def _wait(self, _: Wait) -> None:
        if failure := self._desk.wait(self, self._exchange.request, self._ledger.arrived_s):
            self._do(self._handoff.expired(failure))
        elif self._exchange.request.header(b"x-dynctl-explain") is not None:
            place = self._desk.line.position(self, self._desk.loop.time())
            self._ledger.queue_position = self._ledger.queue_position or place

    def _count(self, action: Count) -> None:
        self._desk.metrics.count(action.name, action.labels)
        if action.name == "retries" and not self._has_retried:
            self._has_retried = True
            self._desk.budget.num_retrying += 1

    def _fail(self, action: Answer) -> None:
        if reason := action.failure.reason:
            self._desk.metrics.errors.add(reason)
        self._reply.fail(action.failure)

    def _break(self, action: Break) -> None:
        self._desk.metrics.errors.add("stream_broken")
        self._cancel_call()
        self._reply.break_stream(action.failure)

    def _finish(self, _: Finish) -> None:
        if self.request.is_stream:
            self._reply.end_stream(self._body)
        else:
            self._reply.whole(self._body)
        desk = self._desk
        books = desk.workers, desk.hits, desk.probes
        desk.afterwards.guard(self._ledger.completed, self._prompt.num_tokens, *books)

    def _cancel_call(self, _: Cancel | None = None) -> None:
        if self._call is not None:
            self._call.cancel()

    def _conclude(self) -> None:
        self._is_concluded = True
        desk = self._desk
        if self._timer is not None:
            self._timer.cancel()
        if self._has_retried:
            desk.budget.num_retrying -= 1
        endpoint = "chat" if self.request.endpoint == CHAT else "completions"
        desk.metrics.requests.add(endpoint, str(self._reply.code))
        desk.afterwards.guard(self._ledger.concluded, str(self._handoff.phase), self._reply.code)
        self._exchange.on_gone = self._exchange.on_pause = self._exchange.on_resume = None
        desk.leave(self)


_DOERS: dict[type, Callable[[Flight, Any], None]] = {
    Place: Flight._place,  # noqa: SLF001 - its own
    Send: Flight._send,  # noqa: SLF001
    Release: Flight._release,  # noqa: SLF001
    Finish: Flight._finish,  # noqa: SLF001
    Count: Flight._count,  # noqa: SLF001
    Cancel: Flight._cancel_call,  # noqa: SLF001
    Wait: Flight._wait,  # noqa: SLF001
    Answer: Flight._fail,  # noqa: SLF001
    Break: Flight._break,  # noqa: SLF001
}
"""One look-up an action: class patterns of `match` cost several times as much, and this is done five times a request."""
