"""`dynctl logs`: the logs of engines, routers and agents, from all hosts at once. IO: ssh, terminal."""

import asyncio
import re
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local
from dynctl.cli.output import emit, wait_for
from dynctl.cli.session import load, raise_host_failures, select
from dynctl.core.inventory import Inventory

if TYPE_CHECKING:
    from dynctl.agents.client import AgentClient

MAX_LINE_BYTES = 65536


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

    Each line begins with its unit's name. Hosts that cannot be reached are named at the end (exit 3).

    Example: dynctl logs -f 'chat-decode-*'
    """
    from dynctl.errors import UsageError

    wanted = load(inventory, local=local)
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise UsageError(f"--grep {grep!r} is no regular expression: {error}") from error
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
    from dynctl.agents.client import AgentClient
    from dynctl.core.text import clean
    from dynctl.deploy.reach import reach_agents
    from dynctl.errors import DynctlError, UsageError
    from dynctl.inventory.problems import suggest
    from dynctl.remote.fleet import open_fleet

    async with (
        open_fleet(wanted.entries(hosts), wanted.ssh) as fleet,
        reach_agents(wanted, fleet, hosts) as clients,
    ):
        reached = {
            name: client for name, client in clients.items() if not isinstance(client, DynctlError)
        }
        sources: list[tuple[str, AgentClient]] = []
        for client in reached.values():
            sources += [
                (unit, client)
                for unit in await _units(client)
                if not units or any(fnmatchcase(unit, pattern) for pattern in units)
            ]
        missing = {p for p in units if not any(fnmatchcase(unit, p) for unit, _ in sources)}
        if missing and not any(isinstance(c, DynctlError) for c in clients.values()):
            known = [unit for client in reached.values() for unit in await _units(client)]
            near = [hint for name in sorted(missing) if (hint := suggest(name, known))]
            raise UsageError(
                f"no unit is called {', '.join(sorted(missing))}",
                near[0] if near else "dynctl status lists them",
            )
        width = max((len(unit) for unit, _ in sources), default=0)

        async def show(unit: str, client: AgentClient) -> None:
            async with client.logs(unit, tail=tail, follow=follow) as pieces:
                async for line in _lines(pieces):
                    text = clean(line.decode(errors="replace"), 4000)
                    if pattern is None or pattern.search(text):
                        emit(f"{unit:<{width}}│ {text}")

        if follow:
            async with asyncio.TaskGroup() as group:
                for unit, client in sources:
                    group.create_task(show(unit, client), name=f"logs:{unit}")
        else:
            for unit, client in sources:
                await show(unit, client)
    raise_host_failures(
        {name: c if isinstance(c, DynctlError) else None for name, c in clients.items()}, "shown"
    )


async def _units(client: "AgentClient") -> list[str]:
    return ["agent", *(unit.id for unit in (await client.status()).units)]


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
