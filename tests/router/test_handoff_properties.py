"""Whatever comes in whatever order: one terminal phase, every booking released once, no second use of parameters."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.router.api.answers import Failure
from dynctl.router.handoff import (
    TERMINAL,
    Answer,
    Break,
    Cancel,
    Fault,
    Finish,
    Handoff,
    Leg,
    Phase,
    Place,
    Release,
    Send,
)

FAILURE = Failure(502, "x", "x")
LEGS = st.sampled_from(list(Leg))
FAULTS = st.builds(
    Fault, st.sampled_from(["connect", "closed", "error_500"]), st.just(FAILURE), st.booleans()
)
EVENTS = st.one_of(
    st.tuples(st.just("placed"), st.booleans()),
    st.tuples(st.just("unplaced"), st.sampled_from([None, FAILURE])),
    st.tuples(st.just("resumed")),
    st.tuples(st.just("expired"), st.just(FAILURE)),
    st.tuples(st.just("prefilled"), st.integers(0, 10**9)),
    st.tuples(st.just("faulted"), LEGS, FAULTS, st.booleans()),
    st.tuples(st.just("refused"), LEGS, st.just(FAILURE)),
    st.tuples(st.just("first_byte")),
    st.tuples(st.just("ended")),
    st.tuples(st.just("gone")),
    st.tuples(st.just("transfer_lapsed")),
)


class Driver:
    """Does what a driver does with bookings, and watches the rules."""

    def __init__(self, wants_prefill, max_retries):
        self.handoff = Handoff(wants_prefill=wants_prefill, max_retries=max_retries)
        self.held = set()
        self.num_ends = 0
        self.sent_transfers = []
        self.fresh = 0
        self.num_sends = 0
        self.take(self.handoff.started())

    def event(self, name, *args):
        before = self.handoff.phase
        if name == "placed":
            has_prefill = args[0]
            if before is Phase.PLACING:
                if has_prefill and self.handoff.has_unused_transfer:
                    return
                self.held.add(Leg.MAIN)
                if has_prefill:
                    self.held.add(Leg.PREFILL)
            actions = self.handoff.placed(has_prefill=has_prefill)
        elif name == "unplaced" and Leg.MAIN in self.held:
            return  # a driver says this only when the generating engine was wanted and not found
        elif name == "prefilled":
            self.fresh += 1
            actions = self.handoff.prefilled({"remote_request_id": self.fresh})
        elif name == "faulted":
            actions = self.handoff.faulted(args[0], args[1], may_retry=args[2])
        else:
            actions = getattr(self.handoff, name)(*args)
        if before in TERMINAL:
            assert actions == []
            assert self.handoff.phase is before
        self.take(actions)

    def take(self, actions):
        for action in actions:
            if isinstance(action, Release):
                assert action.leg in self.held, "released what was not booked"
                self.held.remove(action.leg)
            elif isinstance(action, Send):
                assert action.leg in self.held, "sent without a booking"
                self.num_sends += 1
                if action.transfer is not None:
                    self.sent_transfers.append(action.transfer["remote_request_id"])
            elif isinstance(action, (Answer, Break, Finish)):
                self.num_ends += 1
            elif isinstance(action, (Place, Cancel)):
                assert not (isinstance(action, Place) and self.handoff.phase is not Phase.PLACING)


@given(st.booleans(), st.integers(0, 3), st.lists(EVENTS, max_size=25))
@settings(max_examples=500, deadline=None)
def test_any_order_of_events_ends_once_and_releases_once(wants_prefill, max_retries, history):
    driver = Driver(wants_prefill, max_retries)
    for name, *args in history:
        driver.event(name, *args)
    driver.event("gone")

    assert driver.handoff.phase in TERMINAL
    assert driver.held == set()
    assert driver.num_ends == (0 if driver.handoff.phase is Phase.GONE else 1)
    assert driver.handoff.num_retries <= max_retries
    assert driver.num_sends <= 2 * (max_retries + 2)


@given(st.lists(EVENTS, max_size=30))
@settings(max_examples=500, deadline=None)
def test_parameters_an_engine_may_have_seen_are_never_sent_again(history):
    driver = Driver(wants_prefill=True, max_retries=3)
    seen = set()
    for name, *args in history:
        num_before = len(driver.sent_transfers)
        last = driver.sent_transfers[-1] if driver.sent_transfers else None
        was_main = driver.handoff.phase is Phase.MAIN
        driver.event(name, *args)
        if name == "faulted" and was_main and args[0] is Leg.MAIN and args[1].was_sent:
            seen.add(last)
        assert not set(driver.sent_transfers[num_before:]) & (seen - {None})


def test_a_prefill_that_fails_too_often_is_done_by_the_decode_engine():
    driver = Driver(wants_prefill=True, max_retries=1)
    driver.event("placed", True)
    fault = Fault("closed", FAILURE)
    driver.event("faulted", Leg.PREFILL, fault, True)
    driver.event("placed", True)
    driver.event("faulted", Leg.PREFILL, fault, True)

    assert driver.handoff.phase is Phase.MAIN
    assert driver.held == {Leg.MAIN}
    assert driver.sent_transfers == []


def test_a_prefill_engines_refusal_reaches_the_client_and_decode_is_never_asked():
    driver = Driver(wants_prefill=True, max_retries=2)
    driver.event("placed", True)
    driver.event("refused", Leg.PREFILL, FAILURE)

    assert driver.handoff.phase is Phase.FAILED
    assert driver.num_sends == 1
    assert driver.held == set()


def test_unused_parameters_go_to_another_decode_engine_when_the_first_was_never_reached():
    driver = Driver(wants_prefill=True, max_retries=2)
    driver.event("placed", True)
    driver.event("prefilled", 0)
    driver.event("faulted", Leg.MAIN, Fault("connect", FAILURE, was_sent=False), True)
    driver.event("placed", False)

    assert driver.sent_transfers == [1, 1]
    driver.event("faulted", Leg.MAIN, Fault("closed", FAILURE, was_sent=True), True)
    driver.event("placed", False)
    assert driver.sent_transfers == [1, 1]
