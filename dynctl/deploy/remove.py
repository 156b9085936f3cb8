"""Taking a cluster down: drain and stop every unit, stop the agents, remove dynctl's directories. IO: ssh, HTTP."""

import json
from collections.abc import Sequence

from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.deploy.launch import start_agent, stop_agent
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.places import place_of
from dynctl.deploy.reach import NoAgentError, open_agent
from dynctl.deploy.steps import Tell
from dynctl.errors import CommandError, DeployError, DynctlError
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
) -> dict[str, DynctlError | None]:
    """Leave nothing of this cluster on the hosts; a host that cannot be cleared maps to the reason."""

    async def clear(entry: HostEntry, remote: Remote) -> None:
        seat = await _seat_left_behind(entry, remote, inventory)
        if seat is None:
            tell(entry.name, "down", "nothing of this cluster here")
            return
        await _shut_down(inventory, entry, remote, seat, now=now)
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


async def _seat_left_behind(entry: HostEntry, remote: Remote, inventory: Inventory) -> Seat | None:
    """How dynctl was last started on a host, None when it never was."""
    place = place_of(entry, inventory, remote.home)
    try:
        launch = json.loads(await remote.get(f"{place.root}/launch.json", 65536))
    except CommandError:
        return await _unlaunched(entry, remote, place.root, inventory)
    return Seat(entry, place, launch["python"], launch["scope"])


async def _unlaunched(
    entry: HostEntry, remote: Remote, root: str, inventory: Inventory
) -> Seat | None:
    """A host where `up` stopped before the agent: only our marker tells that the directory is ours."""
    try:
        await remote.get(f"{root}/.dynctl-root", 4096)
    except CommandError:
        return None
    return Seat(entry, place_of(entry, inventory, remote.home), entry.python or "python3", "none")


async def _shut_down(
    inventory: Inventory, entry: HostEntry, remote: Remote, seat: Seat, *, now: bool
) -> None:
    try:
        async with open_agent(entry, remote, inventory) as client:
            await client.shutdown(now=now)
    except NoAgentError:
        # The agent is gone but engines may run on: a fresh agent adopts them, then stops them properly.
        bundle = await _last_bundle(seat, remote)
        if bundle is None:
            return
        await start_agent(inventory, seat, remote, bundle)
        async with open_agent(entry, remote, inventory) as client:
            await client.shutdown(now=now)


async def _last_bundle(seat: Seat, remote: Remote) -> str | None:
    try:
        launch = json.loads(await remote.get(f"{seat.place.root}/launch.json", 65536))
    except CommandError:
        return None
    return str(launch["bundle_path"]).rsplit("/", 1)[-1]
