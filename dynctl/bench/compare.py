"""Two stored runs, or two sets of repeated ones → what changed, whether that may be said at all, and gates. Pure.

Not here: how one figure is judged (`changes`, `repeats`), reading results (`results`), tables (`compare_text`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynctl.bench.changes import (
    LATENCIES,
    SHARES,
    Change,
    Run,
    changed,
    is_figure,
    side_of,
    tolerance_of,
    value_on,
)
from dynctl.bench.repeats import changed_between
from dynctl.bench.report import Report, workload_digest, workload_facts
from dynctl.bench.spread import NUM_WINDOWS
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode, UsageError

SCHEMA = "dynctl.bench.compare/1"
DEFAULT_FIGURES = (
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "itl_p99",
    "tpot_p50",
    "tpot_p90",
    "e2e_p50",
    "e2e_p99",
    "output_tok_s",
    "hit_rate",
    "failed",
)
_THRESHOLD = re.compile(r"^([a-z0-9_]+)=([0-9]+(?:\.[0-9]+)?)%$")

DEFINITIONS = {
    "change": "(B − A) / A of latencies and throughput; B − A, in points, of shares (hit_rate, failed, goodput)",
    "interval": "95% bootstrap of the change, seeded: stretches of √n neighbouring requests (throughput: "
    f"{NUM_WINDOWS} windows of time; failures: single requests) are drawn anew, since neighbours share queues and caches; widened by "
    "Student's t for few of them",
    "interval of repeated runs": "95% of the change of the mean over runs, by how far runs differ: Welch's t; where one "
    "side is a single run, it is taken to vary as the other side's runs do",
    "same": "the whole interval lies within the threshold (where none is given 5%, of failed requests 1 point)",
    "better, worse": "the interval leaves zero out, and does not lie within the threshold",
    "not enough data": "the interval holds zero and reaches beyond the threshold; or fewer than 5 samples lie beyond a "
    "percentile (500 samples for p99)",
    "regression": "a figure named by --threshold that is worse, and by more than its threshold",
    "hit_rate": "cached tokens / prompt tokens of answered requests, as the server reports them",
    "failed": "failed requests / all requests",
    "goodput": "requests within the goals / all requests; compared when both runs had the same goals",
    "output_tok_s": "output tokens that arrived within the measured time / measured time",
}
"""What a comparison's words mean; stored with it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a directory holds: a run, or several of one workload that were repeated."""

    name: str
    runs: tuple[Run, ...]

    @property
    def sound(self) -> tuple[Run, ...]:
        """The runs that count: those in which the load generator was not the limit, if there are any."""
        return tuple(r for r in self.runs if not r.report.client_limited) or self.runs

    @property
    def report(self) -> Report:
        """Of the first run that counts; they differ in their seed and in what came."""
        return self.sound[0].report


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `bench compare -o json` writes."""

    schema: str
    before: str
    after: str
    workload: str
    """As A's was written, with its load."""
    workload_digest: str
    differs: dict[str, tuple[Any, Any]]
    """Facts that are not the workload: server, versions, plan, seed."""
    client_limited: dict[str, str]
    """By run, why its load generator was the limit; of repeated runs only where it was in all, else they are left out."""
    changes: tuple[Change, ...]
    regressions: tuple[str, ...]
    """Figures that are worse by more than the threshold they were given."""
    num_runs: tuple[int, int] = (1, 1)
    """That count on each side."""
    have_same_prompts: bool = False
    """Whether one server was sent prompts of one seed on both sides."""
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    @property
    def exit_code(self) -> ExitCode:
        """6 on a regression, or where a gate was given and the figures are not the servers'."""
        is_gated = any(change.is_gate for change in self.changes)
        return (
            ExitCode.GATE if self.regressions or (is_gated and self.client_limited) else ExitCode.OK
        )


def parse_thresholds(given: Sequence[str]) -> dict[str, float]:
    """Read `ttft_p99=5%`, several in one text by commas.

    Raises:
        UsageError: for what is no figure, or no percentage.
    """
    found: dict[str, float] = {}
    for item in (item.strip() for text in given for item in text.split(",")):
        match = _THRESHOLD.match(item)
        if match is None or not is_figure(match[1]):
            raise UsageError(
                f"--threshold {item!r}: cannot read it",
                f"write FIGURE=N%, figures are {', '.join(LATENCIES)} with _mean, _p50, _p90, _p95 or _p99; "
                f"output_tok_s; and in points {', '.join(SHARES)}",
            )
        found[match[1]] = float(match[2]) / 100
    return found


def compare(before: Stored, after: Stored, thresholds: Mapping[str, float]) -> Comparison:
    """Compare two runs of one workload, or two sets of them by how far runs differ.

    Raises:
        DynctlError: when they are not of one workload, or one was interrupted; says what differs. Of goodput too when
            they had not the same goals.
    """
    _check_alike(before, after)
    if "goodput" in thresholds and not _have_goals(before.report, after.report):
        raise DynctlError(
            f"goodput needs the same goals in both: {before.name} had {_goals(before)}, {after.name} {_goals(after)}",
            "give both runs the same --slo, or leave goodput out of --threshold",
            code=ExitCode.REFUSED,
        )
    figures = dict.fromkeys([*default_figures(before.report, after.report), *thresholds])
    changes = _changes(before.sound, after.sound, figures, thresholds)
    return Comparison(
        SCHEMA,
        before.name,
        after.name,
        f"{before.report.setting.workload}, {before.report.setting.load}",
        workload_digest(before.report.setting),
        _differences(before, after),
        {
            run.name: run.report.client_limited
            for run in (*before.sound, *after.sound)
            if run.report.client_limited
        },
        changes,
        tuple(change.figure for change in changes if change.is_regression),
        (len(before.sound), len(after.sound)),
        bool(_prompts(before) & _prompts(after)),
    )


def _prompts(stored: Stored) -> set[tuple[str, int]]:
    """What names the prompts a server was sent; those of runs that are left out as well."""
    settings = [run.report.setting for run in stored.runs]
    return {(setting.url, setting.seed) for setting in settings}


def _changes(
    before: Sequence[Run],
    after: Sequence[Run],
    figures: Iterable[str],
    thresholds: Mapping[str, float],
) -> tuple[Change, ...]:
    one, other = [side_of(run) for run in before], [side_of(run) for run in after]
    are_repeated = len(one) + len(other) > 2
    found = []
    for name in figures:
        tolerance, is_gate = thresholds.get(name, tolerance_of(name)), name in thresholds
        if are_repeated:
            early = [value_on(side, name) for side in one]
            late = [value_on(side, name) for side in other]
            found.append(changed_between(name, early, late, tolerance, is_gate=is_gate))
        else:
            found.append(changed(one[0], other[0], name, tolerance, is_gate=is_gate))
    return tuple(change for change in found if change is not None)


def default_figures(*reports: Report) -> list[str]:
    """What is looked at where nothing is named."""
    has_itl = all("itl_ms" in report.metrics for report in reports)
    names = [name if has_itl or name != "itl_p99" else "chunk_gap_p99" for name in DEFAULT_FIGURES]
    if _have_goals(*reports):
        names.append("goodput")
    return names


def _have_goals(*reports: Report) -> bool:
    goals = {report.setting.slo for report in reports}
    return len(goals) == 1 and goals != {Slo()}


def _goals(stored: Stored) -> str:
    slo = stored.report.setting.slo
    goals = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}
    return ",".join(f"{k}={v:g}" for k, v in goals.items() if v is not None) or "none"


def _check_alike(before: Stored, after: Stored) -> None:
    for run in (*before.runs, *after.runs):
        if run.report.is_partial:
            raise DynctlError(
                f"{run.name} was interrupted: it had less time than it was asked for, so other caches and queues",
                "run it again to its end",
                code=ExitCode.REFUSED,
            )
        if run.report.requests.ok < 2:
            raise DynctlError(
                f"{run.name}: {run.report.requests.ok} of {run.report.requests.sent} requests were answered",
                f"dynctl bench show {run.name} says why",
                code=ExitCode.REFUSED,
            )
    one, other = workload_facts(before.report.setting), workload_facts(after.report.setting)
    one_text, other_text = _workload_text(before.report), _workload_text(after.report)
    differs = [
        f"{one_text} and {other_text}"
        if key == "workload"
        else f"{key} {one[key]} and {other[key]}"
        for key in one
        if one[key] != other[key]
    ]
    if differs:
        raise DynctlError(
            f"{before.name} and {after.name} are not of one workload: {'; '.join(differs)}",
            "give both runs the same workload or trace, load, duration, warm-up and API",
            code=ExitCode.REFUSED,
        )


def _workload_text(report: Report) -> str:
    setting = report.setting
    return setting.workload + (f" ({setting.recorded.digest})" if setting.recorded else "")


def _differences(before: Stored, after: Stored) -> dict[str, tuple[Any, Any]]:
    def facts(stored: Stored) -> dict[str, Any]:
        setting = stored.report.setting
        seeds = [run.report.setting.seed for run in stored.sound]
        seed = seeds[0] if len(seeds) == 1 else f"{seeds[0]} and {len(seeds) - 1} more"
        named = {"url": setting.url, "model": setting.model, "seed": seed}
        return named | {k: v for k, v in stored.report.facts.items() if k != "started_unix_s"}

    one, other = facts(before), facts(after)
    return {
        key: (one.get(key), other.get(key))
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    }
