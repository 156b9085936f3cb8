"""Logs of a host whose agent does not answer, read as the files they are: its last words are wanted then. IO: ssh."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynctl.core.command import Command
from dynctl.core.text import is_name
from dynctl.deploy.places import Place
from dynctl.remote.port import Remote


async def left_units(remote: Remote, place: Place) -> list[str]:
    """The units that have a log on a host, the agent first."""
    done = await remote.run(Command(("ls", "--", f"{place.root}/logs")))
    names = done.stdout.decode("utf-8", "replace").splitlines()
    found = [name.removesuffix(".log") for name in names if name.endswith(".log")]
    return sorted(filter(is_name, found), key=lambda unit: (unit != "agent", unit))


@asynccontextmanager
async def left_log(
    remote: Remote, place: Place, unit: str, tail: int, *, follow: bool = False
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Open a unit's output, in lines; like `AgentClient.logs`."""
    words = ("tail", "-n", str(tail), *(("-F",) if follow else ()), "--")
    async with remote.lines(Command((*words, f"{place.root}/logs/{unit}.log"))) as lines:
        yield (line + b"\n" async for line in lines)
