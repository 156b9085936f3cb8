"""`dynctl discover`: describe the hosts. IO: ssh, files, terminal."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dynctl.cli.kept import read_book
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local, Output, OutputOption
from dynctl.cli.output import emit, emit_json, say, table, wait_for
from dynctl.cli.session import ask_about_keys, load, load_if_there, select
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Print a POSIX shell script that describes the host it runs on."
        ),
    ] = False,
    captures: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="[NAME=]PATH",
            help="Read what the script, or nvidia-smi, ibstat and kin printed; repeat, or list more paths.",
        ),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="More captures, after --from.")
    ] = None,
    draw: Annotated[
        bool | None,
        typer.Option(
            "--draw/--no-draw", help="Draw the GPU links of each host.", show_default="on"
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe the hosts: GPUs, NVLink, PCIe, NUMA, NICs.

    Reads only; nothing is installed or changed on a host. Exit 3 when some hosts could not be described, 4 when
    none could, 7 when a host key is unknown or has changed.

    Example: dynctl discover --limit gpu-01 -o json
    """
    from dynctl.discovery.survey import raise_incomplete
    from dynctl.errors import UsageError

    if more and not captures:
        raise UsageError(f"{more[0]}: paths are read after --from only", f"dynctl discover --from {more[0]}")  # fmt: skip
    if script:
        _print_script(inventory)
        return
    topology = _read([*(captures or ()), *(more or ())]) if captures else _ask(inventory, limit, local=local)  # fmt: skip
    if output is Output.JSON:
        from dynctl.discovery.view import document

        emit_json(document(topology))
    else:
        _show(topology, is_drawn=draw is not False)
    raise_incomplete(topology, "described")


def _print_script(path: Path) -> None:
    """The inventory, where there is one, adds the engines' interpreters and the models' shapes."""
    from dynctl.discovery.capture import portable_script
    from dynctl.discovery.survey import engine_pythons

    wanted = load_if_there(path)
    models = [wish.model for wish in wanted.deployments if wish.engine.kind == "vllm"] if wanted else []  # fmt: skip
    emit(portable_script(engine_pythons(wanted) if wanted else (), models))


def _read(paths: list[str]) -> Topology:
    from dynctl.discovery.capture import read_captures
    from dynctl.discovery.offline import read_files

    files = read_files(paths)
    topology, facts = read_captures(files)
    if len(files) > 1 and len(facts) == 1:
        say(f"{len(files)} captures are taken as of one host; NAME=PATH says otherwise")
    return topology


def _ask(path: Path, limit: str | None, *, local: bool) -> Topology:
    wanted = load(path, local=local)
    measured = read_book(wanted)
    return wait_for(_look(wanted, select(wanted, limit))).with_links(measured)


async def _look(wanted: Inventory, hosts: list[str]) -> Topology:
    from dynctl.discovery.discover import discover
    from dynctl.discovery.survey import engine_pythons
    from dynctl.remote.fleet import open_fleet

    entries = wanted.entries(hosts)
    async with open_fleet(entries, wanted.ssh, ask_about_keys) as fleet:
        return await discover(entries, fleet, engine_pythons=engine_pythons(wanted))


def _show(topology: Topology, *, is_drawn: bool) -> None:
    from dynctl.core.text import clean
    from dynctl.discovery import view
    from dynctl.discovery.drawing import drawings

    if not topology.hosts:
        return
    rows = [
        [
            clean(host.name, 24),
            clean(view.gpu_summary(host), 60),
            view.link_summary(host),
            clean(view.nic_summary(host), 40),
            view.memory_summary(host),
        ]
        for host in topology.hosts
    ]
    table(["HOST", "GPUS", "LINKS", "NICS", "HOST MEMORY"], rows)
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for names, drawn in drawings(topology, is_coloured=is_coloured) if is_drawn else ():
        emit(f"\n{clean(', '.join(names), 78)}")
        emit("\n".join(drawn))
    for host in topology.hosts:
        for warning in host.warnings:
            say(f"{clean(host.name, 24)}: {warning.text}  [{warning.code}]")
    for warning in topology.warnings:
        say(f"{warning.text}  [{warning.code}]")
