"""What is really on the hosts: bundles, files and agent. IO: ssh, HTTP."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynctl.core.command import Command
from dynctl.core.hardware import Host
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.deploy.onhost import program
from dynctl.deploy.places import Place, place_of, scope_of
from dynctl.deploy.reach import NoAgentError, open_agent
from dynctl.deploy.steps import HostState
from dynctl.errors import CommandError, DynctlError
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote

PROGRAM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Seat:
    """One host as a deploy uses it: where things lie, which Python runs them, how the agent is kept alive."""

    entry: HostEntry
    place: Place
    python: str
    scope: str


def seats_of(inventory: Inventory, fleet: Fleet, hosts: Sequence[Host]) -> dict[str, Seat]:
    """Work out each host's seat from discovered facts; hosts without Python have none."""
    seats = {}
    for host in hosts:
        if host.python is None:
            continue
        entry = inventory.host(host.name)
        place = place_of(entry, inventory, fleet.remote(host.name).home)
        seats[host.name] = Seat(entry, place, host.python, scope_of(entry, host))
    return seats


async def call(
    remote: Remote, seat_python: str, name: str, arguments: Mapping[str, Any], timeout_s: float
) -> Any:  # noqa: ANN401 - each program has its own answer
    """Run one of the on-host programs and return its JSON answer.

    Raises:
        CommandError: when it failed; says what it printed last.
        UnknownOutcomeError: when the link was lost while it ran.
    """
    command: Command = program(name, seat_python, msgspec.json.encode(arguments), timeout_s)
    done = await remote.run(command)
    answer = _parse(done.stdout) if done.is_ok else None
    if answer is None:
        last = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-1:] or [
            "no output"
        ]
        raise CommandError(
            f"{remote.name}: {name} ended with {done.exit_status}: {clean(last[0])}",
            f"ssh {remote.name} and look",
        )
    return answer


def _parse(stdout: bytes) -> Any:  # noqa: ANN401 - as above
    try:
        return json.loads(stdout)
    except ValueError:
        return None


async def observe(
    inventory: Inventory,
    fleet: Fleet,
    seats: Mapping[str, Seat],
    files: Mapping[str, Sequence[str]],
) -> dict[str, HostState | DynctlError]:
    """Look at every seat at once. `files` names per host the paths whose digests are wanted, relative to the root."""

    async def look(entry: HostEntry, remote: Remote) -> HostState:
        seat = seats[entry.name]
        wish = {"root": seat.place.root, "files": list(files.get(entry.name, ()))}
        facts = await call(remote, seat.python, "observe", wish, PROGRAM_TIMEOUT_S)
        status = None
        if facts["launch"]:
            try:
                async with open_agent(entry, remote, inventory) as client:
                    status = await client.status()
            except NoAgentError:
                status = None
        return HostState(
            entry.name,
            bundles=tuple(facts["bundles"]),
            files=tuple(facts["files"].items()),
            launch=tuple(facts["launch"].items()),
            status=status,
        )

    return await fleet.map(look, list(seats))
