"""What is concluded from looks that found nothing, by the time they took; the clock is the test's."""

import asyncio
from types import SimpleNamespace

import pytest

from dynctl.agents import canary
from dynctl.agents.canary import CanarySettings, until_rank_hung, until_silent
from dynctl.core.snapshot import EngineSample
from dynctl.http1.upstream import UpstreamError

ANSWERED, REFUSED, NOTHING = ("answer", 0.1), ("", 0.0), ("", 2.0)
LATE = ("", 600.0)


class OverError(Exception):
    """The script of looks is over and nothing was concluded."""


@pytest.fixture
def looks(monkeypatch):
    """Runs a watch whose looks are a script: what comes, after how long; LATE: the sleep before was too long."""

    def run(watch, script):
        now_s, left = 0.0, list(script)

        async def sleep(seconds):
            nonlocal now_s
            now_s += seconds
            if left and left[0] is LATE:
                left.pop(0)
                now_s += 600.0

        async def ask(*_, **__):
            nonlocal now_s
            if not left:
                raise OverError
            comes, took_s = left.pop(0)
            now_s += took_s
            if not comes:
                raise UpstreamError("timeout", "nothing came")
            return comes

        monkeypatch.setattr(canary, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(canary, "asyncio", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(canary.ask, "ask", ask)
        try:
            cause = asyncio.run(watch(ask))
        except OverError:
            return None
        return cause.text, len(script) - len(left)

    return run


def relay(**limits):
    run = SimpleNamespace(at=None)
    return lambda _: until_silent(run, CanarySettings(**limits))


@pytest.mark.parametrize(("miss", "num"), [(REFUSED, 16), (NOTHING, 11)])
def test_what_answers_nothing_for_a_minute_is_hung(looks, miss, num):
    assert looks(relay(), [ANSWERED, *[miss] * 20]) == (
        "hung: gave no answer for 1m00s",
        num + 1,
    )


def test_one_answer_begins_the_minute_anew(looks):
    assert looks(relay(), [*[NOTHING] * 10, ANSWERED] * 5) is None


@pytest.mark.parametrize("stopped_s", [0.5, 5.0, 600.0])
@pytest.mark.parametrize("script", [[], [REFUSED]], ids=["healthy", "starting"])
def test_an_agent_that_was_stopped_while_it_asked_concludes_nothing(looks, script, stopped_s):
    """Its question was cut short by its own stop: by a little, which counts, or by long, which does not."""
    limits = {"look_s": 0.2, "silence_s": 3.0}
    stopped = ("", 2.0 + stopped_s)

    assert looks(relay(**limits), [ANSWERED, *script, stopped, ANSWERED] * 3) is None


def test_an_agent_that_was_stopped_while_it_slept_begins_anew(looks):
    assert looks(relay(), [*[REFUSED] * 15, LATE] * 3) is None


def test_a_single_look_ends_nothing_however_short_the_limit(looks):
    limits = {"look_s": 0.1, "silence_s": 0.5}

    assert looks(relay(**limits), [NOTHING, NOTHING, ANSWERED] * 3) is None
    assert looks(relay(**limits), [NOTHING] * 4) == ("hung: gave no answer for 500 ms", 3)


def engine(**limits):
    program = SimpleNamespace(wish=SimpleNamespace(device="gpu"))

    def watch(ask):
        async def look(_):
            return EngineSample("e0", "i", running=1.0), await ask()

        program.look = look
        return until_rank_hung(program, SimpleNamespace(at=None), CanarySettings(**limits))

    return watch


def test_a_busy_engine_without_a_step_is_hung_after_timely_looks_only(looks):
    same = ("7 steps", 1.0)

    assert looks(engine(), [same] * 30) == ("hung: made no step for 2m00s though requests run", 26)
    assert looks(engine(), [*[same] * 20, ("7 steps", 200.0)] * 3) is None
    assert looks(engine(), [*[same] * 20, ("8 steps", 1.0)] * 2) is None
