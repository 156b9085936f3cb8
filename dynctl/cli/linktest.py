"""`dynctl linktest`: measure the links between hosts. IO: ssh, files, terminal."""

from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.kept import book_path, read_book
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Output, OutputOption
from dynctl.cli.output import emit_json, progress, say, table, wait_for
from dynctl.cli.session import load, select
from dynctl.core.inventory import Inventory
from dynctl.core.links import LinkBook

if TYPE_CHECKING:
    from dynctl.linktest.view import Report

Quick = Annotated[
    bool, typer.Option("--quick", help="Half a second per pair instead of two, fewer sizes.")
]


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    quick: Quick = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure throughput and latency between every pair of hosts.

    TCP always; NIXL over UCX where both hosts have it in the Python of a vLLM deployment. Small programs run for the
    length of the test and are gone after it; the results are kept in .dynctl/CLUSTER/links.json. Exit 3 when some
    pairs or hosts failed, 4 when no pair could be measured.

    Example: dynctl linktest --limit 'gpu-*' --quick
    """
    wanted = load(inventory, local=False)
    names = select(wanted, limit)
    older = read_book(wanted)
    report = wait_for(_measure(wanted, names, quick=quick))
    _keep(wanted, older, report)
    if output is Output.JSON:
        from dynctl.linktest.view import document

        emit_json(document(report))
    else:
        _draw(report)
    _raise_failures(report)


def _keep(wanted: Inventory, older: LinkBook, report: "Report") -> None:
    from dynctl import store

    store.save(book_path(wanted), older.updated(LinkBook(report.hosts, report.links)))


async def _measure(wanted: Inventory, names: list[str], *, quick: bool) -> "Report":
    from dynctl.discovery.discover import discover
    from dynctl.linktest.report import make_report
    from dynctl.linktest.run import FULL, QUICK
    from dynctl.remote.fleet import open_fleet

    entries = wanted.entries(names)
    async with open_fleet(entries, wanted.ssh) as fleet:
        topology = await discover(entries, fleet)
        return await make_report(wanted, topology, fleet, QUICK if quick else FULL, _progress)


def _progress(round_number: int, num_rounds: int, num_done: int, num_failed: int) -> None:
    text = f"{num_done} directions measured"
    progress(
        f"round {round_number}/{num_rounds}",
        "links",
        f"{text}, {num_failed} failed" if num_failed else text,
    )


def _draw(report: "Report") -> None:
    from dynctl.core.text import clean
    from dynctl.linktest import view

    table(
        view.COLUMNS,
        view.rows(report.links),
        right=["→", "←", "NEGOTIATED", "RATIO", "RTT P50", "P95"],
    )
    for item in report.unmeasured:
        say(
            f"not measured: {item.kind}{f' on {item.host_name}' if item.host_name else ''}: {clean(item.reason, 300)}"
        )
    for warning in report.warnings:
        say(f"{clean(warning.text, 400)}  [{warning.code}]")


def _raise_failures(report: "Report") -> None:
    from dynctl.core.text import clean
    from dynctl.errors import DynctlError, ExitCode

    failed = {frozenset((m.source_name, m.target_name)) for m in report.links if m.error}
    is_any_measured = any(m.error is None for m in report.links)
    if not failed and not report.failures:
        return
    parts = []
    if report.failures:
        hosts = ", ".join(f"{clean(f.name, 60)} ({clean(f.cause, 200)})" for f in report.failures)
        parts.append(f"not reached: {hosts}")
    if failed:
        parts.append(
            f"{len(failed)} pairs failed" if is_any_measured else "no pair could be measured"
        )
    raise DynctlError(
        "; ".join(parts),
        next((f.hint for f in report.failures if f.hint), None)
        or "may the hosts reach each other on the ports from ports.base on?",
        code=ExitCode.PARTIAL if is_any_measured else ExitCode.REFUSED,
    )
