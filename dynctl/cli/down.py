"""`dynctl down`: drain and stop everything, and leave nothing behind. IO: ssh, terminal."""

from typing import Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local, Yes
from dynctl.cli.output import Stage, confirm, progress, unasked, wait_for
from dynctl.cli.session import load, select
from dynctl.core.inventory import Inventory
from dynctl.remote.outcomes import raise_host_failures


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
    there. Hosts that cannot be reached are named and keep what they have; hosts left out by --limit are left alone. Exit 5
    while somebody else changes one of the others; --now does not look for that.

    Example: dynctl down --yes
    """
    wanted = load(inventory, local=local)
    hosts = select(wanted, limit)
    stage = Stage("interrupted; nothing was stopped")
    wait_for(_down(wanted, hosts, stage, now=now, yes=yes or local), stage)


async def _down(wanted: Inventory, hosts: list[str], stage: Stage, *, now: bool, yes: bool) -> None:
    from dynctl.deploy.remove import take_down
    from dynctl.remote.fleet import open_fleet

    count = f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
    await confirm(f"stop cluster {wanted.cluster} on {count}?", yes=yes)
    stage.if_interrupted = (
        "interrupted; agents go on stopping what they were told to stop\n"
        f"to see it through: {unasked()}"
    )
    async with open_fleet(wanted.entries(hosts), wanted.ssh) as fleet:
        results = await take_down(wanted, fleet, progress, now=now, heeds_lock=not now)
    raise_host_failures(results, "cleared")
