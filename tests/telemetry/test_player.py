"""Going through a recording: what is shown at a place is what `top` showed there."""

import asyncio
import itertools

import pytest

from dynctl.core.deployment import EngineState
from dynctl.core.workload import Slo
from dynctl.telemetry import player as player_module
from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.player import Player
from dynctl.telemetry.tape import Tape
from dynctl.telemetry.traces import Told

NUM = 200


def course(snapshot, num=NUM):
    """Ten requests a second, slow ones from 50 to 80; the engine is lost at 120."""
    taken = []
    for tick in range(1, num + 1):
        num_slow = 5 * max(0, min(tick, 80) - 50)
        state = EngineState.BACKOFF if tick >= 120 else EngineState.READY
        taken.append(snapshot(tick, num_fast=10 * tick - num_slow, num_slow=num_slow, state=state))
    return taken


@pytest.fixture
def tape(record, snapshot):
    def answers(recorder, tick):
        if tick % 5 == 0:
            told = Told(f"r{tick}", "whole", "chat-0", 1.7e9 + tick, outcome="done")
            recorder.take_answers(Answers((told,), {"r": {"requests": float(tick)}}))

    with Tape(record(course(snapshot), between=answers)) as found:
        yield found


def live(snapshot, until):
    """What `top` showed after so many snapshots."""
    ledger = Ledger({"chat": Slo(500.0)})
    for at, one in enumerate(course(snapshot)[:until]):
        overview = ledger.take(one, float(at))
    return overview, ledger


def texts(ledger):
    return [(event.unix_s, event.text) for event in ledger.events.newest(50)]


def first(looks):
    return next(iter(looks))


@pytest.mark.parametrize("place", [1, 30, 75, 130, NUM])
def test_a_look_anywhere_is_what_was_shown_live(tape, snapshot, place):
    look = first(Player(tape, at_s=place - 1.0).all_looks())
    overview, ledger = live(snapshot, place)

    assert look.overview == overview
    assert texts(look.ledger) == texts(ledger)
    for key in ("deployment:chat:ttft_p99", "deployment:chat:requests_s"):
        assert look.ledger.trends.of(key) == ledger.trends.of(key)


def test_all_looks_go_to_the_end(tape, snapshot):
    looks = list(Player(tape, at_s=149.5).all_looks())

    assert [look.overview.taken_unix_s for look in looks] == [
        1.7e9 + tick for tick in range(151, NUM + 1)
    ]


def moved(tape, *orders, at_s=100.0, **options):
    """Hold at a place, give orders one after another, and tell the time of each look that follows."""

    async def main():
        player = Player(tape, at_s=at_s, **options)
        player.toggle()
        looks = player.looks()
        look = await anext(looks)
        found = [look]
        for order in orders:
            order(player)
            found.append(await anext(looks))
        await looks.aclose()
        return [look.overview.taken_unix_s - 1.7e9 for look in found], found, player

    return asyncio.run(main())


def test_steps_and_jumps_land_where_they_should(tape):
    times, _, player = moved(
        tape,
        lambda p: p.step(1),
        lambda p: p.step(-1),
        lambda p: p.step(-1),
        lambda p: p.jump(10.0),
        lambda p: p.jump(-60.0),
        lambda p: p.jump(-1e6),
        lambda p: p.step(-1),
        lambda p: p.jump(1e6),
        lambda p: p.step(1),
    )

    assert times == [101, 102, 101, 100, 110, 50, 1, 1, NUM, NUM]
    assert not player.playing.is_playing
    assert (player.playing.at_s, player.playing.until_s) == (NUM - 1, NUM - 1)


def test_orders_that_come_faster_than_they_are_followed_add_up(tape):
    def many(player):
        for _ in range(5):
            player.jump(-10.0)
        player.step(-1)

    assert moved(tape, many)[0] == [101, 50]


@pytest.mark.parametrize("to", [-40.0, 40.0, 70.0])
def test_after_a_jump_everything_is_as_if_one_had_watched_all_along(tape, snapshot, to):
    _, looks, _ = moved(tape, lambda p: p.jump(to))
    overview, ledger = live(snapshot, int(101 + to))

    assert looks[-1].overview == overview
    assert texts(looks[-1].ledger) == texts(ledger)


def test_what_is_far_past_is_read_in_part_and_figures_are_the_same(tape, snapshot, monkeypatch):
    monkeypatch.setattr(player_module, "WHOLE_S", 70.0)
    monkeypatch.setattr(player_module, "PAST_S", 150.0)
    read = []
    entry = tape.entry
    monkeypatch.setattr(tape, "entry", lambda number: (read.append(number), entry(number))[1])
    look = first(Player(tape, at_s=190.0).all_looks())
    overview, _ = live(snapshot, 191)

    assert look.overview == overview
    assert len(read) < 110
    assert look.ledger.trends.of("deployment:chat:requests_s")[-70:] == (10.0,) * 70


def test_it_plays_at_its_speed_and_holds_at_the_end(tape, monkeypatch):
    monkeypatch.setattr(player_module, "LEAST_WAIT_S", 0.001)

    async def main():
        player = Player(tape, at_s=150.0, speed=64.0)
        found = []
        async for look in player.looks():
            found.append(look.overview.taken_unix_s - 1.7e9)
            if found[-1] == NUM:
                break
        return found, player.playing

    found, playing = asyncio.run(main())
    assert found[0] == 151
    assert all(a < b for a, b in itertools.pairwise(found))
    assert not playing.is_playing


def test_a_gap_in_the_recording_is_not_waited_for(record, snapshot, monkeypatch):
    monkeypatch.setattr(player_module, "GAP_S", 0.05)
    path = record([snapshot(1), snapshot(2), snapshot(3)], step_s=36_000.0)

    async def main(tape):
        looks = Player(tape).looks()
        return [(await anext(looks)).overview.taken_unix_s for _ in range(3)]

    with Tape(path) as tape:
        assert asyncio.run(main(tape)) == [1.7e9 + 1, 1.7e9 + 2, 1.7e9 + 3]


def test_from_the_end_it_plays_from_the_beginning(tape):
    times, _, player = moved(tape, lambda p: p.jump(1e6), lambda p: p.toggle())

    assert times[-1] == 1
    assert player.playing.is_playing


def test_the_speed_changes_within_its_limits(tape):
    player = Player(tape)
    speeds = []
    for steps in (1, 1, -1, 20, -20):
        player.change_speed(steps)
        speeds.append(player.playing.speed)

    assert speeds == [2.0, 4.0, 2.0, 64.0, 0.25]


def test_questions_are_answered_as_they_were_then_and_logs_are_said_to_be_missing(tape):
    _, looks, player = moved(tape, lambda p: p.jump(-50.0))
    asks = Asks(num_decisions=10, hits=True, logs=(("h", "chat-0"),), commands=(("h", "chat-0"),))
    answers = player.answer(asks)

    assert answers.hits == {"r": {"requests": 50.0}}
    assert answers.logs == {}
    assert "prompts" in answers.failures["h", "chat-0"]
    assert {trace.id for trace in looks[-1].ledger.requests.newest()} == {
        f"r{tick}" for tick in range(5, 55, 5)
    }


def test_going_back_a_little_reads_little(tape, snapshot, monkeypatch):
    read = []
    entry = tape.entry
    monkeypatch.setattr(tape, "entry", lambda number: (read.append(number), entry(number))[1])

    def counted(order):
        def give(player):
            read.clear()
            order(player)

        return give

    nums = []
    for order in (lambda p: p.step(-1), lambda p: p.jump(-10.0), lambda p: p.jump(-50.0)):
        times, looks, _ = moved(tape, counted(order), at_s=190.0)
        nums.append(len(read))
        overview, ledger = live(snapshot, int(times[-1]))
        assert looks[-1].overview == overview
        assert texts(looks[-1].ledger) == texts(ledger)
        assert looks[-1].ledger.trends.of("deployment:chat:ttft_p99") == ledger.trends.of(
            "deployment:chat:ttft_p99"
        )
    # There is a snapshot a second and something asked every fifth.
    assert max(nums) <= 40, nums


def test_what_is_kept_to_come_back_to_is_not_changed_by_going_on(tape, snapshot):
    orders = [lambda p: p.jump(-20.0), lambda p: p.jump(30.0), lambda p: p.jump(-25.0)] * 4
    times, looks, player = moved(tape, *orders, at_s=150.0)

    assert len(player._marks) <= player_module.MAX_MARKS
    for at, look in zip(times, looks, strict=True):
        if at == times[-1]:
            continue
        overview, _ = live(snapshot, int(at))
        assert look.overview == overview
    overview, ledger = live(snapshot, int(times[-1]))
    assert texts(looks[-1].ledger) == texts(ledger)
    assert looks[-1].ledger.trends.of("engine:chat-0:running") == ledger.trends.of(
        "engine:chat-0:running"
    )


def test_marks_are_bounded_and_the_nearest_stay(tape, monkeypatch):
    monkeypatch.setattr(player_module, "MARK_S", 5.0)
    monkeypatch.setattr(player_module, "MAX_MARKS", 4)
    _, _, player = moved(tape, *[lambda p: p.jump(7.0)] * 12, at_s=50.0)
    kept = [tape.times_s[tape.snapshots[mark.at]] for mark in player._marks]

    assert len(kept) == 4
    assert min(kept) > player.playing.at_s - 30.0


def test_events_are_gone_to_one_after_another_and_back(tape, snapshot):
    _, ledger = live(snapshot, NUM)
    events = sorted({event.unix_s - 1.7e9 for event in ledger.events.newest(50)})
    forward, back = (lambda p: p.hunt()), (lambda p: p.hunt_back())
    orders = [*[forward] * (len(events) + 1), *[back] * len(events)]
    times, _, player = moved(tape, *orders, at_s=10.0)

    assert len(events) >= 3
    assert times == [11, *events, NUM, *events[::-1]]
    assert not player.playing.is_playing
    assert not player.playing.is_seeking


def test_before_the_first_event_there_is_none_to_go_back_to(tape):
    times, _, _ = moved(tape, lambda p: (p.hunt_back(), p.step(1)), at_s=10.0)

    assert times == [11, 12]


def test_a_hunt_is_given_up_when_somebody_wants_to_be_elsewhere(tape, monkeypatch):
    monkeypatch.setattr(player_module, "BREATH_S", 0.0)

    def hunt_then_step_back(player):
        player.hunt()
        asyncio.get_running_loop().call_soon(lambda: player.jump(-5.0))

    times, _, player = moved(tape, hunt_then_step_back, lambda p: None, at_s=20.0)

    assert 21 <= times[1] < 60
    assert times[2] == max(1, times[1] - 5)
    assert not player.playing.is_seeking
