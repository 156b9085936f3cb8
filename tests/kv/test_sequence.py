import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dynctl.kv.sequence import (
    MAX_ATTEMPTS,
    MAX_HELD,
    REORDER_S,
    REPLAY_SILENCE_S,
    EventSequence,
    Verdict,
)


class Publisher:
    """A publisher with a bounded replay buffer; payloads name incarnation and number."""

    def __init__(self, buffer_steps=10_000):
        self.incarnation, self.sent, self.buffer_steps = 0, [], buffer_steps

    def publish(self):
        self.sent.append(f"{self.incarnation}:{len(self.sent)}".encode())
        return len(self.sent) - 1, self.sent[-1]

    def restart(self):
        self.incarnation += 1
        self.sent = []

    def replay(self, start):
        first = max(start, len(self.sent) - self.buffer_steps, 0)
        return [(seq, self.sent[seq]) for seq in range(first, len(self.sent))]


class Follower:
    """Obeys verdicts; asks the publisher synchronously, each answer through a lossy channel."""

    def __init__(self, publisher, lose=lambda: False, **options):
        self.publisher, self.lose = publisher, lose
        self.sequence, self.applied, self.num_resets, self.now_s = (
            EventSequence(**options),
            [],
            0,
            0.0,
        )

    def obey(self, verdict):
        pending = [verdict]
        while pending:
            verdict = pending.pop(0)
            if verdict.reset:
                self.applied.clear()
                self.num_resets += 1
            self.applied += [payload for _, payload in verdict.apply]
            if verdict.replay_from is not None:
                pending += self.replay(verdict.replay_from)

    def replay(self, start):
        for i, (seq, payload) in enumerate(self.publisher.replay(start)):
            if i > 0 and self.lose():
                continue  # a full queue drops what comes later, never the first
            verdict = self.sequence.replayed(seq, payload, self.now_s)
            if verdict.replay_from is not None:
                return [verdict]  # asked anew: the rest of this answer is dropped
            self.obey(verdict)
        if self.lose():
            self.now_s += REPLAY_SILENCE_S
            return [self.sequence.tick(self.now_s)]
        return [self.sequence.replay_ended(self.now_s)]

    def live(self, seq, payload):
        self.obey(self.sequence.live(seq, payload, self.now_s))


def test_batches_in_order_are_applied_at_once():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.obey(follower.sequence.start(0))
    for _ in range(5):
        follower.live(*publisher.publish())

    assert follower.applied == publisher.sent
    assert follower.sequence.counts.num_gaps == 0
    assert not follower.sequence.is_repairing


def test_joining_late_fetches_what_came_before():
    publisher = Publisher()
    for _ in range(7):
        publisher.publish()
    follower = Follower(publisher)
    follower.obey(follower.sequence.start(0))

    assert follower.applied == publisher.sent


def test_k1_a_gap_is_filled_in_order_before_what_follows():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    for _ in range(3):
        publisher.publish()
    follower.live(*publisher.publish())

    assert follower.applied == publisher.sent
    assert (follower.sequence.counts.num_gaps, follower.num_resets) == (1, 0)


def test_k1_batches_that_arrive_during_a_repair_wait_for_it():
    sequence = EventSequence()
    sequence.live(0, b"0", 0)
    assert sequence.live(3, b"3", 0).replay_from == 0
    assert sequence.live(4, b"4", 0).apply == []
    assert sequence.is_repairing
    for seq in (0, 1):
        sequence.replayed(seq, str(seq).encode(), 0)
    verdict = sequence.replayed(2, b"2", 0)

    assert [payload for _, payload in verdict.apply] == [b"2", b"3", b"4"]
    assert sequence.replay_ended(0).replay_from is None
    assert not sequence.is_repairing


def test_k2_a_gap_older_than_the_buffer_forgets_everything_and_goes_on():
    publisher = Publisher(buffer_steps=3)
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    for _ in range(8):
        publisher.publish()
    follower.live(*publisher.publish())

    assert follower.num_resets == 1
    assert follower.applied == publisher.sent[-3:]
    assert follower.sequence.counts.num_lost == 1


def test_k2_without_a_replay_endpoint_every_gap_is_final():
    publisher = Publisher()
    follower = Follower(publisher, can_replay=False)
    follower.obey(follower.sequence.start(0))
    publisher.publish()
    follower.live(*publisher.publish())
    assert (follower.applied, follower.num_resets) == ([b"0:1"], 0)
    publisher.publish()
    follower.live(*publisher.publish())
    assert (follower.applied, follower.num_resets) == ([b"0:1"], 0)
    assert follower.sequence.is_repairing
    follower.obey(follower.sequence.tick(REORDER_S))

    assert (follower.applied, follower.num_resets) == ([b"0:3"], 1)
    assert not follower.sequence.is_repairing


def test_k4_what_comes_out_of_order_is_held_and_applied_in_order():
    """With replay and without; what the replay brings a second time is a duplicate."""
    for can_replay in (True, False):
        publisher = Publisher()
        follower = Follower(publisher, can_replay=can_replay)
        first, *later = [publisher.publish() for _ in range(6)]
        follower.live(*first)
        if can_replay:
            follower.replay = lambda start: []  # on its way
        for message in reversed(later):
            follower.live(*message)
            assert len(follower.applied) in {1, 6}
        assert follower.applied == publisher.sent
        assert follower.num_resets == 0
        if can_replay:
            del follower.replay
            follower.obey(follower.replay(0)[0])
        assert follower.applied == publisher.sent
        assert not follower.sequence.is_repairing


def test_k4_without_replay_no_more_than_a_thousand_are_held_for_a_late_one():
    publisher = Publisher()
    follower = Follower(publisher, can_replay=False)
    follower.live(*publisher.publish())
    publisher.publish()
    for number in range(MAX_HELD):
        assert follower.num_resets == 0, number
        follower.live(*publisher.publish())

    assert follower.num_resets == 1
    assert follower.applied == publisher.sent[2:]


def test_what_is_known_is_doubted_only_while_batches_are_missing_for_sure():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    follower.replay = lambda start: []
    follower.obey(follower.sequence.audit(0))
    assert follower.sequence.is_repairing
    assert not follower.sequence.is_missing  # only looking
    del follower.replay
    follower.obey(follower.replay(0)[0])
    publisher.publish()
    follower.replay = lambda start: []
    follower.live(*publisher.publish())
    assert follower.sequence.is_missing
    del follower.replay
    follower.obey(follower.replay(0)[0])
    assert not follower.sequence.is_missing


def test_k21_times_are_only_compared_with_each_other():
    """The same history at any time of the clock passed in ends the same."""
    ends = []
    for start_s in (0.0, 1e9, -1e9):
        publisher = Publisher(buffer_steps=3)
        follower = Follower(publisher)
        follower.now_s = start_s
        for number in range(20):
            message = publisher.publish()
            if number % 5:
                follower.live(*message)
            follower.now_s += 0.25
            follower.obey(follower.sequence.tick(follower.now_s))
        ends.append((follower.applied, follower.num_resets))
    assert ends[0] == ends[1] == ends[2]


def test_k3_duplicates_are_counted_and_dropped():
    publisher = Publisher()
    follower = Follower(publisher)
    batches = [publisher.publish() for _ in range(3)]
    for seq, payload in batches + batches:
        follower.live(seq, payload)

    assert follower.applied == publisher.sent
    assert follower.num_resets == 0
    assert follower.sequence.counts.num_duplicates >= 3


def test_k5_an_audit_finds_a_lost_tail():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    publisher.publish()
    follower.obey(follower.sequence.audit(0))

    assert follower.applied == publisher.sent
    assert follower.sequence.audit(0).replay_from is not None  # and none is left hanging


def test_k6_a_silent_replay_is_asked_again_and_finally_given_up():
    sequence = EventSequence()
    sequence.live(0, b"0", 0)
    assert sequence.live(5, b"5", 0).replay_from is not None
    now_s, num_asked = 0.0, 1
    while True:
        assert sequence.tick(now_s + REPLAY_SILENCE_S / 2).replay_from is None
        now_s += REPLAY_SILENCE_S
        verdict = sequence.tick(now_s)
        if verdict.reset:
            break
        num_asked += verdict.replay_from is not None

    assert num_asked == MAX_ATTEMPTS
    assert verdict.apply == [(5, b"5")]
    assert not sequence.is_repairing


@pytest.mark.parametrize(("num_known", "num_lost"), [(0, 0), (3, 1)])
def test_nothing_is_lost_where_nothing_was_known_yet(num_known, num_lost):
    """A replay that never answers is given up in either case, and what comes live is taken from then on."""
    sequence, publisher = EventSequence(), Publisher()
    for seq, payload in [publisher.publish() for _ in range(num_known)]:
        sequence.live(seq, payload, 0.0)
    sequence.reconnected(0.0)
    for attempt in range(MAX_ATTEMPTS):
        verdict = sequence.tick((attempt + 1) * REPLAY_SILENCE_S)
    assert verdict.reset
    assert sequence.counts.num_lost == num_lost


def test_k6_a_replay_that_loses_its_middle_is_resumed():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    for _ in range(9):
        publisher.publish()
    lost = iter([False, False, True, True])
    follower.lose = lambda: next(lost, False)
    follower.live(*publisher.publish())

    assert follower.applied == publisher.sent
    assert follower.num_resets == 0


def test_k7_one_gap_is_repaired_once():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    publisher.publish()
    follower.live(*publisher.publish())
    replays = follower.sequence.counts.num_replays
    follower.live(*publisher.publish())

    assert follower.sequence.counts.num_replays == replays


def test_k7_after_a_repair_the_cursor_is_the_later_of_replay_and_live():
    for last_live, last_replayed in ((8, 9), (8, 6), (8, 8)):
        sequence = EventSequence()
        sequence.live(0, b"0", 0)
        assert sequence.live(3, b"3", 0).replay_from == 0
        for seq in range(4, last_live + 1):
            sequence.live(seq, b"%d" % seq, 0)
        for seq in range(last_replayed + 1):
            assert sequence.replayed(seq, b"%d" % seq, 0).replay_from is None
        assert sequence.replay_ended(0).replay_from is None
        assert sequence.last == max(last_live, last_replayed)
        later = sequence.live(last_live + 1, b"%d" % (last_live + 1), 0)
        assert later.replay_from is None
        assert (sequence.counts.num_gaps, sequence.counts.num_replays) == (1, 1)


def test_k8_a_number_going_back_is_a_restart():
    publisher = Publisher()
    follower = Follower(publisher)
    for _ in range(6):
        follower.live(*publisher.publish())
    publisher.restart()
    publisher.publish()
    follower.live(*publisher.publish())

    assert follower.num_resets == 1
    assert follower.applied == [b"1:0", b"1:1"]


def test_k8_a_restart_that_overtook_our_cursor_is_seen_by_the_content():
    publisher = Publisher()
    follower = Follower(publisher)
    for _ in range(3):
        follower.live(*publisher.publish())
    publisher.restart()
    for _ in range(8):
        publisher.publish()
    follower.live(*publisher.publish())

    assert follower.applied == publisher.sent


def test_k8_an_audit_sees_a_restarted_publisher_that_is_quiet():
    publisher = Publisher()
    follower = Follower(publisher)
    for _ in range(3):
        follower.live(*publisher.publish())
    publisher.restart()
    follower.obey(follower.sequence.audit(0))

    assert follower.applied == []
    follower.live(*publisher.publish())
    assert follower.applied == [b"1:0"]


def test_k8_a_restarted_publisher_is_noticed_when_the_subscription_connects_again():
    """Its first batches are lost and the next one fits our cursor exactly: only the comparison tells."""
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    publisher.restart()
    publisher.publish()
    second = publisher.publish()
    follower.obey(follower.sequence.reconnected(0))
    follower.live(*second)

    assert follower.applied == [b"1:0", b"1:1"]
    assert follower.num_resets == 1


def test_the_first_connection_asks_for_what_was_sent_before_it_and_doubts_nothing():
    """The replay may be here before the subscription stands; what is sent between the two is heard by neither."""
    publisher = Publisher()
    follower = Follower(publisher)
    publisher.publish()
    follower.obey(follower.sequence.start(0))
    publisher.publish()
    verdict = follower.sequence.connected(0)

    assert verdict.replay_from is not None
    assert not follower.sequence.is_missing
    follower.obey(verdict)
    assert follower.applied == publisher.sent
    assert follower.num_resets == 0
    assert follower.sequence.reconnected(0).replay_from is not None
    assert follower.sequence.is_missing


def test_a_connection_that_only_broke_changes_nothing():
    publisher = Publisher()
    follower = Follower(publisher)
    for _ in range(2000):
        follower.live(*publisher.publish())
    publisher.publish()
    follower.obey(follower.sequence.reconnected(0))

    assert follower.applied == publisher.sent
    assert follower.num_resets == 0


def test_batches_held_during_a_repair_are_bounded():
    publisher = Publisher()
    follower = Follower(publisher)
    follower.live(*publisher.publish())
    publisher.publish()
    sequence = follower.sequence
    assert sequence.live(*publisher.publish(), 0).replay_from is not None
    for _ in range(3 * MAX_HELD):
        sequence.live(*publisher.publish(), 0)
    assert len(sequence._held) <= MAX_HELD
    for verdict in follower.replay(0):
        follower.obey(verdict)

    assert follower.applied == publisher.sent


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.booleans())
def test_a_batch_taken_at_once_leaves_what_a_decision_would_have_left(seed, can_replay):
    rnd = random.Random(seed)
    quick, slow = EventSequence(can_replay), EventSequence(can_replay)
    now_s, taken = 0.0, 0
    assert quick.start(now_s) == slow.start(now_s)
    for _ in range(rnd.randrange(60)):
        now_s += rnd.random() * 2
        kind, near = rnd.random(), max(0, slow.last + rnd.choice([-2, 0, 1, 1, 1, 1, 3]))
        payload = f"{near}:{rnd.random() < 0.05}".encode()
        if kind < 0.7:
            wanted = slow.live(near, payload, now_s)
            if quick.takes(near, payload):
                taken += 1
                assert wanted == Verdict(apply=[(near, payload)])
            else:
                assert quick.live(near, payload, now_s) == wanted
        elif kind < 0.8:
            assert quick.replayed(near, payload, now_s) == slow.replayed(near, payload, now_s)
        else:
            step = rnd.choice(["replay_ended", "tick", "audit", "reconnected"])
            assert getattr(quick, step)(now_s) == getattr(slow, step)(now_s)
        state = (quick.last, quick.is_repairing, quick.is_missing, quick.counts)
        assert state == (slow.last, slow.is_repairing, slow.is_missing, slow.counts)
    event(f"taken at once: {min(taken, 5)}")


@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from([4, 10_000]),
    st.sampled_from([0, 0.2, 0.5]),
)
def test_after_any_history_the_state_is_what_the_publisher_sent(
    seed, num_steps, buffer_steps, loss
):
    """Losses, doubles, reordering, restarts and broken replays; then a quiet line and two audits."""
    rnd = random.Random(seed)
    publisher = Publisher(buffer_steps)
    follower = Follower(publisher, lose=lambda: rnd.random() < loss)
    follower.obey(follower.sequence.start(0))
    delayed, recent = [], []
    for _ in range(num_steps):
        kind = rnd.random()
        if kind < 0.04:
            publisher.restart()
            delayed, recent = [], []  # the subscription's old connection is gone with the process
            follower.obey(follower.sequence.reconnected(follower.now_s))
        message = publisher.publish()
        recent = [*recent[-3:], message]
        if rnd.random() < loss:
            delayed.append(message)
        else:
            follower.live(*message)
        if delayed and rnd.random() < 0.5:
            late = delayed.pop()
            if rnd.random() < 0.5:
                follower.live(*late)
        if kind > 0.9:
            follower.live(*rnd.choice(recent))
    follower.lose = lambda: False
    for _ in range(4):
        follower.now_s += REPLAY_SILENCE_S
        follower.obey(follower.sequence.tick(follower.now_s))
        follower.obey(follower.sequence.audit(follower.now_s))

    start = len(publisher.sent) - len(follower.applied)
    assert follower.applied == publisher.sent[start:]
    assert start == 0 or follower.sequence.counts.num_lost > 0 or buffer_steps == 4
    assert not follower.sequence.is_repairing
