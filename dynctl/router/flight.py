"""One request under way: whatever happens to it, told to its hand-off; what that says is done by `doers`.

Callbacks only; a request has no task of its own. Not here: decisions on retries and ends (`handoff`), choosing
engines (`placement`), figures (`ledger`), reading answers (`legs`). IO: its call's connection.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from dynctl.core.text import clean
from dynctl.http1.server import Exchange
from dynctl.http1.upstream import Call, ReceiverError, UpstreamError
from dynctl.router import verdicts
from dynctl.router.admission import draining
from dynctl.router.api.answers import Failure
from dynctl.router.api.requests import CHAT, ApiRequest
from dynctl.router.api.shapes import Usage
from dynctl.router.api.streams import read_answer
from dynctl.router.attempts import Attempts
from dynctl.router.deadlines import overdue_leg
from dynctl.router.desk import Desk
from dynctl.router.doers import DOERS
from dynctl.router.handoff import TERMINAL, Action, Fault, Handoff, Leg, Phase
from dynctl.router.ledger import Ledger
from dynctl.router.placement import Placed
from dynctl.router.prompt import Prompt
from dynctl.router.reply import Reply
from dynctl.router.tokens import Tokenized
from dynctl.router.transfer import transfer_fault

log = logging.getLogger("dynctl.router")


class Flight:
    """A request from its acceptance to its end."""

    __slots__ = (
        "_has_prompt",
        "_is_concluded",
        "_is_text",
        "attempts",
        "body",
        "call",
        "desk",
        "exchange",
        "handoff",
        "ledger",
        "model",
        "prompt",
        "reply",
        "request",
        "request_id",
        "shown_id",
        "timer",
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
        self.desk = desk
        self.exchange = exchange
        self.shown_id = shown_id
        """The client's."""
        self.reply = Reply(exchange, shown_id)
        self.handoff = Handoff(
            wants_prefill=request.num_sequences == 1, max_retries=desk.settings.max_retries
        )
        key = desk.route_keys.sums.of(request.route_key)
        self.ledger = Ledger(desk.metrics, key, desk.ring, desk.loop.time())
        self.attempts = Attempts(desk.budget)
        self.prompt: Prompt
        self._has_prompt = False
        self._is_text = False
        """Blocks of text stand for blocks of tokens."""
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Places it when it is over."""
        self.body = b""
        """The last of the client's answer, or all of it."""
        self._is_concluded = False

    @property
    def is_over(self) -> bool:
        """Whether the client has its answer, or is gone."""
        return self.handoff.is_over

    def begin(self) -> None:
        """Start on the way."""
        self._enter()
        self.desk.tokens.submit(self.request, self._on_tokens)

    def adopt(self, prompt: Prompt, placed: Placed, sent_s: float) -> None:
        """Go on from where a short request has got: placed, and sent once; its call and what it has booked are here."""
        self._enter()
        self.prompt, self._has_prompt = prompt, True
        self.ledger.arrived_s = self.ledger.sent_s = sent_s
        self.ledger.placed(placed, "short", time.time())
        self.attempts.next_id(self.request_id)
        self.handoff.started()
        self.handoff.placed(has_prefill=False)

    def follow(self, reply: Reply, num_tokens: int, now_s: float) -> None:
        """Go on with a stream whose first events are with the client, since then."""
        self.reply = reply
        self._note_tokens(num_tokens, now_s)

    def _enter(self) -> None:
        exchange = self.exchange
        exchange.on_gone, exchange.on_pause = self.gone, self._on_pause
        exchange.on_resume = self._on_resume
        self.desk.enter(self)

    def resume(self) -> bool:
        """Try again to be placed; False when still waiting."""
        self.do(self.handoff.resumed())
        return self.handoff.phase is not Phase.WAITING

    def expire(self, failure: Failure) -> None:
        """Give up waiting."""
        self.do(self.handoff.expired(failure))

    def gone(self) -> None:
        """The client has left."""
        self.desk.act(self, self.do, self.handoff.gone())

    def cancel(self) -> None:
        """Close the connection of the leg under way, so that its engine sees it."""
        if self.call is not None:
            self.call.cancel()

    def cut(self) -> None:
        """End at once: the router stops."""
        self.do(self.handoff.cut(Fault("stopped", draining())))

    def abandon(self) -> None:
        """End by a fault of our own, wherever it struck: all that is held is given back, and the client told."""
        desk, guard = self.desk, self.desk.afterwards.guard
        guard(self.cancel)
        while self.ledger.booked:
            guard(self.ledger.give_back)
        self.handoff.cut(Fault("internal", verdicts.own_fault()))
        guard(desk.tell_fault, self.reply)
        if not self._is_concluded:
            guard(self._conclude)
        guard(self._leave)

    def check(self, now_s: float) -> None:
        """Act on a passed deadline.

        Raises:
            RuntimeError: when nobody is left who would ever go on with it.
        """
        phase, is_stream = self.handoff.phase, self.request.is_stream
        if self._is_forgotten(phase):
            raise RuntimeError(f"nobody goes on with a request in phase {phase}")
        leg = overdue_leg(phase, self.ledger, self.desk.settings, now_s, is_stream=is_stream)
        if leg is None or (self.call is not None and self.call.is_paused):
            return
        self.cancel()
        self.faulted(leg, verdicts.late(is_open=phase is Phase.STREAMING))

    def _is_forgotten(self, phase: Phase) -> bool:
        """Whether none of those is there who call back; in between two turns of the loop one always is."""
        if phase is Phase.PLACING:
            return self._has_prompt and self.timer is None
        if phase is Phase.WAITING:
            return self not in self.desk.line
        return phase in TERMINAL or self.call is None or self.call.is_over

    # The client's connection tells…

    def _on_pause(self) -> None:
        if self.call is not None:
            self.call.pause()

    def _on_resume(self) -> None:
        self.ledger.last_s = self.desk.loop.time()
        if self.call is not None:
            self.call.resume()

    # The tokenizer tells…

    def _on_tokens(self, tokenized: Tokenized) -> None:
        if not self.is_over:
            self.desk.act(self, self._start, tokenized)

    def _start(self, tokenized: Tokenized) -> None:
        desk = self.desk
        desk.metrics.tokenized.add(tokenized.how)
        self._is_text = tokenized.how == "text"
        self.prompt = tokenized.prompt(desk.hashers, self.request)
        self._has_prompt = True
        self.do(self.handoff.started())

    # The engine tells (through `legs`)…

    def on_refused(self, leg: Leg, failure: Failure) -> None:
        """Take an engine's verdict that the request itself is wrong."""
        if not self.is_over:
            self.do(self.handoff.refused(leg, failure))

    def on_failed(self, leg: Leg, error: UpstreamError) -> None:
        """Take the news that a leg's connection is lost, or that we failed while told of it."""
        if isinstance(error, ReceiverError):
            self.desk.lost(self)
            return
        is_open = self.handoff.phase is Phase.STREAMING
        self.on_fault(leg, verdicts.from_upstream(error, is_open=is_open))

    def on_fault(self, leg: Leg, fault: Fault) -> None:
        """Take the news that an attempt failed."""
        if not self.is_over:
            self.faulted(leg, fault)

    def on_events(self, out: bytes, num_tokens: int) -> None:
        """Take events for the client; the first time there is a token among them."""
        if not self.is_over:
            self._note_tokens(num_tokens, self.desk.now_s())
            self.reply.write(out)

    def on_stream_done(self, out: bytes, num_tokens: int, usage: Usage | None) -> None:
        """Take the last events of a stream, which ended properly."""
        if self.is_over:
            return
        self._note_tokens(num_tokens, self.desk.now_s())
        # They leave in one write with the end.
        self.body = out
        self.desk.afterwards.guard(self.ledger.ended, usage)
        self.do(self.handoff.ended())
        if self.call is not None:
            self.call.let_go()

    def _note_tokens(self, num_tokens: int, now_s: float) -> None:
        if self.handoff.phase is Phase.MAIN:
            self.do(self.handoff.first_byte())
            self.reply.stream()
            self.ledger.first_token(Leg.MAIN, now_s)
            if self.call is not None:
                self.call.gathers = True
            self._served(Leg.MAIN)
        self.ledger.tokens(num_tokens, now_s)

    def on_broken(self, why: str, leg: Leg) -> None:
        """Take an answer that is not to be believed any more."""
        if self.is_over:
            return
        self.cancel()
        self.faulted(leg, verdicts.bad_answer(why, is_open=self.handoff.phase is Phase.STREAMING))

    def on_answer(self, leg: Leg, body: bytes) -> None:
        """Take a leg's whole 200."""
        if self.is_over:
            return
        if (answer := read_answer(body)).fault:
            self.faulted(leg, verdicts.bad_answer(answer.fault, is_open=False))
            return
        self.desk.afterwards.guard(self.ledger.answered, leg, answer.usage)
        if leg is Leg.MAIN:
            self.body = body
            self.ledger.bookings[leg].worker.succeeded(self.desk.loop.time())
            self._served(leg)
            self.do(self.handoff.ended())
        else:
            self._on_transfer(answer.transfer, answer.usage)

    def _on_transfer(self, transfer: Any, usage: Usage | None) -> None:  # noqa: ANN401 - an engine's JSON, checked here
        now_s, settings = self.desk.loop.time(), self.desk.settings
        worker = self.ledger.bookings[Leg.PREFILL].worker
        num_tokens = self.prompt.num_tokens if self.prompt.is_known else None
        wrong = transfer_fault(transfer, worker, usage.prompt_tokens if usage else num_tokens)
        if wrong:
            self.desk.metrics.handoffs.add("rejected")
            log.warning("engine %s: transfer parameters refused: %s", clean(worker.id), wrong)
            self.faulted(Leg.PREFILL, Fault("bad_transfer", verdicts.failed()))
            return
        self.ledger.first_token(Leg.PREFILL, now_s)
        self._served(Leg.PREFILL)
        self.ledger.lapses_s = now_s + settings.kv_lease_s - settings.kv_lease_margin_s
        self.do(self.handoff.prefilled(transfer))

    def _served(self, leg: Leg) -> None:
        """Note that an engine has computed the prompt, where it does not tell itself in names of ours."""
        worker = self.ledger.bookings[leg].worker
        is_untold = self._is_text or worker.is_stranger or not worker.is_told
        if is_untold and not (leg is Leg.MAIN and self.handoff.has_used_transfer):
            self.desk.texts.served(worker, self.prompt)

    def faulted(self, leg: Leg, fault: Fault) -> None:
        """Note the end of an attempt, and do what follows from it."""
        desk, handoff, worker = self.desk, self.handoff, self.ledger.bookings[leg].worker
        self.ledger.faulted(leg, fault.reason)
        facts = worker, self.call, handoff, desk.loop.time(), len(desk.flights)
        may_retry = self.attempts.failed(leg, fault, *facts)
        self.do(handoff.faulted(leg, fault, may_retry=may_retry))

    # What the hand-off says

    def do(self, actions: Iterable[Action]) -> None:
        """Do it, and conclude if that was the last."""
        for action in actions:
            DOERS[type(action)](self, action)
        if self.handoff.is_over and not self._is_concluded:
            self._conclude()

    def _conclude(self) -> None:
        self._is_concluded = True
        desk = self.desk
        endpoint = "chat" if self.request.endpoint == CHAT else "completions"
        desk.metrics.requests.add(endpoint, str(self.reply.code))
        desk.afterwards.guard(self.ledger.concluded, str(self.handoff.phase), self.reply.code)
        self._leave()

    def _leave(self) -> None:
        """Let go of whoever might still call, and of the place among the others."""
        if self.timer is not None:
            self.timer.cancel()
        self.attempts.end()
        self.exchange.on_gone = self.exchange.on_pause = self.exchange.on_resume = None
        self.desk.leave(self)
