"""Taking a cluster down: drain and stop every unit, stop the agents, remove dynctl's directories. IO: ssh, HTTP."""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack

from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.deploy.launch import start_agent, stop_agent
from dynctl.deploy.lock import hold_lock, refuse_held
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.places import place_of
from dynctl.deploy.reach import NoAgentError, open_agent
from dynctl.deploy.steps import Tell
from dynctl.errors import CommandError, DeployError, DynctlError, ExitCode
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote

DOWN_TIMEOUT_S = 400.0
"""Draining may take two minutes, stopping stubborn engines half a minute each."""


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

    `heeds_lock`: nothing is cleared while somebody else changes the cluster, and nobody else begins to meanwhile. All
    hosts of the fleet are asked, also those that keep what they have: the lock may lie on any of them. One that lies
    on a host that cannot be reached is not seen.
    """
    if not heeds_lock:
        return await _clear(inventory, fleet, tell, hosts, now=now)

    async def find(entry: HostEntry, remote: Remote) -> tuple[Seat, str | None] | None:
        return await _left_behind(entry, remote, inventory)

    found = await fleet.map(find)
    seats = {name: left[0] for name, left in found.items() if isinstance(left, tuple)}

    async def look(entry: HostEntry, remote: Remote) -> None:
        # Also where nothing is yet: an `up` that has only just begun has its lock there.
        place = place_of(entry, inventory, remote.home)
        bare = Seat(entry, place, entry.python or "python3", "none")
        await refuse_held(remote, seats.get(entry.name, bare))

    async with AsyncExitStack() as stack:
        # Where `up` has it too: on the first host of those it was told of.
        first = min(seats, default=None)
        if first is not None:
            try:
                lock = hold_lock(fleet.remote(first), seats[first], "dynctl down")
                await stack.enter_async_context(lock)
            except DynctlError as error:
                return {first: error}
        looks = await fleet.map(look, [name for name in found if name != first])
        held = {name: e for name, e in looks.items() if e and e.exit_code is ExitCode.LOCKED}
        if held:
            return {**held}
        return await _clear(inventory, fleet, tell, hosts, now=now, last=first)


async def _clear(
    inventory: Inventory,
    fleet: Fleet,
    tell: Tell,
    hosts: Sequence[str] | None,
    *,
    now: bool,
    last: str | None = None,
) -> dict[str, DynctlError | None]:
    """Stop and remove everything; the directory of the host `last`, which has the lock in it, after all others."""
    stopped: list[str] = []

    async def clear(entry: HostEntry, remote: Remote) -> None:
        left = await _left_behind(entry, remote, inventory)
        if left is None:
            tell(entry.name, "down", "nothing of this cluster here")
            return
        seat, bundle = left
        await _shut_down(inventory, remote, seat, bundle, now=now)
        tell(entry.name, "engines", "stopped")
        await stop_agent(inventory, seat, remote)
        if entry.name == last:
            stopped.append(entry.name)
        else:
            await remove(entry, remote, seat)

    async def remove(entry: HostEntry, remote: Remote, seat: Seat) -> None:
        answer = await call(
            remote, seat.python, "remove", {"root": seat.place.root}, PROGRAM_TIMEOUT_S
        )
        if "error" in answer:
            raise DeployError(
                f"{entry.name}: {clean(answer['error'], 400)}",
                "end those processes, then run dynctl down again",
            )
        tell(entry.name, "down", "removed")

    async def remove_last(entry: HostEntry, remote: Remote) -> None:
        left = await _left_behind(entry, remote, inventory)
        if left is not None:
            await remove(entry, remote, left[0])

    results = await fleet.map(clear, hosts, timeout_s=DOWN_TIMEOUT_S)
    return results | await fleet.map(remove_last, stopped)


async def _left_behind(
    entry: HostEntry, remote: Remote, inventory: Inventory
) -> tuple[Seat, str | None] | None:
    """How dynctl was last started on a host and with which bundle; None when it never was there.

    Where `up` stopped before the agent, only our marker tells that the directory is ours: then there is no bundle.
    """
    place = place_of(entry, inventory, remote.home)
    try:
        launch = json.loads(await remote.get(f"{place.root}/launch.json", 65536))
    except CommandError:
        try:
            await remote.get(f"{place.root}/.dynctl-root", 4096)
        except CommandError:
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
