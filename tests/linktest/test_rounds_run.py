"""The runner over scripted hosts: rounds in order, no host busy twice, errors of SSH as failed pairs."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import ClassVar

import pytest

from dynctl.errors import CommandError, ConnectError, UnknownOutcomeError
from dynctl.linktest.pair import Seat
from dynctl.linktest.run import QUICK, measure, tcp
from dynctl.remote.fake import FakeRemote

PYTHON = "/usr/bin/python3"
TRIP = {"message_bytes": 64, "num_messages": 9, "p50_s": 1e-5, "p95_s": 1e-5, "p99_s": 1e-5, "jitter_s": 0.0}  # fmt: skip
POINT = {"message_bytes": 65536, "num_streams": 1, "num_messages": 9, "bytes_s": 1e9, "p50_s": 1e-4, "p95_s": 1e-4, "p99_s": 1e-4}  # fmt: skip
END = {"end": {"address": "10.0.0.1"}, "retransmits": [0, 0]}
ANSWER = json.dumps(
    {
        "round_trip": TRIP,
        "points": [{**POINT, "direction": d} for d in ("out", "in")],
        "here": END,
        "there": END,
    }
).encode()


class Watched(FakeRemote):
    """Counts how many tests a host is in."""

    busy: ClassVar[Counter] = Counter()

    def __init__(self, name, answer=ANSWER, listening=b'{"port": 18999}\n'):
        super().__init__(name, {PYTHON: answer})
        self.listening = listening

    @contextlib.contextmanager
    def _used(self):
        self.busy[self.name] += 1
        assert self.busy[self.name] == 1
        try:
            yield
        finally:
            self.busy[self.name] -= 1

    async def run(self, command):
        with self._used():
            await asyncio.sleep(0.001)
            return await super().run(command)

    @contextlib.asynccontextmanager
    async def lines(self, command):
        self.commands.append(command)

        async def each():
            for line in self.listening.splitlines():
                yield line

        with self._used():
            yield each()


@pytest.fixture
def scripted(make_seat):
    def make(*remotes):
        return {r.name: make_seat(r.name, "10.0.0.1", r, python=PYTHON) for r in remotes}

    return make


def test_64_hosts_take_63_rounds_and_no_host_is_in_two_tests_at_once(scripted, ports):
    seats = scripted(*(Watched(f"h{i}") for i in range(64)))
    told = []

    links = asyncio.run(
        measure(
            list(seats),
            [tcp(seats)],
            QUICK,
            ports,
            lambda n, of, made: told.append((n, of, len(made))),
        )
    )

    assert len({(m.source_name, m.target_name) for m in links}) == len(links) == 64 * 63
    assert all(m.error is None for m in links)
    assert told == [(n, 63, 64) for n in range(1, 64)]


def test_tokens_are_fresh_and_on_stdin_alone(scripted, ports):
    remotes = [Watched(name) for name in ("a", "b", "c")]

    asyncio.run(measure(["a", "b", "c"], [tcp(scripted(*remotes))], QUICK, ports))

    commands = [command for remote in remotes for command in remote.commands]
    tokens = Counter(json.loads(command.stdin)["token"] for command in commands)
    assert sorted(tokens.values()) == [2, 2, 2]
    for command in commands:
        assert json.loads(command.stdin)["token"] not in " ".join(command.argv)
        assert command.env == ()


@pytest.mark.parametrize(
    ("near", "far", "error"),
    [
        ({"answer": ConnectError("a: link lost")}, {}, "a: link lost"),
        ({"answer": UnknownOutcomeError("a: link lost")}, {}, "a: link lost"),
        ({"answer": b""}, {}, "a: the link test ended with status 0: nothing was said"),
        ({"answer": b"Killed\n"}, {}, "a: the link test's answer cannot be read: "),
        ({"answer": b'{"error": "refused"}\n'}, {}, "a to b: refused"),
        (
            {"answer": b'{"error": "closed"}\n'},
            {"listening": b'{"port": 5}\n{"error": "out of memory"}\n'},
            "a to b: closed; b: out of memory",
        ),
        ({}, {"listening": b""}, "b: the listener ended without a word"),
        ({}, {"listening": b'{"error": "no port"}\n'}, "b: no port"),
        ({}, {"listening": b'{"port": 70000}\n'}, "b: the link test's answer cannot be read: "),
        ({}, {"listening": b"motd\n"}, "b: the link test's answer cannot be read: "),
    ],
)
def test_whatever_an_end_does_becomes_a_failed_pair_with_its_cause(
    scripted, ports, near, far, error
):
    seats = scripted(Watched("a", **near), Watched("b", **far))

    links = asyncio.run(measure(["a", "b"], [tcp(seats)], QUICK, ports))

    assert len(links) == 2
    assert all(m.error.startswith(error) for m in links)
    assert all(m.points == () for m in links)


def test_a_hostile_answer_is_cleaned_and_bounded(scripted, ports):
    said = json.dumps({"error": "\x1b[2Jgone\n" + "x" * 300}).encode()
    seats = scripted(Watched("a", answer=said), Watched("b"))

    links = asyncio.run(measure(["a", "b"], [tcp(seats)], QUICK, ports))

    assert "\x1b" not in links[0].error
    assert "\n" not in links[0].error
    assert len(links[0].error) <= 400


def test_an_error_of_the_listener_is_not_needed_to_name_the_failure(scripted, ports):
    class Broken(Watched):
        @contextlib.asynccontextmanager
        async def lines(self, command):
            raise CommandError("b: cannot start")
            yield

    seats: dict[str, Seat] = scripted(Watched("a"), Broken("b"))

    links = asyncio.run(measure(["a", "b"], [tcp(seats)], QUICK, ports))

    assert [m.error for m in links] == ["b: cannot start"] * 2
