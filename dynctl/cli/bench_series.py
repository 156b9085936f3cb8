"""`dynctl bench run` with --repeat, or with several loads: runs one after the other, and what they come to. IO: HTTP, files, terminal."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dynctl.cli.bench_driving import Ready, Router
from dynctl.cli.bench_results import show_repeat, show_sweep
from dynctl.cli.options import Output
from dynctl.cli.output import emit_json, say
from dynctl.cli.session import load as load_inventory
from dynctl.errors import DynctlError, ExitCode, UsageError

if TYPE_CHECKING:
    from dynctl.bench.record import Record
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.report import Report
    from dynctl.bench.run import Wish
    from dynctl.bench.sweep import Search, Stage, Steps, Sweep

SEEDS_PER_RUN = 1000
"""Runs of one command have seeds of their own, so that none finds what another left in a cache."""


def check_series(
    course: "Steps | Search | None", repeat: int, gpus: int | None, wish: "Wish"
) -> None:
    """Refuse what does not go together, before anything is asked.

    Raises:
        UsageError: saying what to leave out or add.
    """
    from dynctl.core.workload import Slo

    if course is None:
        if gpus is not None:
            raise UsageError(
                "--gpus is for the knee of several loads, and one is given",
                "leave it out, or add loads: --load poisson:1,2,4",
            )
        return
    if repeat > 1:
        raise UsageError(
            "--repeat and several loads exclude each other",
            "find the load first, then repeat that one",
        )
    if wish.slo == Slo():
        raise UsageError(
            "several loads are judged by goals, and none is given", "add --slo ttft=500,itl=40"
        )


async def play_repeat(
    ready: Ready, wish: "Wish", num: int, stop: asyncio.Event, out: Path | None
) -> "Repeat":
    """Play a run so many times, each with prompts and arrivals of its own.

    Raises:
        DynctlError: when none came to its end, or one was hardly answered.
    """
    from dynctl.bench.changes import Run
    from dynctl.bench.repeat import make_repeat
    from dynctl.bench.results import forget

    if out is not None:
        forget(out)
    runs = []
    for number in range(1, num + 1):
        if stop.is_set():
            break
        say(f"run {number} of {num}")
        report, records = await _play_one(ready, wish, number - 1, stop, _part(out, "run", number))
        _check_answers(report, f"run {number}")
        runs.append(Run(f"run-{number}", report, records))
    is_partial = sum(not run.report.is_partial for run in runs) < num
    found = make_repeat(runs, is_partial=is_partial)
    if found is None:
        raise _nothing_ended("run")
    return found


async def play_sweep(
    ready: Ready,
    wish: "Wish",
    course: "Steps | Search",
    num_gpus: int | None,
    stop: asyncio.Event,
    out: Path | None,
) -> "Sweep":
    """Play the loads of a course, each when the one before has ended.

    Raises:
        DynctlError: when none came to its end, or the first was hardly answered.
    """
    from dynctl.bench.results import forget
    from dynctl.bench.sweep import make_sweep, stage_of

    stages: list[Stage] = []
    setting, is_partial = None, False
    if out is not None:
        forget(out)
    plays = itertools.count()
    while (load := course.next(stages)) is not None:
        number = len(stages) + 1
        say(f"stage {number}: {load}")
        part = _part(out, "stage", number)
        report = await _play_stage(ready, replace(wish, load=load), plays, stop, part)
        if report.is_partial:
            is_partial = True
            break
        if setting is None:
            _check_answers(report, str(load))
            setting = report.setting
        stage = stage_of(load, report)
        stages.append(stage)
        say(f"stage {number}: {load} {_word(stage.is_met)}")
        if report.requests.ok < 2:
            # Whatever is wrong with the server, more load will not tell.
            break
        if stop.is_set():
            is_partial = course.next(stages) is not None
            break
    if setting is None:
        raise _nothing_ended("load")
    return make_sweep(setting, stages, num_gpus, is_partial=is_partial)


async def _play_stage(
    ready: Ready, wish: "Wish", plays: Iterator[int], stop: asyncio.Event, out: Path | None
) -> "Report":
    report, _ = await _play_one(ready, wish, next(plays), stop, out)
    if report.client_limited and not stop.is_set():
        # A hiccup of this machine would else end the search for the limit of another one.
        say(f"once more, as the load generator was the limit: {report.client_limited}")
        report, _ = await _play_one(ready, wish, next(plays), stop, out)
    return report


def _word(is_met: bool | None) -> str:
    if is_met is None:
        return "was too much for the load generator"
    return "meets the goals" if is_met else "misses the goals"


def _part(out: Path | None, name: str, number: int) -> Path | None:
    return None if out is None else out / f"{name}-{number}"


async def _play_one(
    ready: Ready, wish: "Wish", at: int, stop: asyncio.Event, out: Path | None
) -> "tuple[Report, tuple[Record, ...]]":
    from dynctl.bench.results import write

    seed = wish.seed * SEEDS_PER_RUN + at
    report, records = await ready.play(replace(wish, seed=seed), stop)
    if out is not None:
        write(out, report, records)
    return report, records


def _check_answers(report: "Report", name: str) -> None:
    requests = report.requests
    if requests.ok >= 2 or report.is_partial:
        return
    kinds = ", ".join(requests.failed_by_kind)
    raise DynctlError(
        f"{name}: {requests.ok} of {requests.sent} requests were answered"
        + (f" ({kinds})" if kinds else ""),
        "dynctl status and dynctl logs say why"
        if requests.failed
        else "a longer --duration sends more",
        code=ExitCode.REFUSED,
    )


def _nothing_ended(what: str) -> DynctlError:
    return DynctlError(
        f"no {what} came to its end, so there is nothing to tell",
        "a shorter --duration ends sooner",
        code=ExitCode.INTERRUPTED,
    )


def gpus_of(router: Router, inventory: Path, *, local: bool) -> int | None:
    """How many GPUs the deployment has, by the plan its hosts run; None where that is not known, or it has none."""
    from dynctl.cli.kept import read_plan

    if router.deployment is None:
        return None
    plan = read_plan(load_inventory(inventory, local=local))
    if plan is None or plan.digest != router.plan_digest:
        say(
            "note: the plan by the inventory is not the one that runs; --gpus N gives figures per GPU"
        )
        return None
    return (
        sum(
            len(member.gpus)
            for deployment, _, replica in plan.replicas()
            for member in replica.members
            if deployment.name == router.deployment
        )
        or None
    )


def finish_series(found: "Repeat | Sweep", out: Path | None, output: Output) -> None:
    """Write what runs came to, show it, and end the command with its exit code."""
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.results import write_summary

    is_repeat = isinstance(found, Repeat)
    try:
        if out is not None:
            parts = "run-N" if is_repeat else "stage-N"
            say(f"written: {write_summary(out, found)}, and {out}/{parts}, each as of a single run")
    finally:
        if output is Output.JSON:
            emit_json(found)
        elif isinstance(found, Repeat):
            show_repeat(found)
        else:
            show_sweep(found)
    if found.exit_code is not ExitCode.OK:
        raise typer.Exit(int(found.exit_code))
