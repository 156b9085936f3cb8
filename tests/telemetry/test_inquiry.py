"""What is asked only while somebody looks: answers, and causes where there are none."""

import asyncio
import json

import pytest

from dynctl.core.snapshot import HostSnapshot, RouterSample
from dynctl.errors import ConnectError
from dynctl.telemetry import inquiry
from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.inquiry import inquire
from dynctl.telemetry.watch import watch

DECISION = {"request_id": "r", "leg": "whole", "engine": "e", "unix_s": 1.0}


class Source:
    """One host; answers by target or unit, raises errors, hangs on None."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    async def sample(self):
        return HostSnapshot("a", routers=(RouterSample("r0", "chat"),))

    async def ask_router(self, unit_id, target):
        self.asked.append((unit_id, target))
        return await self._answer(target.split("?", maxsplit=1)[0].strip("/"))

    async def log_lines(self, unit_id, count):
        self.asked.append((unit_id, count))
        return await self._answer("log")

    async def command(self, unit_id):
        self.asked.append((unit_id, "command"))
        return await self._answer("command")

    async def _answer(self, what):
        answer = self.answers[what]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked(asks, source):
    return asyncio.run(inquire(asks, {"r0": source}, {"a": source}))


def test_nothing_is_asked_that_no_screen_needs():
    source = Source()

    assert asked(Asks(), source) == Answers()
    assert source.asked == []


def test_decisions_hits_and_logs_are_asked_at_once():
    source = Source(
        decisions=json.dumps([DECISION]).encode(),
        hits=b'{"requests": 3, "text": "new", "probe_ratio": null}',
        log=["x"],
        command="vllm serve",
    )
    unit = ("a", "e0")
    found = asked(Asks(7, hits=True, logs=(unit,), commands=(unit,)), source)

    assert set(source.asked) == {
        ("r0", "/decisions?limit=7"),
        ("r0", "/hits"),
        ("e0", 200),
        ("e0", "command"),
    }
    assert found.commands == {unit: "vllm serve"}
    assert [one.engine for one in found.decisions] == ["e"]
    assert found.hits == {"r0": {"requests": 3.0}}
    assert found.logs == {("a", "e0"): ("x",)}
    assert not found.failures


def test_what_fails_is_told_with_its_cause_and_the_rest_is_there():
    source = Source(decisions=ConnectError("gone"), hits=b"[]", log=["x"])
    found = asked(Asks(7, logs=(("a", "e0"), ("b", "e1"))), source)

    assert found.failures == {"r0": "gone", ("b", "e1"): "b cannot be asked"}
    assert found.logs == {("a", "e0"): ("x",)}
    assert "not understood" in asked(Asks(hits=True), source).failures["r0"]


@pytest.mark.parametrize(
    "body", [b'{"requests": 1' + b"0" * 400 + b"}", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"]
)  # fmt: skip
def test_hits_that_cannot_be_read_are_a_failure_like_any_other(body):
    found = asked(Asks(hits=True), Source(hits=body))

    assert found.hits == {}
    assert "not understood" in found.failures["r0"]


def test_a_router_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(inquiry, "ANSWER_TIMEOUT_S", 0.01)

    assert asked(Asks(hits=True), Source(hits=None)).failures == {"r0": "no answer within 0 s"}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_watch_asks_the_hosts_that_answered(is_lost):
    source = Source(hits=b'{"requests": 3}', log=["x"])
    sources = {"a": ConnectError("a: lost") if is_lost else source}

    async def main():
        async with watch("prod", sources, 0.05) as watched:
            await anext(aiter(watched))
            return await watched.answer(Asks(hits=True, logs=(("a", "e0"),)))

    found = asyncio.run(main())

    assert (found.hits == {}) is is_lost
    assert (found.logs == {("a", "e0"): ("x",)}) is not is_lost
    assert (("a", "e0") in found.failures) is is_lost


def test_a_watch_asks_no_host_that_was_lost_after_it_answered():
    class Leaving(Source):
        is_gone = False

        async def sample(self):
            if self.is_gone:
                raise ConnectError("a: lost")
            return await super().sample()

    source = Leaving(hits=b"{}", log=["x"])

    async def main():
        async with watch("prod", {"a": source}, 0.01) as watched:
            snapshots = aiter(watched)
            await anext(snapshots)
            source.is_gone = True
            while not (await anext(snapshots)).hosts[0].error:
                pass
            return await watched.answer(Asks(hits=True, logs=(("a", "e0"),)))

    assert asyncio.run(main()).failures == {("a", "e0"): "a cannot be asked"}
    assert source.asked == []
