"""The short way of a short request: placed by load between two engines, and sent at once.

Most answers are sound, and for them a flight's state machine costs more than the rest: they have a `ShortFlight`, which
gives the client its answer, or the first events of a stream, and keeps the books afterwards. A stream then goes on in a
`Flight`, and so does, from the point reached, whatever is out of the ordinary (an error, a deadline, a client that leaves):
every promise is kept in one place. Not here: pools, prompts worth matching. IO: upstream connections.
"""

import time
from typing import TYPE_CHECKING

from dynctl.http1.call import Call, ReceiverError, UpstreamError
from dynctl.http1.message import Header
from dynctl.http1.server import Exchange
from dynctl.router.api.requests import CHAT, ApiRequest
from dynctl.router.api.shapes import Answer
from dynctl.router.api.streams import StreamFollower, read_answer
from dynctl.router.bookings import Booking
from dynctl.router.choosing import Load, Need
from dynctl.router.decisions import Decision
from dynctl.router.flight import Flight
from dynctl.router.handoff import Leg
from dynctl.router.legs import MAX_ANSWER_BYTES, LegSink
from dynctl.router.orders import session_of
from dynctl.router.placement import Placed
from dynctl.router.policies.least_loaded import POLICY as PLAIN
from dynctl.router.prompt import CHARS_PER_TOKEN, Prompt
from dynctl.router.reply import Reply
from dynctl.router.workers import Worker

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

_Facts = tuple[int, int, int, float, float, float]
"""The first fields of a `Need`; that itself is made when the client has its answer."""


def begin_short(
    desk: "Desk",
    exchange: Exchange,
    request: ApiRequest,
    model: str | None,
    request_id: str,
    shown_id: bytes,
) -> bool:
    """Place and send a request that is short and asks for nothing more; False when that cannot be done at once, and nothing was.

    Arguments as of a `Flight`.
    """
    if (
        request.num_sequences != 1
        or (request.endpoint != CHAT and request.prompt_ids is not None)
        or not desk.placement.policy.uses_index
        or desk.placement.shadow is not None
        or len(desk.line)
        or exchange.request.header(b"x-dynctl-explain") is not None
        or (session_of(exchange.request) and desk.settings.session_ttl_s)
        or (number := request.num_chars) >= desk.short_request_chars
    ):
        return False
    started_s, now_s = time.perf_counter(), desk.now_s()
    if desk.books is not None:
        desk.books.exchange(now_s)
    need = _need(desk, request, number, now_s)
    found = _choose(desk, model, need, now_s)
    if found is None:
        return False
    worker, loads, luck, position = found
    route = desk.routes.get(worker.id)
    if route is None:
        return False
    body = request.main_body(model or worker.info.model, None)
    desk.workers.num_sent += 1
    prompt_tokens, output_tokens, _, _, unit, _ = need
    short = ShortFlight(desk, exchange, request, model, request_id, shown_id)
    short.booking = worker.book(prompt_tokens, prompt_tokens, output_tokens, now_s, unit)
    try:
        short.placed(need, loads, luck, position, is_relayed=route.is_relayed)
        short.decided_s = time.perf_counter() - started_s
        call = short.call = route.send(request.endpoint, request_id, body, short)
    except Exception:  # noqa: BLE001 - whatever it is, the engine is booked already
        desk.lost(short)
        return True
    exchange.on_gone = short.gone
    if request.is_stream:
        exchange.on_pause, exchange.on_resume = call.pause, call.resume
    desk.enter(short)
    return True


def _need(desk: "Desk", request: ApiRequest, number_chars: int, now_s: float) -> _Facts:
    """What the request asks of an engine."""
    table = desk.workers
    return (
        max(1, number_chars // CHARS_PER_TOKEN),
        table.lengths.expected(request.route_key, request.max_tokens),
        0,
        now_s,
        table.recent_unit(now_s),
        table.tally.prefill.slope,
    )


def _choose(
    desk: "Desk", model: str | None, need: _Facts, now_s: float
) -> tuple[Worker, list[Load], float, int] | None:
    """The less loaded of two engines drawn at random; and what it was chosen by."""
    table, draw = desk.workers, desk.draw
    workers = table.whole(model, now_s)
    if table.may_limit(now_s):
        workers = table.with_room(workers, now_s, None, need[0] + need[1])
    number = len(workers)
    if number > 2:
        first, second = divmod(int(draw() * number * (number - 1)), number - 1)
        workers = (workers[first], workers[second + (second >= first)])
    elif not number:
        return None
    loads = [worker.cached_load or worker.load() for worker in workers]
    luck = draw()
    position = _less_loaded(loads, luck) if len(loads) == 2 else 0
    return workers[position], loads, luck, position


def _less_loaded(loads: list[Load], luck: float) -> int:
    """Do what `least_loaded` does, for two: the policy itself costs a tenth of such a request."""
    one, other = loads
    difference = one.active_requests - other.active_requests or (
        one.pending_prefill_tokens - other.pending_prefill_tokens
    )
    return int(difference > 0) if difference else int(luck * 2)


class ShortFlight:
    """A short request, placed and sent, until it is answered or its stream has begun; it receives its own answer."""

    __slots__ = (
        "_answer",
        "_answered_s",
        "_decision",
        "_desk",
        "_exchange",
        "_follower",
        "_headers",
        "_held",
        "_is_relayed",
        "_loads",
        "_luck",
        "_need",
        "_num_bytes",
        "_parts",
        "_position",
        "_reply",
        "_shown_id",
        "_sink",
        "_status",
        "booking",
        "call",
        "decided_s",
        "model",
        "request",
        "request_id",
    )

    def __init__(
        self,
        desk: "Desk",
        exchange: Exchange,
        request: ApiRequest,
        model: str | None,
        request_id: str,
        shown_id: bytes,
    ) -> None:
        """Arguments as of a `Flight`."""
        self._desk = desk
        self._exchange = exchange
        self.request = request
        self.model = model
        self.request_id = request_id
        self._shown_id = shown_id
        self._reply: Reply | None = None
        """Set once the first events of a stream are with the client."""
        self._answer: Answer | None = None
        """A whole answer the client has."""
        self._answered_s = 0.0
        self.call: Call | None = None
        self.decided_s = 0.0
        """How long it took to choose the engine."""
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._follower: StreamFollower | None = None
        self._held = b""
        """Events before the first token, as `LegSink` holds them back."""
        self._sink: LegSink | None = None
        """Receives the answer for a flight, since there is one."""
        self._decision: Decision | None = None
        self.booking: Booking
        self._need: _Facts
        self._loads: list[Load]
        self._luck: float
        self._position: int
        self._is_relayed: bool

    def placed(
        self,
        need: _Facts,
        loads: list[Load],
        luck: float,
        position: int,
        *,
        is_relayed: bool,
    ) -> None:
        """Note where the request goes, and what that was chosen by."""
        self._need = need
        self._loads = loads
        self._luck = luck
        self._position = position
        self._is_relayed = is_relayed

    # The engine tells…

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Keep status and fields."""
        self._status = status
        self._headers = headers
        if status == 200 and self.request.is_stream:
            self._follower = StreamFollower(hides_usage=not self.request.has_usage_asked)

    def on_data(self, data: bytes) -> None:
        """Keep a piece of the body, or pass the first events of a stream on."""
        if self._follower is not None:
            self._follow(self._follower, data)
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._go_on().on_data(data)
        else:
            self._parts.append(data)

    def on_end(self) -> None:
        """Pass a sound answer on; any other goes the long way."""
        if self._status == 200 and self._follower is None:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            answer = read_answer(body)
            if not answer.fault:
                self._answer = answer
                self._exchange.respond(200, body, lines=b"x-request-id: %b\r\n" % self._shown_id)
                self._answered_s = self._desk.now_s()
                self._desk.answered(self)
                return
        self._go_on().on_end()

    def on_error(self, error: UpstreamError) -> None:
        """Go the long way: there may be another engine."""
        if self._sink is not None:
            # It has failed while it was still told through this.
            self._sink.on_error(error)
        elif isinstance(error, ReceiverError):
            self._desk.lost(self)
        else:
            self._go_on().on_error(error)

    def _follow(self, follower: StreamFollower, data: bytes) -> None:
        """Send the client its first token, with all that came in one read with it; a flight gets the rest of the stream."""
        if self._reply is not None:
            self._go_on().on_data(data)
            return
        out = follower.feed(data)
        if follower.broken or (follower.is_done and not follower.num_token_events):
            self._go_on().followed(follower, out)
        elif not follower.num_token_events:
            self._held += out
        else:
            reply = self._reply = Reply(self._exchange, self._shown_id)
            reply.stream()
            out, self._held = self._held + out, b""
            self._answered_s = self._desk.now_s()
            if follower.is_done:
                reply.end_stream(out)
                if self.call is not None:
                    self.call.let_go()
                self._desk.answered(self)
            else:
                reply.write(out)
                if self.call is not None:
                    self.call.gathers = True

    # Afterwards…

    def keep(self) -> None:
        """Keep the books of an answer the client has."""
        try:
            if self._answer is None:
                self._go_on()
            else:
                self._keep(self._answer)
        except Exception:  # noqa: BLE001 - whatever it is, the next in turn is not to suffer from it
            self._desk.lost(self)
        else:
            self._desk.let_go(self)

    def _keep(self, answer: Answer) -> None:
        desk, usage, booking = self._desk, answer.usage, self.booking
        booking.worker.succeeded(self._answered_s)
        booking.release()
        decision = self.note()
        metrics, prompt_tokens, output_tokens = desk.metrics, self._need[0], 0
        route_key = self.request.route_key
        if usage is not None:
            prompt_tokens = usage.prompt_tokens or prompt_tokens
            output_tokens = usage.output_tokens
            metrics.output_tokens.add(by=output_tokens)
            desk.workers.lengths.learn(route_key, output_tokens)
            cached = decision.cached_tokens = usage.cached_tokens
            if cached:
                metrics.engine_cached_tokens.add(by=cached)
        metrics.prompt_tokens.add(by=prompt_tokens)
        sums = desk.route_keys.sums.of(route_key)
        sums.took(prompt_tokens, output_tokens)
        sums.ended(200)
        decision.outcome = "done"
        metrics.requests.add("chat" if self.request.endpoint == CHAT else "completions", "200")

    def note(self) -> Decision:
        """Count the decision and write it down, unless that is done."""
        decision = self._decision
        if decision is None:
            desk, loads = self._desk, self._loads
            desk.metrics.tokenized.add("short")
            desk.metrics.queue.observe(0.0)
            desk.metrics.decision.observe(self.decided_s)
            shown = self._shown_id.decode()
            chosen = (loads, [0] * len(loads), self._luck, self._position, PLAIN)
            need = Need(*self._need)
            decision = self._decision = Decision(
                *(self.request_id, "whole", False, need, *chosen, shown, self.request.route_key)
            )
            desk.ring.add(decision, "short", time.time())
        return decision

    # Out of the ordinary…

    def check(self, now_s: float) -> None:
        """Let a flight watch over the deadlines of what is late or has begun; it looks at its next turn.

        Raises:
            RuntimeError: when nobody is left who would ever go on with it.
        """
        if self.call is None or self.call.is_over:
            raise RuntimeError("nobody goes on with a short request")
        settings = self._desk.settings
        limits_s = settings.body_timeout_s, settings.first_token_timeout_s
        if self._reply is not None or now_s - self._need[3] > limits_s[self.request.is_stream]:
            self._go_on()

    def cut(self) -> None:
        """End at once: the router stops."""
        self._go_on().flight.cut()

    def gone(self) -> None:
        """The client has left."""
        self._desk.act(self, self._leave)

    def _leave(self) -> None:
        self._go_on().flight.gone()

    def abandon(self) -> None:
        """End by a fault of our own, wherever it struck: what is held is given back, and the client told."""
        if self._sink is not None:
            self._sink.flight.abandon()
            return
        desk, guard = self._desk, self._desk.afterwards.guard
        if self.call is not None:
            guard(self.call.cancel)
        if not self.booking.is_released:
            guard(self.booking.release)
        reply = self._reply or Reply(self._exchange, self._shown_id)
        guard(desk.tell_fault, reply)
        code = 200 if self._answer is not None else reply.code
        desk.metrics.requests.add(
            "chat" if self.request.endpoint == CHAT else "completions", str(code)
        )

    def _go_on(self) -> LegSink:
        """Let a flight receive the answer, from now on; it is told what has come so far."""
        flight = Flight(
            self._desk,
            self._exchange,
            self.request,
            self.model,
            self.request_id,
            self._shown_id,
        )
        sink = LegSink(flight, Leg.MAIN, is_relayed=self._is_relayed)
        self._promote(flight, sink)
        if self.call is not None and not self.call.is_over:
            self.call.sink = sink
        self._desk.act(flight, self._tell, sink)
        return sink

    def _tell(self, sink: LegSink) -> None:
        """Tell what has come so far."""
        follower = self._follower
        if follower is not None:
            sink.follow(follower, self._held)
            if self._reply is not None and follower.is_done:
                sink.followed(follower, b"")
        elif self._status:
            sink.on_head(self._status, self._headers)
        for part in self._parts:
            sink.on_data(part)

    def _promote(self, flight: Flight, sink: LegSink) -> None:
        """Let a flight take over that has sent its first attempt."""
        desk = self._desk
        prompt = Prompt.guessed(desk.hashers, self.request.num_chars)
        placed = Placed(self.booking, None, 0, decisions=[self.note()])
        assert self.call is not None, "it is made by `begin_short`, which sends"
        # From here on all that is held is the flight's.
        self._sink = sink
        flight.call = self.call
        flight.ledger.booked.append(self.booking)
        desk.flights.discard(self)
        is_well = desk.act(flight, flight.adopt, prompt, placed, self._need[3])
        if is_well and self._reply is not None and self._follower is not None:
            facts = self._reply, self._follower.num_token_events, self._answered_s
            desk.act(flight, flight.follow, *facts)
