"""Asks what is asked only while somebody looks at it: routers' decisions and hit sums, the ends of logs.

Not here: what is asked all the time (`watch`), what decisions say (`traces`). IO: HTTP through the given sources.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from dynctl.errors import DynctlError
from dynctl.telemetry.answers import Answers, Asks, UnitName
from dynctl.telemetry.hit_sums import sums
from dynctl.telemetry.traces import Told, told

ANSWER_TIMEOUT_S = 5.0
NUM_LINES = 200
"""Of a log, at each look."""


class UnitSource(Protocol):
    """Something that can be asked about the units of one host, such as `SteadyAgent`."""

    async def ask_router(self, unit_id: str, target: str) -> bytes:
        """Return what a router's admin socket answers; raises DynctlError when it cannot be asked."""
        ...

    async def command(self, unit_id: str) -> str:
        """Return what a unit was started with, empty when that is not known; raises DynctlError when nobody can be asked."""
        ...

    async def log_lines(self, unit_id: str, count: int) -> list[str]:
        """Return the last lines of a unit's output; raises DynctlError when they cannot be read."""
        ...


async def inquire(
    asks: Asks, routers: Mapping[str, UnitSource], hosts: Mapping[str, UnitSource]
) -> Answers:
    """Ask everything at once; `routers` and `hosts` say by name who can be asked about them."""
    decisions: list[Told] = []
    hits: dict[str, Mapping[str, float]] = {}
    logs: dict[UnitName, tuple[str, ...]] = {}
    commands: dict[UnitName, str] = {}
    failures: dict[str | UnitName, str] = {}

    async def ask_decisions(name: str, source: UnitSource) -> None:
        target = f"/decisions?limit={asks.num_decisions}"
        decisions.extend(told(await source.ask_router(name, target)))

    async def ask_hits(name: str, source: UnitSource) -> None:
        hits[name] = sums(await source.ask_router(name, "/hits"))

    async def ask_log(name: UnitName, source: UnitSource) -> None:
        logs[name] = tuple(await source.log_lines(name[1], NUM_LINES))

    async def ask_command(name: UnitName, source: UnitSource) -> None:
        commands[name] = await source.command(name[1])

    async with asyncio.TaskGroup() as group:

        def ask(name: str | UnitName, asked: Coroutine[Any, Any, None]) -> None:
            group.create_task(_tried(name, asked, failures), name=f"ask:{name}")

        for router, source in routers.items():
            if asks.num_decisions:
                ask(router, ask_decisions(router, source))
            if asks.hits:
                ask(router, ask_hits(router, source))
        for name, how in (
            *((unit, ask_log) for unit in asks.logs),
            *((unit, ask_command) for unit in asks.commands),
        ):
            if name[0] in hosts:
                ask(name, how(name, hosts[name[0]]))
            else:
                failures[name] = f"{name[0]} cannot be asked"
    return Answers(tuple(decisions), hits, logs, commands, failures)


async def _tried(
    name: str | UnitName, asked: Coroutine[Any, Any, None], failures: dict[str | UnitName, str]
) -> None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await asked
    except TimeoutError:
        failures[name] = f"no answer within {ANSWER_TIMEOUT_S:.0f} s"
    except DynctlError as error:
        failures[name] = error.message
