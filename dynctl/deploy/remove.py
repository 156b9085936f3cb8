"""Taking a cluster down: drain and stop every unit, stop the agents, remove dynctl's directories. IO: ssh, HTTP."""

import json
from collections.abc import Mapping, Sequence

from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.deploy.launch import start_agent, stop_agent
from dynctl.deploy.lock import hold_locks
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.places import place_of
from dynctl.deploy.reach import NoAgentError, open_agent
from dynctl.deploy.steps import Tell
from dynctl.errors import DeployError, DynctlError, MissingFileError
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote

DOWN_TIMEOUT_S = 400.0
"""Draining may take two minutes, stopping stubborn engines half a minute each."""


Left = tuple[Seat, str | None]
"""How dynctl was last started on a host, and with which bundle; None: there is none."""


async def take_down(
    inventory: Inventory,
    fleet: Fleet,
    tell: Tell,
    *,
    hosts: Sequence[str] | None = None,
    now: bool = False,
    heeds_lock: bool = False,
) -> dict[str, DynctlError | None]:
    """Leave nothing of this cluster on the hosts; a host that cannot be cleared maps to the reason.

    `heeds_lock`: nothing is cleared while somebody else changes one of these hosts, and nobody else begins to meanwhile.
    A host whose lock could not be asked is left as it is.

    Raises:
        DynctlError: exit 5 when somebody else does.
    """
    if not heeds_lock:
        return await _clear(inventory, fleet, tell, hosts, {}, now=now)

    async def find(entry: HostEntry, remote: Remote) -> Left | None:
        return await _left_behind(entry, remote, inventory)

    found = await fleet.map(find, hosts)
    seats = {name: left[0] for name, left in found.items() if isinstance(left, tuple)}
    async with hold_locks(fleet, seats, "dynctl down") as held:
        unlocked = {name: error for name, error in held.items() if isinstance(error, DynctlError)}
        return await _clear(inventory, fleet, tell, hosts, {**found, **unlocked}, now=now)


async def _clear(
    inventory: Inventory,
    fleet: Fleet,
    tell: Tell,
    hosts: Sequence[str] | None,
    found: Mapping[str, Left | DynctlError | None],
    *,
    now: bool,
) -> dict[str, DynctlError | None]:
    """Stop and remove everything; what was not found out before is looked for on each host."""

    async def clear(entry: HostEntry, remote: Remote) -> None:
        if entry.name in found:
            left = found[entry.name]
        else:
            left = await _left_behind(entry, remote, inventory)
        if isinstance(left, DynctlError):
            raise left
        if left is None:
            tell(entry.name, "down", "nothing of this cluster here")
            return
        seat, bundle = left
        await _shut_down(inventory, remote, seat, bundle, now=now)
        tell(entry.name, "engines", "stopped")
        await stop_agent(inventory, seat, remote)
        answer = await call(
            remote, seat.python, "remove", {"root": seat.place.root}, PROGRAM_TIMEOUT_S
        )
        if "error" in answer:
            raise DeployError(
                f"{entry.name}: {clean(answer['error'], 400)}",
                "end those processes, then run dynctl down again",
            )
        tell(entry.name, "down", "removed")

    return await fleet.map(clear, hosts, timeout_s=DOWN_TIMEOUT_S)


async def _left_behind(entry: HostEntry, remote: Remote, inventory: Inventory) -> Left | None:
    """How dynctl was last started on a host and with which bundle; None when it never was there.

    Where `up` stopped before the agent, or has only just begun, only our marker tells that the directory is ours: then
    there is no bundle.
    """
    place = place_of(entry, inventory, remote.home)
    try:
        launch = json.loads(await remote.get(f"{place.root}/launch.json", 65536))
    except MissingFileError:
        try:
            await remote.get(f"{place.root}/.dynctl-root", 4096)
        except MissingFileError:
            return None
        return Seat(entry, place, entry.python or "python3", "none"), None
    bundle = str(launch["bundle_path"]).rsplit("/", 1)[-1]
    return Seat(entry, place, launch["python"], launch["scope"]), bundle


async def _shut_down(
    inventory: Inventory, remote: Remote, seat: Seat, bundle: str | None, *, now: bool
) -> None:
    try:
        async with open_agent(seat.entry, remote, inventory) as client:
            await client.shutdown(now=now)
    except NoAgentError:
        # The agent is gone but engines may run on: a fresh agent adopts them, then stops them properly.
        if bundle is None:
            return
        await start_agent(inventory, seat, remote, bundle)
        async with open_agent(seat.entry, remote, inventory) as client:
            await client.shutdown(now=now)
