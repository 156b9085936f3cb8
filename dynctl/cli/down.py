"""`dynctl down`: drain and stop everything, and leave nothing behind. IO: ssh, terminal."""

from typing import Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local, Yes
from dynctl.cli.output import Stage, confirm, progress, unasked, wait_for
from dynctl.cli.session import load, raise_host_failures, select
from dynctl.core.inventory import Inventory


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not drain: running requests end with an error event.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Drain and stop everything dynctl started.

    Stops routers, engines and agents of the cluster on every host of the inventory and removes dynctl's directory
    there. Hosts that cannot be reached are named and keep what they have.

    Example: dynctl down --yes
    """
    wanted = load(inventory, local=local)
    hosts = select(wanted, limit)
    confirm(f"stop cluster {wanted.cluster} on {len(hosts)} hosts?", yes=yes or local)
    stage = Stage(
        "interrupted; agents go on stopping what they were told to stop\n"
        f"to see it through: {unasked()}"
    )
    wait_for(_down(wanted, hosts, now=now), stage)


async def _down(wanted: Inventory, hosts: list[str], *, now: bool) -> None:
    from dynctl.deploy.remove import take_down
    from dynctl.remote.fleet import open_fleet

    async with open_fleet(wanted.entries(hosts), wanted.ssh) as fleet:
        results = await take_down(wanted, fleet, progress, hosts=hosts, now=now)
    raise_host_failures(results, "cleared")
