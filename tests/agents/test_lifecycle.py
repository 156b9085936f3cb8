"""The restart rules as a table, without processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.agents.causes import Cause
from dynctl.agents.lifecycle import Action, Event, Life, RestartPolicy, step
from dynctl.core.deployment import EngineState as S

CRASH = Cause("exit", "exited with 1")
CONFIG = Cause("config", "no such flag", is_final=True)


def drive(*events, life=None, every_s=1.0, cause=CRASH, **options):
    """Apply events one after the other; returns the life and all actions."""
    life, actions, now_s = life or Life(), [], 0.0
    for event in events:
        life, action = step(life, event, now_s, cause=cause, **options)
        actions.append(action)
        now_s += every_s
    return life, actions


def test_start_leads_to_ready_through_spawn():
    life, actions = drive(Event.START_REQUESTED, Event.BECAME_READY)

    assert life.state is S.READY
    assert actions == [Action.SPAWN, Action.WATCH]


def test_death_of_a_ready_unit_waits_then_spawns_again():
    life, actions = drive(
        Event.START_REQUESTED, Event.BECAME_READY, Event.EXITED, Event.BACKOFF_PASSED
    )

    assert life.state is S.STARTING
    assert actions[2:] == [Action.SLEEP, Action.SPAWN]
    assert life.num_restarts == 1
    assert life.last_error == CRASH.text


@pytest.mark.parametrize(
    ("failures", "plain_s"), [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (500, 60)]
)
def test_backoff_doubles_from_one_second_to_sixty_with_a_quarter_of_jitter(failures, plain_s):
    policy = RestartPolicy()

    assert policy.delay_s(failures, 0) == plain_s
    assert policy.delay_s(failures, -1) == plain_s * 0.75
    assert policy.delay_s(failures, 1) == plain_s * 1.25


def crash_until(life, limit=20, gap_s=1.0):
    now_s, starts = 0.0, 0
    life, _ = step(life, Event.START_REQUESTED, now_s)
    while life.state is S.STARTING and starts < limit:
        starts += 1
        life, _ = step(life, Event.EXITED, now_s, cause=CRASH)
        now_s += gap_s
        if life.state is S.BACKOFF:
            life, _ = step(life, Event.BACKOFF_PASSED, now_s)
    return life, starts


def test_five_starts_in_ten_minutes_are_enough():
    life, starts = crash_until(Life())

    assert (life.state, starts) == (S.FAILED, 5)
    assert "gave up after 5 starts in 10 minutes" in life.last_error
    assert CRASH.text in life.last_error


def test_rare_deaths_never_fail_a_unit():
    life, starts = crash_until(Life(), gap_s=200.0)

    assert starts == 20
    assert life.state is S.STARTING


def test_what_a_restart_cannot_cure_fails_at_once():
    life, actions = drive(Event.START_REQUESTED, Event.EXITED, cause=CONFIG)

    assert life.state is S.FAILED
    assert actions == [Action.SPAWN, Action.REST]


def test_refused_start_fails_or_waits_like_a_death():
    assert drive(Event.START_REQUESTED, Event.REFUSED, cause=CONFIG)[0].state is S.FAILED
    assert drive(Event.START_REQUESTED, Event.REFUSED)[0].state is S.BACKOFF


def test_long_healthy_run_clears_the_count_of_failures():
    life = Life(state=S.READY, is_wanted=True, num_failures=4, ready_since_s=0.0, starts_s=(0.0,))

    life, _ = step(life, Event.EXITED, 700.0, cause=CRASH)

    assert life.num_failures == 1
    assert life.delay_s == 1.0


def test_stop_drains_a_ready_unit_then_terminates():
    life, actions = drive(
        Event.START_REQUESTED,
        Event.BECAME_READY,
        Event.STOP_REQUESTED,
        Event.DRAIN_ENDED,
        Event.EXITED,
    )

    assert life.state is S.STOPPED
    assert actions[2:] == [Action.DRAIN, Action.TERMINATE, Action.REST]


def test_stop_now_terminates_without_draining_even_mid_drain():
    _, actions = drive(Event.START_REQUESTED, Event.BECAME_READY, Event.STOP_NOW_REQUESTED)
    assert actions[-1] is Action.TERMINATE

    _, actions = drive(
        Event.START_REQUESTED, Event.BECAME_READY, Event.STOP_REQUESTED, Event.STOP_NOW_REQUESTED
    )
    assert actions[-1] is Action.TERMINATE


def test_starting_unit_is_not_drained():
    assert drive(Event.START_REQUESTED, Event.STOP_REQUESTED)[1][-1] is Action.TERMINATE


def test_restart_drains_and_starts_again_without_waiting():
    life, actions = drive(
        Event.START_REQUESTED,
        Event.BECAME_READY,
        Event.RESTART_REQUESTED,
        Event.DRAIN_ENDED,
        Event.EXITED,
    )

    assert life.state is S.STARTING
    assert actions[2:] == [Action.DRAIN, Action.TERMINATE, Action.SPAWN]
    assert life.num_failures == 0


def test_start_wished_during_a_stop_follows_it():
    life, actions = drive(
        Event.START_REQUESTED,
        Event.BECAME_READY,
        Event.STOP_REQUESTED,
        Event.START_REQUESTED,
        Event.EXITED,
    )

    assert life.state is S.STARTING
    assert actions[-1] is Action.SPAWN


def test_overdue_start_is_killed_and_counts_as_failure():
    late = Cause("deadline", "not ready within 60 s")
    life, actions = drive(Event.START_REQUESTED, Event.DEADLINE_PASSED, cause=late)
    assert actions[-1] is Action.KILL

    life, action = step(life, Event.EXITED, 3.0, cause=CRASH)
    assert (life.state, action) == (S.BACKOFF, Action.SLEEP)
    assert life.last_error == late.text


def test_hung_engine_is_killed_and_comes_back_by_the_usual_rule():
    hung = Cause("hang", "hung: idle, and gave no token within 3 s, twice")
    life, _ = drive(Event.START_REQUESTED, Event.BECAME_READY)
    life, action = step(life, Event.HUNG, 2.0, cause=hung)
    assert action is Action.KILL

    life, action = step(life, Event.EXITED, 3.0, cause=CRASH)
    assert (life.state, action) == (S.BACKOFF, Action.SLEEP)
    assert life.last_error == hung.text


def test_hang_of_an_engine_that_drains_is_left_to_its_drain():
    life, _ = drive(Event.START_REQUESTED, Event.BECAME_READY, Event.STOP_REQUESTED)

    assert step(life, Event.HUNG, 2.0, cause=CRASH) == (life, None)


def test_ready_after_the_deadline_came_too_late():
    life, _ = drive(Event.START_REQUESTED, Event.DEADLINE_PASSED)

    assert step(life, Event.BECAME_READY, 2.0) == (life, None)


def test_unkillable_process_fails_the_unit_and_nothing_is_started_beside_it():
    stuck = Cause("stuck", "process 7 does not end", is_final=True)
    life, _ = drive(Event.START_REQUESTED, Event.STUCK, cause=stuck)
    assert (life.state, life.has_process) == (S.FAILED, True)

    life, action = step(life, Event.START_REQUESTED, 2.0)
    assert action is None

    life, _ = step(life, Event.EXITED, 3.0, cause=CRASH)
    assert (life.state, life.last_error) == (S.FAILED, stuck.text)
    assert step(life, Event.START_REQUESTED, 4.0)[1] is Action.SPAWN


def test_failed_unit_starts_again_when_asked_with_a_clean_record():
    life, _ = crash_until(Life())

    life, action = step(life, Event.START_REQUESTED, 100.0)

    assert action is Action.SPAWN
    assert (life.num_failures, life.starts_s, life.last_error) == (0, (100.0,), "")


def test_stop_during_backoff_ends_it():
    life, actions = drive(Event.START_REQUESTED, Event.EXITED, Event.STOP_REQUESTED)

    assert (life.state, actions[-1]) == (S.STOPPED, Action.REST)
    assert step(life, Event.BACKOFF_PASSED, 9.0) == (life, None)


@pytest.mark.parametrize(
    ("event", "state", "action"),
    [
        (Event.ADOPTED, S.STARTING, Action.PROBE),
        (Event.ADOPTED_READY, S.READY, Action.WATCH),
        (Event.ADOPTED_DRAINING, S.DRAINING, Action.DRAIN),
    ],
)
def test_adopted_process_goes_on_where_it_was(event, state, action):
    life, got = step(Life(is_wanted=True), event, 5.0)

    assert (life.state, got) == (state, action)
    assert life.has_process


@given(st.lists(st.sampled_from(list(Event)), max_size=40), st.floats(-1, 1))
def test_any_order_of_events_keeps_the_invariants(events, draw):
    """Never two processes, a wish to stop is never forgotten, an unwanted unit never starts."""
    life, now_s = Life(), 0.0
    for event in events:
        before = life
        life, action = step(life, event, now_s, cause=CRASH, draw=draw)
        now_s += 1
        if action is Action.SPAWN:
            assert life.is_wanted
            assert not before.has_process or event in (Event.EXITED, Event.REFUSED)
        if action is Action.SLEEP:
            assert 0.75 <= life.delay_s <= 75
        if life.state is S.STOPPED:
            assert not life.has_process or event is Event.START_REQUESTED
        if life.state is S.READY:
            assert life.has_process
        assert len(life.starts_s) <= 32
