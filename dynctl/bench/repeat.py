"""A run that was repeated → each figure with its spread between runs, goals, and what a comparison could tell. Pure.

Not here: playing (`cli.bench_series`), how figures of two sets of runs compare (`compare`).
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dynctl.bench.changes import SHARES, Run, side_of, value_on
from dynctl.bench.compare import Stored, default_figures
from dynctl.bench.compare_text import title_of, value_text
from dynctl.bench.record import DEFINITIONS as RECORDED
from dynctl.bench.repeats import RunFigure, over_runs
from dynctl.bench.report import Check, Setting
from dynctl.bench.resampling import student
from dynctl.bench.summary import MISSING, check_lines, percent
from dynctl.errors import ExitCode

SCHEMA = "dynctl.bench.repeat/1"
MEANS = {"ttft_mean": "mean TTFT", "e2e_mean": "mean time end to end"}
"""By these runs are said to agree or not."""
MUCH = 0.1
"""Runs that differ by more have a cause worth looking for."""
MOST_SHOWN = 5
"""More runs are not shown one by one in the table; -o json has them."""

DEFINITIONS = {
    **RECORDED,
    "runs": "one after the other, each when the one before has ended, with warm-up and a seed of its own: other prompts "
    "and arrivals of the same workload, so none finds what another left in a cache",
    "left out": "a run in which the load generator was the limit",
    "values": "each run's figure, as in its own result.json",
    "cv": "standard deviation between runs (n − 1) over their mean",
    "interval": "95% of the mean over runs: Student's t",
    "checks": "mean over runs of each run's figure, against its goal",
}


@dataclass(frozen=True, slots=True)
class Repeat:
    """What `bench run --repeat N -o json` writes."""

    schema: str
    setting: Setting
    """Of the first run; the others have seeds of their own."""
    seeds: tuple[int, ...]
    """Of the runs that ended, in order: their directories are run-1, run-2, …"""
    num_runs: int
    """That count; 0: the load generator was the limit in all, so the figures are not the server's."""
    left_out: dict[str, str]
    """By run in which the load generator was the limit, why."""
    figures: tuple[RunFigure, ...]
    checks: tuple[Check, ...]
    is_partial: bool
    """Interrupted: the runs that had ended by then."""
    workload_digest: str
    advice: str
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    @property
    def exit_code(self) -> ExitCode:
        """As of a single run: interrupted, a gate not passed, or success."""
        if self.is_partial:
            return ExitCode.INTERRUPTED
        if self.checks and (not self.num_runs or not all(c.is_met for c in self.checks)):
            return ExitCode.GATE
        return ExitCode.OK


def make_repeat(runs: Sequence[Run], *, is_partial: bool = False) -> Repeat | None:
    """Put the runs that ended together; None when none did."""
    ended = tuple(run for run in runs if not run.report.is_partial)
    if not ended:
        return None
    stored = Stored("", ended)
    sound = stored.sound
    sides = [side_of(run) if run in sound else None for run in ended]
    names = dict.fromkeys([*MEANS, *default_figures(*(run.report for run in sound))])
    figures = [
        over_runs(name, [None if side is None else value_on(side, name) for side in sides])
        for name in names
    ]
    known = tuple(figure for figure in figures if figure is not None)
    limited = {r.name: r.report.client_limited for r in ended if r.report.client_limited}
    num_runs = len(ended) - len(limited)
    checks = _checks(sound)
    return Repeat(
        schema=SCHEMA,
        setting=ended[0].report.setting,
        seeds=tuple(run.report.setting.seed for run in ended),
        num_runs=num_runs,
        left_out=limited,
        figures=known,
        checks=checks,
        is_partial=is_partial,
        workload_digest=ended[0].report.workload_digest,
        advice=next(_advice(known, checks, num_runs)),
    )


def _checks(runs: Sequence[Run]) -> tuple[Check, ...]:
    by_name: dict[str, list[Check]] = {}
    for run in runs:
        for check in run.report.checks:
            by_name.setdefault(check.name, []).append(check)
    found = []
    for name, checks in by_name.items():
        values = [c.value for c in checks if c.value is not None]
        value = statistics.fmean(values) if len(values) == len(runs) else None
        limit = checks[0].limit
        found.append(Check(name, limit, value, value is not None and value <= limit))
    return tuple(found)


def _advice(figures: Sequence[RunFigure], checks: Sequence[Check], num_runs: int) -> Iterator[str]:
    if not num_runs:
        yield "run the load generator on another machine, or lower the load: these figures are not the server's"
    missed = [check.name for check in checks if not check.is_met]
    if missed:
        yield f"{', '.join(missed)} misses its goal on average: dynctl bench show DIR/run-1 says what to do"
    if num_runs < 2:
        yield "one run says nothing about how far runs differ: repeat it more often"
    known = [(f.cv, f) for f in figures if f.figure in MEANS and f.cv is not None]
    if not known:
        yield "fewer than two runs had a first token, so nothing says how far runs differ"
        return
    spread, most = max(known, key=lambda each: each[0])
    if spread > MUCH:
        yield (
            f"{MEANS[most.figure]} differs by {spread:.0%} from run to run: look for other traffic, runs of few requests, or caches "
            f"and queues that --warmup is too short to fill; {_smallest(most, spread)}"
        )
    yield f"runs agree; {_smallest(most, spread)}"


def _smallest(figure: RunFigure, spread: float) -> str:
    """The change that a comparison of two such sets of runs would just tell."""
    least = spread * student(2 * figure.num - 2) * (2 / figure.num) ** 0.5
    return (
        f"compared with another {figure.num} runs (bench compare), a change of {MEANS[figure.figure]} by less than about "
        f"{max(least, 0.001):.1%} would not be told"
    )


def columns(found: Repeat) -> tuple[str, ...]:
    """The titles of the table of figures."""
    runs = (f"run {at}" for at in range(1, len(found.seeds) + 1))
    return ("figure", "mean", "95% interval", "CV", *(runs if _shows_runs(found) else ()))


def _shows_runs(found: Repeat) -> bool:
    return len(found.seeds) <= MOST_SHOWN


def rows(found: Repeat) -> list[tuple[str, ...]]:
    """Make the rows of the table, under `columns`."""
    return [
        (
            title_of(each.figure),
            value_text(each.figure, each.mean),
            _interval(each),
            MISSING if each.figure in SHARES else percent(each.cv),
            *(value_text(each.figure, value) for value in each.values if _shows_runs(found)),
        )
        for each in found.figures
    ]


def _interval(figure: RunFigure) -> str:
    if figure.interval is None:
        return MISSING
    low, high = figure.interval
    return f"{value_text(figure.figure, max(0.0, low))} to {value_text(figure.figure, high)}"


def footnotes(found: Repeat) -> list[str]:
    """Say of each goal whether it held, and what must be known to read the figures rightly."""
    word = "LEFT OUT" if found.num_runs else "INVALID"
    return [
        *check_lines(found.checks),
        *(["PARTIAL: interrupted; only runs that ended count"] if found.is_partial else []),
        *(
            f"{word}: {run}: the load generator was the limit: {why}"
            for run, why in found.left_out.items()
        ),
    ]
