"""Who does what a request's hand-off asks for: one function for each action, with real connections.

Not here: which actions (`handoff`), what they are done for and what comes back (`flight`). IO: event loop timers, upstream
connections.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dynctl.router import verdicts
from dynctl.router.admission import backoff_s
from dynctl.router.decisions import explained
from dynctl.router.handoff import (
    Answer,
    Break,
    Cancel,
    Count,
    Fault,
    Finish,
    Leg,
    Phase,
    Place,
    Release,
    Send,
    Wait,
)
from dynctl.router.legs import LegSink
from dynctl.router.orders import local_reason, session_of
from dynctl.router.placement import Order, Placed, Unplaced

if TYPE_CHECKING:
    from dynctl.router.flight import Flight


def place(flight: "Flight", action: Place) -> None:
    """Have engines chosen and booked: after a fault a little later, and not before those who wait already."""
    desk = flight.desk
    if action.num_retries:
        delay_s = backoff_s(action.num_retries, desk.rng.random)
        flight.timer = desk.loop.call_later(delay_s, desk.act, flight, place_now, flight, action)
    elif desk.must_wait(flight):
        flight.do(flight.handoff.unplaced(None))
    else:
        place_now(flight, action)


def place_now(flight: "Flight", action: Place) -> None:
    """Have engines chosen and booked, and note by what."""
    flight.timer = None
    desk, handoff, ledger = flight.desk, flight.handoff, flight.ledger
    now_s, has_taker = desk.loop.time(), desk.placement.has_taker
    if handoff.has_unused_transfer and (
        now_s > ledger.lapses_s or not has_taker(ledger.source, now_s)
    ):
        flight.do(handoff.transfer_lapsed())
        return
    if desk.books is not None:
        desk.books.exchange(now_s)
    started_s = time.perf_counter()
    result = _chosen(flight, action, now_s)
    if isinstance(result, Unplaced):
        flight.do(handoff.unplaced(result.failure))
        return
    ledger.placed(result, desk.policy_name, time.time())
    desk.metrics.decision.observe(time.perf_counter() - started_s)
    waited_s = now_s - ledger.arrived_s
    if flight.exchange.request.header(b"x-dynctl-explain") is not None:
        flight.reply.extra = explained(result.decisions, waited_s * 1e3, ledger.queue_position)
    if not handoff.num_retries:
        desk.metrics.queue.observe(waited_s)
    flight.do(handoff.placed(has_prefill=result.prefill is not None))


def _chosen(flight: "Flight", action: Place, now_s: float) -> Placed | Unplaced:
    """Ask for all engines, or for what a request lacks that has one already."""
    desk, request, attempts, ledger = flight.desk, flight.request, flight.attempts, flight.ledger
    order = Order(
        flight.request_id,
        flight.prompt,
        flight.model,
        request.max_tokens,
        local_reason(request, wants_prefill=action.wants_prefill),
        frozenset(attempts.excluded),
        request.route_key,
        flight.shown_id.decode(),
        attempts.may_repeat,
        session_of(flight.exchange.request) if desk.settings.session_ttl_s else b"",
        ledger.booked,
    )
    if not action.wants_main:
        return desk.placement.place_prefill(order, ledger.bookings[Leg.MAIN].worker, now_s)
    if flight.handoff.has_unused_transfer:
        return desk.placement.place_main(order, ledger.source, now_s)
    return desk.placement.place(order, now_s)


def wait(flight: "Flight", _: Wait) -> None:
    """Stand in the queue."""
    desk, ledger, head = flight.desk, flight.ledger, flight.exchange.request
    if failure := desk.wait(flight, head, ledger.arrived_s):
        flight.do(flight.handoff.expired(failure))
    elif head.header(b"x-dynctl-explain") is not None:
        position = desk.line.position(flight, desk.loop.time())
        ledger.queue_position = ledger.queue_position or position


def send(flight: "Flight", action: Send) -> None:
    """Send a leg to the engine booked for it, unless that is gone by now."""
    leg, transfer = action.leg, action.transfer
    desk, ledger, now_s = flight.desk, flight.ledger, flight.desk.loop.time()
    booking = ledger.bookings[leg]
    worker, is_main = booking.worker, leg is Leg.MAIN
    if is_main and ledger.needs_prefill and transfer is None:
        ledger.drop_move()
        ledger.overlap_tokens = desk.placement.prefill_locally(flight.prompt, booking, now_s)
    if is_main:
        ledger.needs_prefill = False
    route = desk.fleet.routes.get(worker.id)
    if route is None or desk.workers.get(worker.id) is not worker:
        flight.faulted(leg, Fault("stale", verdicts.failed(), was_sent=False))
        return
    request, model = flight.request, worker.info.model
    body = request.main_body(model, transfer) if is_main else request.prefill_body(model)
    attempt_id = flight.attempts.next_id(flight.request_id)
    ledger.sent_s = now_s
    sink = LegSink(flight, leg, is_relayed=route.is_relayed)
    flight.call = route.send(request.endpoint, attempt_id, body, sink)


def release(flight: "Flight", action: Release) -> None:
    """Take a leg's booking out of the books; what its engine was expected to hold then, it may not."""
    leg, ledger, desk = action.leg, flight.ledger, flight.desk
    if flight.handoff.phase is not Phase.DONE and ledger.is_unserved(leg):
        worker = ledger.bookings[leg].worker
        desk.placement.unexpect(flight.prompt, worker, ledger.expected_overlap(leg))
    ledger.bookings.pop(leg).release()
    desk.pump_soon()


def count(flight: "Flight", action: Count) -> None:
    """Count something; past a first retry also in the budget of all."""
    flight.desk.metrics.count(action.name, action.labels)
    if action.name == "retries":
        flight.attempts.go_on()


def cancel(flight: "Flight", _: Cancel) -> None:
    """Close the connection of the leg under way."""
    flight.cancel()


def answer(flight: "Flight", action: Answer) -> None:
    """Answer with an error."""
    if reason := action.failure.reason:
        flight.desk.metrics.errors.add(reason)
    flight.reply.fail(action.failure)


def break_off(flight: "Flight", action: Break) -> None:
    """End a stream with an error event."""
    flight.desk.metrics.errors.add("stream_broken")
    flight.cancel()
    flight.reply.break_stream(action.failure)


def finish(flight: "Flight", _: Finish) -> None:
    """End the answer properly, and keep the books of it."""
    if flight.request.is_stream:
        flight.reply.end_stream(flight.body)
    else:
        flight.reply.whole(flight.body)
    desk = flight.desk
    books = desk.workers, desk.hits, desk.probes
    desk.afterwards.guard(flight.ledger.completed, flight.prompt.num_tokens, *books)


DOERS: Final[dict[type, Callable[["Flight", Any], None]]] = {
    Place: place,
    Send: send,
    Release: release,
    Finish: finish,
    Count: count,
    Cancel: cancel,
    Wait: wait,
    Answer: answer,
    Break: break_off,
}
"""One look-up an action: class patterns of `match` cost several times as much, and this is done five times a request."""
