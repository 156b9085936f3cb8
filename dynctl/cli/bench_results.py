"""`dynctl bench show` and `compare`: what stored runs say, alone and against each other. IO: files, terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import Output, OutputOption
from dynctl.cli.output import emit, emit_json, table
from dynctl.core.text import clean

if TYPE_CHECKING:
    from dynctl.bench.changes import Change
    from dynctl.bench.compare import Comparison
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.report import Report
    from dynctl.bench.sweep import Sweep
    from dynctl.bench.trial import Trial

MAX_LINE_CHARS = 1000
Directory = Annotated[Path, typer.Argument(help="Directory that bench --out wrote.")]


def show(
    directory: Directory,
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Say what each figure means, as stored with it.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a stored result again, or what its figures mean.

    Example: dynctl bench show runs/monday --definitions
    """
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.results import read
    from dynctl.bench.sweep import Sweep
    from dynctl.bench.trial import Trial

    found = read(directory)
    if definitions:
        _define(found.definitions, output)
    elif output is Output.JSON:
        emit_json(found)
    elif isinstance(found, Trial):
        show_verdict(found)
    elif isinstance(found, Repeat):
        show_repeat(found)
    elif isinstance(found, Sweep):
        show_sweep(found)
    else:
        show_report(found)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Directory of the first run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Directory of the second run.")],
    threshold: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="FIGURE=N%, e.g. ttft_p99=5%; worse by more: exit 6."),
    ] = None,
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Say what the verdicts and figures mean.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what changed between two stored runs, and how sure that is.

    better or worse: the change's 95% interval leaves zero out. same: it lies within the threshold (5% unless given).
    Otherwise there is not enough data. What bench run --repeat wrote is compared by how far its runs differ. Runs of different workloads are refused (exit 4) with what differs; seed, server
    and versions may differ and are shown. Exit 6 when a figure named by --threshold is worse by more than that, or one
    was named and a load generator was the limit.

    Example: dynctl bench compare runs/monday runs/tuesday --threshold ttft_p99=5%
    """
    from dynctl.bench.compare import DEFINITIONS, parse_thresholds
    from dynctl.bench.compare import compare as compare_stored
    from dynctl.bench.results import read_stored

    if definitions:
        _define(DEFINITIONS, output)
        return
    thresholds = parse_thresholds(threshold or [])
    found = compare_stored(read_stored(before), read_stored(after), thresholds)
    if output is Output.JSON:
        emit_json(found)
    else:
        _show_comparison(found)
    if found.exit_code:
        raise typer.Exit(int(found.exit_code))


def _show_comparison(found: "Comparison") -> None:
    from dynctl.bench.compare_text import advice, difference_lines, footnotes

    one, other = found.num_runs
    runs = "" if one == other == 1 else f"; means of {one} and {other} runs"
    _emit_line(f"A {found.before}, B {found.after}: {found.workload}{runs}")
    emit("")
    show_changes(found.changes)
    for line in (*difference_lines(found), *footnotes(found)):
        _emit_line(line)
    emit("")
    _emit_line(f"advice: {advice(found)}")


def show_changes(changes: "Sequence[Change]") -> None:
    """Write the table of what changed, and an empty line."""
    from dynctl.bench.compare_text import COLUMNS, rows

    table(COLUMNS, rows(changes), right=COLUMNS[1:5])
    emit("")


def _define(definitions: dict[str, str], output: Output) -> None:
    if output is Output.JSON:
        emit_json(definitions)
        return
    width = max(map(len, definitions))
    for name, meaning in definitions.items():
        emit(f"{clean(name):<{width}}  {clean(meaning, MAX_LINE_CHARS)}")


def _emit_line(text: str) -> None:
    """Write what a server, or whoever stored the file, may have named."""
    emit(clean(text, MAX_LINE_CHARS))


def show_report(report: "Report") -> None:
    """Write a run's figures as people read them, with advice at the end."""
    from dynctl.bench.advice import advice
    from dynctl.bench.summary import (
        KIND_COLUMNS,
        METRIC_COLUMNS,
        check_lines,
        fact_rows,
        footnotes,
        kind_rows,
        metric_rows,
    )

    setting = report.setting
    what = f"{setting.workload}, {setting.load}, {report.measured_s:.1f} s, seed {setting.seed}"
    _emit_line(f"{setting.model} at {setting.url}: {what}")
    emit("")
    if report.kinds:
        table(KIND_COLUMNS, kind_rows(report), right=KIND_COLUMNS[1:])
        emit("")
    table(METRIC_COLUMNS, metric_rows(report), right=METRIC_COLUMNS[1:])
    emit("")
    for name, value in fact_rows(report):
        emit(f"{name:<15} {clean(value, MAX_LINE_CHARS)}")
    for line in (*check_lines(report.checks), *footnotes(report)):
        _emit_line(line)
    emit("")
    _emit_line(f"advice: {advice(report)}")


def show_verdict(trial: "Trial") -> None:
    """Write what two arms came to, with verdict and advice at the end."""
    before, after = trial.arms
    _emit_line(f"A {before}, B {after}: in turn {', '.join(trial.order)}")
    if trial.recorded is not None:
        emit(
            f"{trial.recorded.num_requests} requests each, of which {trial.recorded.ideal_ratio:.1%} could be hits "
            f"(of the trace itself, blocks of {trial.recorded.block_tokens})"
        )
    emit("")
    show_changes(trial.changes)
    if trial.is_partial:
        emit("PARTIAL: interrupted; only rounds that both arms ended count")
    word = "left out" if trial.num_rounds else "INVALID"
    for turn, why in trial.client_limited.items():
        _emit_line(f"{word}: {turn}: the load generator was the limit: {why}")
    emit(f"verdict: {trial.outcome}")
    _emit_line(f"advice: {trial.advice}")


def show_repeat(found: "Repeat") -> None:
    """Write each figure over runs, with advice at the end."""
    from dynctl.bench.repeat import columns, footnotes, rows

    setting, titles = found.setting, columns(found)
    seeds = f"seeds {', '.join(map(str, found.seeds))}"
    what = f"{setting.workload}, {setting.load}, {setting.duration_s:g} s, {len(found.seeds)} runs"
    _emit_line(f"{setting.model} at {setting.url}: {what}, {seeds}")
    emit("")
    table(titles, rows(found), right=titles[1:])
    emit("")
    for line in footnotes(found):
        _emit_line(line)
    _emit_line(f"advice: {found.advice}")


def show_sweep(found: "Sweep") -> None:
    """Write a row per load, the knee, and advice at the end."""
    from dynctl.bench.sweep_text import COLUMNS, footnotes, knee_lines, rows

    setting, slo = found.setting, found.setting.slo
    goals = [f"{k} {v:g} ms" for k, v in (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms)) if v]
    what = f"{setting.workload}, {setting.duration_s:g} s each; goals at p99: {', '.join(goals)}"
    _emit_line(f"{setting.model} at {setting.url}: {what}")
    emit("")
    table(COLUMNS, rows(found), right=COLUMNS[1:-1])
    emit("")
    for line in (*footnotes(found), *knee_lines(found)):
        _emit_line(line)
    _emit_line(f"advice: {found.advice}")
