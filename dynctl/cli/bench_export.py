"""`dynctl bench export`: a stored result in a form that other tools read. IO: files, terminal."""

import csv
import io
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.output import emit
from dynctl.errors import UsageError

if TYPE_CHECKING:
    from dynctl.bench.flat import Row
    from dynctl.bench.record import Record
    from dynctl.bench.report import Report


class Format(StrEnum):
    """How a result is written."""

    CSV = "csv"
    JSONL = "jsonl"
    AIPERF_JSON = "aiperf-json"
    AIPERF_JSONL = "aiperf-jsonl"


def command(
    directory: Annotated[Path, typer.Argument(help="Directory that bench --out wrote.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="csv or jsonl: flat rows; aiperf-json, aiperf-jsonl: as AIPerf's summary and requests.",
        ),
    ] = Format.CSV,
) -> None:
    """Write a stored result to stdout in a form that other tools read.

    csv and jsonl: of a run a row per request (warm-up marked), of a repeat a row per run, of a sweep a row per load. In csv a
    text that a spreadsheet would take for a formula begins with an apostrophe.

    aiperf-json is profile_export_aiperf.json (its schema 1.4) and aiperf-jsonl is
    profile_export.jsonl, both of the measured requests and by AIPerf's definitions: latencies from sending.

    Example: dynctl bench export runs/monday --format aiperf-json > profile_export_aiperf.json
    """
    from dynctl.bench.flat import run_rows, stage_rows
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.report import Report
    from dynctl.bench.results import read, read_records
    from dynctl.bench.sweep import Sweep

    found = read(directory)
    if isinstance(found, Report):
        emit(_run_text(found, read_records(directory, found), form))
        return
    if not isinstance(found, Repeat | Sweep) or form not in {Format.CSV, Format.JSONL}:
        above = directory if directory.is_dir() else directory.parent
        parts = {Repeat: "run-1", Sweep: "stage-1"}.get(type(found), "turn-1")
        raise UsageError(
            f"{directory} holds several runs, and {form} is of one", f"name one: {above / parts}"
        )
    emit(_flat(run_rows(found) if isinstance(found, Repeat) else stage_rows(found), form))


def _run_text(report: "Report", records: "tuple[Record, ...]", form: Format) -> str:
    from dynctl.bench import aiperf, flat
    from dynctl.store import to_json

    if form is Format.AIPERF_JSON:
        return to_json(aiperf.summary(report, records)).decode()
    if form is Format.AIPERF_JSONL:
        return _json_lines(aiperf.lines(report, records))
    return _flat(flat.request_rows(records), form)


def _flat(rows: "list[Row]", form: Format) -> str:
    if form is Format.JSONL:
        return _json_lines(rows)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
        writer.writerows(map(_cell, row.values()) for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """A value for a spreadsheet, to which what a server said is no formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
    return f"'{value}" if is_formula else value


def _json_lines(rows: "list[Row]") -> str:
    import msgspec

    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
