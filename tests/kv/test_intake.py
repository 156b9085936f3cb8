"""All that take events in share one part of each turn of the loop (K19)."""

import asyncio

import pytest

from dynctl.kv import intake as intake_module
from dynctl.kv import reader as reader_module
from dynctl.kv.events import EventBatch
from dynctl.kv.intake import TURN_S, Intake
from dynctl.kv.publisher import EventPublisher
from dynctl.kv.reader import KvEventReader


class Clock:
    """Time passes only where the work says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Turns:
    """Counts the turns of the loop, and what was done in each."""

    def __init__(self):
        self.done = [[]]
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._begin)

    def _begin(self):
        self.done.append([])
        self._next = self._loop.call_soon(self._begin)

    def note(self, what):
        self.done[-1].append(what)

    def close(self):
        self._next.cancel()

    @property
    def found(self):
        return [turn for turn in self.done if turn]


def test_a_turn_ends_when_its_time_is_up_and_the_next_goes_on_with_whoever_waits_longest():
    async def main():
        clock = Clock()
        intake, turns = Intake(clock), Turns()

        def work(name, number):
            def part():
                turns.note(name)
                clock.now_s += 0.4 * TURN_S
                if sum(turn.count(name) for turn in turns.done) < number:
                    intake.ask(part)

            return part

        for name, number in (("a", 4), ("b", 4), ("c", 1)):
            intake.ask(work(name, number))
        while sum(map(len, turns.done)) < 9:
            await asyncio.sleep(0)
        turns.close()
        assert turns.found == [["a", "b", "c"], ["a", "b", "a"], ["b", "a", "b"]]

    asyncio.run(main())


def test_the_turn_of_one_that_takes_too_long_is_over_with_it():
    async def main():
        clock = Clock()
        intake, turns = Intake(clock), Turns()

        def long():
            turns.note("long")
            clock.now_s += 10 * TURN_S

        intake.ask(long)
        intake.ask(lambda: turns.note("next"))
        while sum(map(len, turns.done)) < 2:
            await asyncio.sleep(0)
        turns.close()
        assert turns.found == [["long"], ["next"]]

    asyncio.run(main())


def test_asking_twice_is_asking_once_and_who_left_is_not_called():
    async def main():
        intake, called = Intake(), []

        def one():
            called.append("one")

        def two():
            called.append("two")

        intake.ask(one)
        intake.ask(two)
        intake.ask(one)
        intake.leave(two)
        intake.leave(two)
        for _ in range(3):
            await asyncio.sleep(0)
        assert called == ["one"]
        intake.ask(two)
        await asyncio.sleep(0)
        assert called == ["one", "two"]

    asyncio.run(main())


def test_a_part_that_fails_costs_no_other_its_turn():
    async def main():
        intake, called, told = Intake(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def wrong():
            raise ValueError("wrong")

        intake.ask(wrong)
        intake.ask(lambda: called.append("right"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert called == ["right"]
        assert [str(context["exception"]) for context in told] == ["wrong"]

    asyncio.run(main())


def test_what_is_gone_through_part_by_part_takes_turns_and_raises_what_it_raises(monkeypatch):
    monkeypatch.setattr(intake_module, "TURN_S", 0.0)  # one part a turn

    async def main():
        intake, turns = Intake(), Turns()

        def parts(name, number):
            for _ in range(number):
                turns.note(name)
                yield
            if name == "b":
                raise ValueError("wrong")

        found = await asyncio.gather(
            *(intake.through(parts(name, 2)) for name in "ab"), return_exceptions=True
        )
        turns.close()
        assert turns.found == [["a"], ["b"], ["a"], ["b"]]
        assert found[0] is None
        assert repr(found[1]) == repr(ValueError("wrong"))

    asyncio.run(main())


def test_nothing_more_is_gone_through_for_one_who_no_longer_waits(monkeypatch):
    monkeypatch.setattr(intake_module, "TURN_S", 0.0)

    async def main():
        intake, done = Intake(), []

        def parts():
            while True:
                done.append(1)
                yield

        task = asyncio.create_task(intake.through(parts()))
        while len(done) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        number = len(done)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(done) == number

    asyncio.run(main())


def test_k19_engines_that_all_have_more_do_not_add_up_in_one_turn(
    tmp_path, zmq_context, monkeypatch
):
    monkeypatch.setattr(intake_module, "TURN_S", 0.0)
    monkeypatch.setattr(reader_module, "_SLICE", 5)

    class Sink:
        def __init__(self, name, turns):
            self.name, self.turns, self.number = name, turns, 0

        def on_batch(self, seq, batch):
            self.turns.note(self.name)
            self.number += 1

        def on_end_of_read(self):
            pass

        def on_trust(self, trust):
            pass

    async def main():
        intake, turns, sinks, closables = Intake(), Turns(), [], []
        for name in "abc":
            places = f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}.re"
            publisher = EventPublisher(*places, "", context=zmq_context)
            publisher.start()
            for _ in range(50):
                publisher.publish(EventBatch(0.0, ()))
            sinks.append(Sink(name, turns))
            reader = KvEventReader(*places, "", sinks[-1], context=zmq_context, intake=intake)
            reader.start()
            closables += [reader, publisher]
        async with asyncio.timeout(60):
            while any(sink.number < 50 for sink in sinks):
                await asyncio.sleep(0)
        turns.close()
        for one in closables:
            one.close()
        assert max(map(len, turns.found)) <= 5
        assert all(len(set(turn)) == 1 for turn in turns.found)

    asyncio.run(main())
