"""`dynctl logs`: the logs of engines, routers and agents, from all hosts at once. IO: ssh, terminal."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local
from dynctl.cli.output import emit, wait_for
from dynctl.cli.session import load, select
from dynctl.core.inventory import Inventory

if TYPE_CHECKING:
    from dynctl.agents.client import AgentClient
    from dynctl.remote.fleet import Fleet

MAX_LINE_BYTES = 65536

Open = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens one unit's log."""


def command(
    units: Annotated[
        list[str] | None,
        typer.Argument(help="Units as in dynctl status, or globs; none: all of them."),
    ] = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
    tail: Annotated[
        int,
        typer.Option(
            "--tail", "-n", min=0, max=100_000, help="Last lines of each unit to begin with."
        ),
    ] = 50,
    grep: Annotated[
        str | None, typer.Option("--grep", help="Only lines that match this regular expression.")
    ] = None,
) -> None:
    """Read the logs of engines, router and agents.

    Each line begins with its unit's name. Hosts that cannot be reached are named at the end (exit 3). Where only the agent
    does not answer, the log files are read.

    Example: dynctl logs -f 'chat-decode-*'
    """
    from dynctl.errors import UsageError

    wanted = load(inventory, local=local)
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise UsageError(
            f"--grep {grep!r} is no regular expression: {error}",
            "a backslash before ( [ { + * ? . takes them as they are",
        ) from error
    wait_for(
        _logs(wanted, select(wanted, limit), units or [], follow=follow, tail=tail, pattern=pattern)
    )


async def _logs(
    wanted: Inventory,
    hosts: list[str],
    units: list[str],
    *,
    follow: bool,
    tail: int,
    pattern: "re.Pattern[str] | None",
) -> None:
    from dynctl.core.text import clean
    from dynctl.deploy.reach import NotHereError, reach_agents
    from dynctl.errors import DynctlError
    from dynctl.remote.fleet import open_fleet
    from dynctl.remote.outcomes import raise_host_failures

    async with (
        open_fleet(wanted.entries(hosts), wanted.ssh) as fleet,
        reach_agents(wanted, fleet, hosts) as clients,
    ):
        logs: list[tuple[str, Open]] = []
        unread = False
        for name, client in clients.items():
            if not isinstance(client, DynctlError):
                logs += await _of_agent(client, tail, follow=follow)
            elif left := await _of_files(wanted, fleet, name, client, tail, follow=follow):
                logs += left
            else:
                unread = unread or not isinstance(client, NotHereError)
        sources = [
            (unit, opened)
            for unit, opened in logs
            if not units or any(fnmatchcase(unit, asked) for asked in units)
        ]
        if not unread and logs:
            _refuse_unknown(units, [unit for unit, _ in logs])
        width = max((len(unit) for unit, _ in sources), default=0)

        async def show(unit: str, opened: Open) -> None:
            async with opened() as pieces:
                async for line in _lines(pieces):
                    text = clean(line.decode(errors="replace"), 4000)
                    if pattern is None or pattern.search(text):
                        emit(f"{unit:<{width}}│ {text}")

        if follow:
            async with asyncio.TaskGroup() as group:
                for unit, opened in sources:
                    group.create_task(show(unit, opened), name=f"logs:{unit}")
        else:
            for unit, opened in sources:
                await show(unit, opened)
    here = {name: c for name, c in clients.items() if not isinstance(c, NotHereError)}
    raise_host_failures(here or clients, "shown")


async def _of_agent(client: "AgentClient", tail: int, *, follow: bool) -> list[tuple[str, Open]]:
    names = ["agent", *(unit.id for unit in (await client.status()).units)]
    return [(unit, partial(client.logs, unit, tail, follow=follow)) for unit in names]


async def _of_files(
    wanted: Inventory, fleet: "Fleet", host_name: str, why: Exception, tail: int, *, follow: bool
) -> list[tuple[str, Open]]:
    """The logs of a host that is reachable and whose agent does not answer; none for other hosts."""
    from dynctl.deploy.left import left_log, left_units
    from dynctl.deploy.places import place_of
    from dynctl.deploy.reach import NoAgentError, NotHereError

    if not isinstance(why, NoAgentError) or isinstance(why, NotHereError):
        return []
    remote = fleet.remote(host_name)
    place = place_of(wanted.host(host_name), wanted, remote.home)
    return [
        (unit, partial(left_log, remote, place, unit, tail, follow=follow))
        for unit in await left_units(remote, place)
    ]


def _refuse_unknown(asked: list[str], known: list[str]) -> None:
    from dynctl.errors import UsageError
    from dynctl.inventory.problems import suggest

    missing = sorted({one for one in asked if not any(fnmatchcase(unit, one) for unit in known)})
    if missing:
        near = [hint for one in missing if (hint := suggest(one, known))]
        raise UsageError(
            f"no unit is called {', '.join(missing)}",
            near[0] if near else "dynctl status lists them",
        )


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Cut pieces of text into lines; a line that never ends is given out in parts."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest
