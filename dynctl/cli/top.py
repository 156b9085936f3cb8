"""`dynctl top`: watch TTFT, ITL, KV hit rate, queues and GPUs live, record that, and go through it later.

IO: ssh, terminal, files.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local
from dynctl.cli.output import Stage, emit, emit_json, say, wait_for
from dynctl.core.inventory import Inventory
from dynctl.core.workload import Slo
from dynctl.errors import ConnectError, DynctlError, UsageError

if TYPE_CHECKING:
    from dynctl.core.snapshot import Snapshot
    from dynctl.telemetry.look import Look
    from dynctl.telemetry.recorder import Recorder
    from dynctl.telemetry.recording import Playing
    from dynctl.telemetry.watch import Watched
    from dynctl.tui.dashboard import Dashboard

ONCE_WIDTH = 120
NUM_EVENTS = 5
ONCE_SAMPLES = 3
"""Rates need two samples of every engine; agents scrape at their own pace, so one more is taken."""
MIB = 2**20
LEAST_RECORDING_MIB, RECORDING_MIB = 1, 256
CUT = "the recording ends in the middle of a line: it was not ended properly"


class Output(StrEnum):
    """How figures are printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def command(  # noqa: PLR0917 - one parameter per option
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one look and exit; needs no terminal.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Also write what is watched to a new file (.gz: compressed), without logs, prompts and keys; "
            "without a terminal only that."
        ),
    ] = None,
    record_mib: Annotated[
        int,
        typer.Option(
            min=LEAST_RECORDING_MIB,
            max=1_000_000,
            help="The most a recording takes, FILE and FILE.1 together; the oldest goes.",
        ),
    ] = RECORDING_MIB,
    replay: Annotated[
        Path | None, typer.Option(help="Show a recording instead of a cluster; asks no host.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="Where a replay begins: a time of day (03:07 or 03:07:30), 2026-11-30T03:07, or +SECONDS from its start."
        ),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.25, max=64.0, help="How fast a replay goes.")] = 1.0,
    output: Annotated[
        Output,
        typer.Option(
            "-o",
            "--output",
            help="table for people, json (with --once) for programs, jsonl: a document a second until it is ended.",
        ),
    ] = Output.TABLE,
) -> None:
    """Watch TTFT, ITL, KV hit rate, queues and GPUs live, record them, and go through a recording.

    Reads every host's agent once a second over the same SSH connections as `status`. `–` is not known, never zero;
    figures of a host that does not answer are shown as old. Press ? for keys: screens for pools, GPUs, KV, requests, logs
    and events, and enter for one engine. Exit 3 with --once when some hosts do not answer, 4 when none does.

    Example: dynctl top --record night.jsonl.gz, then dynctl top --replay night.jsonl.gz --at 03:07
    """
    from dynctl.cli.session import load, select

    if output is Output.JSON and not once:
        raise UsageError("-o json needs --once", "dynctl top --once -o json, or -o jsonl")
    if record is None and record_mib != RECORDING_MIB:
        raise UsageError("--record-mib is of a recording that is written", "add --record FILE")
    if replay is not None:
        if record is not None or local or limit is not None:
            raise UsageError("--replay asks no host", "leave out --record, --local and --limit")
        _replay(replay, at, speed, once=once, output=output)
        return
    if at is not None or speed != 1.0:
        raise UsageError("--at and --speed are of a recording", "add --replay FILE")
    wanted = load(inventory, local=local)
    hosts = select(wanted, limit)
    if record is None:
        _watch(wanted, hosts, once=once, output=output)
        return
    if once:
        raise UsageError("--once is over before anything is recorded", "leave out --once")
    from dynctl.telemetry.recorder import Recorder

    limit_bytes = record_mib * MIB
    with Recorder(record, limit_bytes, wanted.cluster, _goals(wanted)) as recorder:
        _watch(wanted, hosts, once=False, output=output, recorder=recorder)


def _watch(
    wanted: Inventory,
    hosts: list[str],
    *,
    once: bool,
    output: Output,
    recorder: "Recorder | None" = None,
) -> None:
    if once:
        wait_for(_once(wanted, hosts, output))
    elif output is Output.JSONL:
        wait_for(_stream(wanted, hosts, recorder))
    elif is_terminal():
        _run(wanted, hosts, recorder)
    elif recorder is not None:
        stage = Stage(f"recorded: dynctl top --replay {recorder.path}")
        wait_for(_record(wanted, hosts, recorder), stage)
    else:
        raise UsageError("this is no terminal", "dynctl top --once prints one look")


def is_terminal() -> bool:
    """Whether screens can be shown here."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _goals(wanted: Inventory) -> dict[str, Slo]:
    """The goals that figures are shown beside and coloured by."""
    return {deployment.name: deployment.slo for deployment in wanted.deployments}


@asynccontextmanager
async def _open(
    wanted: Inventory, hosts: list[str], recorder: "Recorder | None" = None
) -> "AsyncIterator[Watched]":
    from dynctl.deploy.reach import steady_agents
    from dynctl.remote.fleet import open_fleet
    from dynctl.remote.outcomes import raise_host_failures
    from dynctl.telemetry.recorder import Recorded
    from dynctl.telemetry.watch import watch

    async with (
        open_fleet(wanted.entries(hosts), wanted.ssh) as fleet,
        steady_agents(wanted, fleet, hosts) as agents,
    ):
        if all(isinstance(agent, DynctlError) for agent in agents.values()):
            raise_host_failures(agents, "answered")
        async with watch(wanted.cluster, agents) as snapshots:
            if recorder is None:
                yield snapshots
                return
            async with Recorded(snapshots, recorder) as recorded:
                yield recorded


def _run(wanted: Inventory, hosts: list[str], recorder: "Recorder | None") -> None:
    from dynctl.tui.app import TopApp

    _show(TopApp(lambda: _open(wanted, hosts, recorder), _goals(wanted), recorder=recorder))


def _show(app: "Dashboard") -> None:
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.return_code:
        raise DynctlError("dynctl top ended with an error", "see the traceback above")


async def _once(wanted: Inventory, hosts: list[str], output: Output) -> None:
    import time

    from dynctl.telemetry.ledger import Ledger
    from dynctl.telemetry.look import Look

    ledger = Ledger(_goals(wanted))
    async with _open(wanted, hosts) as snapshots:
        taken = 0
        async for snapshot in snapshots:
            overview = ledger.take(snapshot, time.monotonic())
            taken += 1
            if taken == ONCE_SAMPLES:
                break
    _print(Look(overview, ledger), output)
    _check(snapshot)


def _print(look: "Look", output: Output, playing: "Playing | None" = None) -> None:
    from dynctl.tui.once import document, text
    from dynctl.tui.view import View

    events = look.ledger.events.newest(NUM_EVENTS)
    if output is Output.JSON:
        emit_json(document(look.overview, events))
    elif output is Output.JSONL:
        emit(_line(document(look.overview, events)))
    else:
        view = View(look.overview, look.ledger.trends, events, playing=playing)
        emit(text(view, ONCE_WIDTH))


async def _stream(wanted: Inventory, hosts: list[str], recorder: "Recorder | None") -> None:
    """Print a document for every snapshot, each in a line of its own."""
    import time

    from dynctl.telemetry.ledger import Ledger
    from dynctl.telemetry.look import Look

    ledger = Ledger(_goals(wanted))
    async with _open(wanted, hosts, recorder) as snapshots:
        async for snapshot in snapshots:
            _print(Look(ledger.take(snapshot, time.monotonic()), ledger), Output.JSONL)
            _check_recording(recorder)


async def _record(wanted: Inventory, hosts: list[str], recorder: "Recorder") -> None:
    """Record until it is ended."""
    say(f"recording to {recorder.path} until this is ended")
    async with _open(wanted, hosts, recorder) as snapshots:
        async for _ in snapshots:
            _check_recording(recorder)


def _check_recording(recorder: "Recorder | None") -> None:
    """Where no screen says that a recording ended, that is the end."""
    if recorder is not None and recorder.failure:
        raise DynctlError(
            f"recording to {recorder.path} ended: {recorder.failure}",
            "what was written until then can be replayed",
        )


def _replay(path: Path, at: str | None, speed: float, *, once: bool, output: Output) -> None:
    from dynctl.telemetry.places import place_s
    from dynctl.telemetry.player import Player
    from dynctl.telemetry.tape import Tape

    if not (once or output is Output.JSONL or is_terminal()):
        raise UsageError(
            "this is no terminal", "--replay FILE --once prints one look, -o jsonl all of them"
        )
    with Tape(path) as tape:
        begin_s = tape.times_s[tape.snapshots[0]]
        end_s = tape.times_s[tape.snapshots[-1]]
        at_s = end_s if once and at is None else begin_s
        if at is not None:
            at_s = place_s(at, tape.header.started_unix_s, begin_s, end_s)
        player = Player(tape, at_s, speed)
        if once or output is Output.JSONL:
            place = replace(player.playing, is_playing=False, is_seeking=False)
            for look in player.all_looks():
                _print(look, output, place)
                if once:
                    break
            if tape.is_cut:
                say(f"{path}: {CUT}")
            return
        from dynctl.tui.replay import ReplayApp

        _show(ReplayApp(player, CUT if tape.is_cut else ""))


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
