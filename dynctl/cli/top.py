"""`dynctl top`: watch TTFT, ITL, KV hit rate, queues and GPUs live. IO: ssh, terminal."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local
from dynctl.cli.output import emit, emit_json, wait_for
from dynctl.core.inventory import Inventory
from dynctl.core.workload import Slo
from dynctl.errors import ConnectError, DynctlError, UsageError

if TYPE_CHECKING:
    from dynctl.core.snapshot import Snapshot
    from dynctl.telemetry.watch import Watch

ONCE_WIDTH = 120
NUM_EVENTS = 5
ONCE_SAMPLES = 3
"""Rates need two samples of every engine; agents scrape at their own pace, so one more is taken."""


class Output(StrEnum):
    """How figures are printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one look and exit; needs no terminal.")
    ] = False,
    output: Annotated[
        Output,
        typer.Option(
            "-o",
            "--output",
            help="table for people, json (with --once) for programs, jsonl: a document a second until it is ended.",
        ),
    ] = Output.TABLE,
) -> None:
    """Watch TTFT, ITL, KV hit rate, queues and GPUs live.

    Reads every host's agent once a second over the same SSH connections as `status`. `–` is not known, never zero;
    figures of a host that does not answer are shown as old. Press ? for keys: screens for pools, GPUs, KV, requests, logs
    and events, and enter for one engine. Exit 3 with --once when some hosts do not answer, 4 when none does.

    Example: dynctl top --once -o json
    """
    from dynctl.cli.session import load, select

    wanted = load(inventory, local=local)
    hosts = select(wanted, limit)
    if output is Output.JSON and not once:
        raise UsageError("-o json needs --once", "dynctl top --once -o json, or -o jsonl")
    if once:
        wait_for(_once(wanted, hosts, output))
        return
    if output is Output.JSONL:
        wait_for(_stream(wanted, hosts))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this is no terminal", "dynctl top --once prints one look")
    _run(wanted, hosts)


def _slo(wanted: Inventory) -> Slo:
    """The goals shown and coloured by: those of the one deployment, none when several differ."""
    goals = {deployment.slo for deployment in wanted.deployments}
    return goals.pop() if len(goals) == 1 else Slo()


@asynccontextmanager
async def _open(wanted: Inventory, hosts: list[str]) -> "AsyncIterator[Watch]":
    from dynctl.deploy.reach import steady_agents
    from dynctl.remote.fleet import open_fleet
    from dynctl.remote.outcomes import raise_host_failures
    from dynctl.telemetry.watch import watch

    async with (
        open_fleet(wanted.entries(hosts), wanted.ssh) as fleet,
        steady_agents(wanted, fleet, hosts) as agents,
    ):
        if all(isinstance(agent, DynctlError) for agent in agents.values()):
            raise_host_failures(agents, "answered")
        async with watch(wanted.cluster, agents) as snapshots:
            yield snapshots


def _run(wanted: Inventory, hosts: list[str]) -> None:
    from dynctl.tui.app import TopApp

    app = TopApp(lambda: _open(wanted, hosts), _slo(wanted))
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.return_code:
        raise DynctlError("dynctl top ended with an error", "see the traceback above")


async def _once(wanted: Inventory, hosts: list[str], output: Output) -> None:
    import time

    from dynctl.telemetry.ledger import Ledger
    from dynctl.tui.once import document, text
    from dynctl.tui.view import View

    ledger = Ledger(_slo(wanted))
    async with _open(wanted, hosts) as snapshots:
        taken = 0
        async for snapshot in snapshots:
            overview = ledger.take(snapshot, time.monotonic())
            taken += 1
            if taken == ONCE_SAMPLES:
                break
    events = ledger.events.newest(NUM_EVENTS)
    if output is Output.JSON:
        emit_json(document(overview, events))
    elif output is Output.JSONL:
        emit(_line(document(overview, events)))
    else:
        emit(text(View(overview, ledger.trends, events), ONCE_WIDTH))
    _check(snapshot)


async def _stream(wanted: Inventory, hosts: list[str]) -> None:
    """Print a document for every snapshot, each in a line of its own."""
    import time

    from dynctl.telemetry.ledger import Ledger
    from dynctl.tui.once import document

    ledger = Ledger(_slo(wanted))
    async with _open(wanted, hosts) as snapshots:
        async for snapshot in snapshots:
            overview = ledger.take(snapshot, time.monotonic())
            emit(_line(document(overview, ledger.events.newest(NUM_EVENTS))))


def _line(value: object) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


def _check(snapshot: "Snapshot") -> None:
    from dynctl.remote.outcomes import raise_host_failures

    raise_host_failures(
        {
            host.host_name: ConnectError(f"{host.host_name}: {host.error}") if host.error else None
            for host in snapshot.hosts
        },
        "shown",
    )
