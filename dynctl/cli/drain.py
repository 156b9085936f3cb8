"""`dynctl drain`: take engines out of service, or bring them back. IO: ssh, terminal."""

from typing import Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Yes
from dynctl.cli.output import Stage, confirm, progress, say, unasked, wait_for
from dynctl.cli.session import load
from dynctl.core.inventory import Inventory
from dynctl.remote.outcomes import failures_of, raise_any_failure, raise_host_failures


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE|HOST...",
            help="Engines as in dynctl status, or hosts: all of theirs; globs of either.",
        ),
    ],
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Start drained engines again, and wait until they are ready."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Take engines out of service, or bring them back.

    They get no new requests, those under way end (for at most two minutes), then the engines stop and let go of
    their GPUs. They stay down, also over dynctl up and reboots, until --undo.

    Example: dynctl drain gpu-03
    """
    wanted = load(inventory, local=local)
    stage = Stage("interrupted; nothing was changed")
    wait_for(_drain(wanted, names, stage, undo=undo, yes=yes), stage)


async def _drain(
    wanted: Inventory, names: list[str], stage: Stage, *, undo: bool, yes: bool
) -> None:
    from dynctl.deploy.drain import (
        bring_back,
        choose,
        drain,
        start_deadlines_s,
        taking_part,
        unreached,
        what_stays,
    )
    from dynctl.deploy.reach import NotHereError, reach_agents
    from dynctl.errors import DynctlError
    from dynctl.remote.fleet import open_fleet

    async with (
        open_fleet(wanted.hosts, wanted.ssh) as fleet,
        reach_agents(wanted, fleet) as found,
    ):
        clients = {n: c for n, c in found.items() if not isinstance(c, DynctlError)}
        errors, missing = failures_of(found), unreached(found, names)
        raise_any_failure({name: error for name, error in missing.items() if name in names})
        if not clients:
            raise_any_failure(missing or errors)
        silent = [n for n, error in errors.items() if not isinstance(error, NotHereError)]
        for name in silent:
            say(f"note: {errors[name].message}")
        statuses = {name: await client.status() for name, client in clients.items()}
        meant = choose(statuses, names, silent)
        chosen = [each for each in meant if (each.unit.is_held if undo else not each.is_drained)]
        what = "brought back" if undo else "drained"
        results: dict[str, DynctlError | None] = {each.host_name: None for each in meant}
        results |= missing
        if not chosen:
            if meant:
                ids = ", ".join(each.unit.id for each in meant)
                say(f"{'not' if undo else 'already'} drained: {ids}")
            raise_host_failures(results, what)
            return
        units = ", ".join(each.unit.id for each in chosen)
        if_under_way = f"interrupted; agents go on with {units}: dynctl status"
        if undo:
            stage.if_interrupted = if_under_way
            deadlines_s = start_deadlines_s(wanted)
            parts = {name: clients[name] for name in taking_part(statuses, chosen)}
            results |= await bring_back(parts, chosen, progress, deadlines_s)
        else:
            for line in what_stays(statuses, chosen):
                say(line)
            await confirm(f"drain {units}?", yes=yes)
            stage.if_interrupted = if_under_way
            results |= await drain(clients, chosen, progress)
            say(f"to undo it: {unasked()} --undo")
        raise_host_failures(results, what)
