"""One test between two hosts: a listener on the far one, a measuring program on the near one. IO: hosts, through Remotes."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from dynctl.core.hardware import Host
from dynctl.core.text import clean
from dynctl.errors import CommandError, DynctlError, UnknownOutcomeError
from dynctl.linktest.answers import Line, parse
from dynctl.linktest.onhost import program
from dynctl.remote.port import Remote

_START_TIMEOUT_S = 20.0
_LAST_WORDS_TIMEOUT_S = 2.0
_SLACK_S = 25.0
"""Connecting, proving, starting interpreters on busy hosts."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A host as a link test uses it."""

    host: Host
    remote: Remote
    python: str
    """Interpreter for the program that runs now: the host's own for TCP, the engine's for NIXL."""
    env: tuple[tuple[str, str], ...] = ()
    wish: Mapping[str, object] = field(default_factory=dict)
    """What is asked of this end alone, e.g. which GPU."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The range a listener may take a port from."""

    first: int
    last: int


async def run_pair(
    name: str, near: Seat, far: Seat, ports: Ports, wish: Mapping[str, object], expected_s: float
) -> bytes:
    """Run a program on both hosts and return the last line of the near one.

    Raises:
        DynctlError: when either end could not do it; the message names the end and the cause.
    """
    limit_s = expected_s + _SLACK_S
    token = secrets.token_hex(32)
    common = {**wish, "token": token, "deadline_s": int(limit_s)}
    listen = {
        **common,
        **far.wish,
        "role": "listen",
        "address": far.host.data_address,
        "first_port": ports.first,
        "last_port": ports.last,
    }
    command = program(name, far.python, listen, _START_TIMEOUT_S, far.env)
    try:
        async with asyncio.timeout(limit_s + _START_TIMEOUT_S):
            async with far.remote.lines(command) as lines:
                port = await _port(far, lines)
                connect = {
                    **common,
                    **near.wish,
                    "role": "connect",
                    "address": far.host.data_address,
                    "port": port,
                    "data_address": near.host.data_address,
                }
                return await _measure(name, near, far, connect, limit_s, lines)
    except TimeoutError as error:
        raise UnknownOutcomeError(
            f"{near.host.name} and {far.host.name} were not done within {limit_s:.0f} s"
        ) from error


async def _port(far: Seat, lines: AsyncIterator[bytes]) -> int:
    name = far.host.name
    async with asyncio.timeout(_START_TIMEOUT_S):
        line = await anext(lines, None)
    if line is None:
        raise CommandError(f"{name}: the listener ended without a word")
    said = parse(name, line, Line)
    if said.port is None:
        raise CommandError(f"{name}: {clean(said.error or 'the listener told no port', 300)}")
    return said.port


async def _measure(
    name: str,
    near: Seat,
    far: Seat,
    wish: Mapping[str, object],
    limit_s: float,
    lines: AsyncIterator[bytes],
) -> bytes:
    done = await near.remote.run(program(name, near.python, wish, limit_s, near.env))
    answer = done.stdout.strip().splitlines()[-1:]
    if not done.is_ok or not answer:
        said = clean((done.stderr or done.stdout).decode(errors="replace")[-400:])
        said = said or "nothing was said"
        raise CommandError(
            f"{near.host.name}: the link test ended with status {done.exit_status}: {said}"
        )
    error = parse(near.host.name, answer[0], Line).error
    if error is None:
        return answer[0]
    message = f"{near.host.name} to {far.host.name}: {clean(error, 300)}"
    other = await _last_words(far, lines)
    raise CommandError(f"{message}; {far.host.name}: {other}" if other else message)


async def _last_words(far: Seat, lines: AsyncIterator[bytes]) -> str:
    """What the listener says of the failure, when it says something soon."""
    try:
        async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
            line = await anext(lines, None)
            return "" if line is None else clean(parse(far.host.name, line, Line).error or "", 200)
    except TimeoutError:
        return ""
    except DynctlError as error:
        return error.message
