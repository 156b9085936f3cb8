"""What `dynctl plan` says beyond the plan: why, what if, what a trace says, a simulation. IO: files, terminal."""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dynctl.cli.output import emit, table
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Figure, Plan, PlannedDeployment
from dynctl.core.text import clean
from dynctl.core.units import format_number, format_seconds
from dynctl.errors import PlanError, UsageError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.inventory.load import Loaded
    from dynctl.planner.replayed import SimReport
    from dynctl.planner.trace import Trace, TraceFacts
    from dynctl.planner.whatif import Case
    from dynctl.planner.why import Story

MADE_CALLS = 600
"""Requests drawn for a simulation without a trace."""


def load_python(path: Path) -> "Loaded":
    """Run a Python topology file that the operator named, and read what it defines like an inventory.

    Raises:
        UsageError: when it cannot be run or defines no cluster.
        InventoryError: with every problem of what it defines.
    """
    from dynctl.cli.session import is_there
    from dynctl.inventory.load import read_document
    from dynctl.planner.code import document
    from dynctl.store import to_json

    if not is_there(path):
        raise UsageError(f"{path} does not exist", "name the Python file that defines the cluster")
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{path} cannot be run: {type(error).__name__}: {clean(str(error), 300)}",
            "it has to define cluster, nodes and LLMs; see dynctl.planner.code",
        ) from error
    try:
        made = to_json(document(names, str(path))).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{path} defines what no inventory can hold: {clean(str(error), 300)}",
            "write texts, numbers, lists and mappings",
        ) from error
    loaded = read_document(made, f"{path} (as a document)", path.parent)
    return replace(loaded, inventory=replace(loaded.inventory, path=str(path)))


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace and the deployment it stands for."""

    name: str
    trace: "Trace"
    facts: "TraceFacts"


def read_traces(given: Sequence[str], inventory: Inventory) -> dict[str, Traced]:
    """Read `FILE` (with one deployment) or `DEPLOYMENT=FILE`.

    Raises:
        UsageError: when a file is no trace, or the deployment it stands for is not known.
    """
    from dynctl.planner.trace import look_at
    from dynctl.planner.trace_lines import read_trace

    names = [wish.name for wish in inventory.deployments]
    found: dict[str, Traced] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals:
            name, file = (names[0] if len(names) == 1 else ""), text
        if name not in names:
            raise UsageError(
                f"--trace {text}: which deployment is it of?",
                f"write --trace DEPLOYMENT=FILE; deployments are: {', '.join(names)}",
            )
        try:
            with Path(file).open(encoding="utf-8") as lines:
                trace = read_trace(lines, Path(file).name)
        except (OSError, UnicodeDecodeError) as error:
            cause = reason(error) if isinstance(error, OSError) else "this is no UTF-8 text"
            raise UsageError(
                f"--trace: cannot read {file}: {cause}", "give a file of JSON lines, a request each"
            ) from error
        found[name] = Traced(name, trace, look_at(trace))
    return found


def with_workloads(case: "Case", traces: Mapping[str, Traced]) -> "Case":
    """The case with each traced deployment's workload taken from its trace."""
    from dynctl.planner.trace import workload_of

    wishes = tuple(
        replace(wish, workload=workload_of(traces[wish.name].facts))
        if wish.name in traces
        else wish
        for wish in case.inventory.deployments
    )
    return replace(case, inventory=replace(case.inventory, deployments=wishes))


def look_again(plan: Plan, traces: Mapping[str, Traced]) -> dict[str, Traced]:
    """The traces with what fits the planned KV room."""
    from dynctl.planner.trace import look_at

    found = dict(traces)
    for planned in plan.deployments:
        tokens = sum(
            pool.memory.kv_capacity_tokens * len(pool.replicas)
            for pool in planned.pools
            if pool.memory is not None
        )
        if planned.name in traces and tokens:
            traced = traces[planned.name]
            found[planned.name] = replace(traced, facts=look_at(traced.trace, tokens))
    return found


def simulate_plan(
    plan: Plan, case: "Case", traces: Mapping[str, Traced], seed: int
) -> "dict[str, SimReport]":
    """Replay every deployment's workload.

    Raises:
        PlanError: when nothing is known of any deployment's engines.
    """
    from dynctl.planner.prompts import make_trace
    from dynctl.planner.simulate import SENDING_S, SimSetting, simulate
    from dynctl.planner.virtual_plan import virtual_deployment

    wishes = {wish.name: wish for wish in case.inventory.deployments}
    reports: dict[str, SimReport] = {}
    failed: list[PlanError] = []
    for planned in plan.deployments:
        wish = wishes[planned.name]
        try:
            made = virtual_deployment(
                planned, wish, case.models.get(planned.name), case.topology, case.calibration
            )
        except PlanError as error:
            failed.append(error)
            continue
        trace = (
            traces[planned.name].trace
            if planned.name in traces
            else make_trace(wish.workload, MADE_CALLS, seed)
        )
        setting = SimSetting(
            planned.router.policy,
            seed,
            made.transfer_bytes_s,
            SENDING_S if made.host_s is None else made.host_s,
        )
        reports[planned.name] = simulate(trace, made.engines, setting, wish.slo)
    if failed and not reports:
        raise failed[0]
    return reports


def draw_stories(stories: "Sequence[Story]") -> None:
    """Print why each deployment is laid out as it is."""
    for story in stories:
        emit(f"why {story.name}: {clean(story.verdict, 200)}")
        emit(f"{story.num_for} of 6 facts speak for a cluster of engines")
        marks = {True: "yes", False: "no", None: "?"}
        for fact in story.facts:
            emit(f"  {marks[fact.speaks_for]:<4}{fact.name}: {clean(fact.text, 200)}")
        if story.considered:
            emit("")
            table(
                ["LAYOUT", "GPUS", "TTFT P99", "ITL P99", "REQ/S", "OUTCOME"],
                [
                    [
                        each.name,
                        str(each.num_gpus),
                        _milliseconds(each.ttft_p99_ms),
                        _milliseconds(each.itl_p99_ms),
                        format_number(each.rate_rps),
                        each.outcome,
                    ]
                    for each in story.considered
                ],
                right=["GPUS", "TTFT P99", "ITL P99", "REQ/S"],
            )
        for misfit in story.misfits:
            emit(f"  does not fit: {clean(misfit, 300)}")
        _draw_ratio(story)
        for line in story.transfer:
            emit(f"  {clean(line, 300)}")
        emit("")


def _draw_ratio(story: "Story") -> None:
    if not story.ratio:
        return
    emit("")
    table(
        ["PREFILL:DECODE", "REQ/S", "TTFT P99", "ITL P99", "P BUSY", "D BUSY", ""],
        [
            [
                f"{row.num_prefill}:{row.num_decode}",
                format_number(row.rate_rps),
                _milliseconds(row.ttft_p99_ms),
                _milliseconds(row.itl_p99_ms),
                f"{row.prefill_busy:.0%}",
                f"{row.decode_busy:.0%}",
                "chosen" if row.is_chosen else "",
            ]
            for row in story.ratio
        ],
        right=["PREFILL:DECODE", "REQ/S", "TTFT P99", "ITL P99", "P BUSY", "D BUSY"],
    )
    if story.ratio_note:
        emit(f"  {story.ratio_note}")


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if value == float("inf") else format_seconds(value / 1e3)


def draw_traces(traces: Mapping[str, Traced]) -> None:
    """Print what each trace says."""
    from dynctl.planner.trace import advice

    for traced in traces.values():
        facts = traced.facts
        emit(
            f"trace of {traced.name}  {clean(traced.trace.name, 80)}: {facts.num_calls} requests in "
            f"{facts.duration_s:.0f} s, {format_number(facts.rate_rps)} req/s"
        )
        table(
            ["TOKENS", "MEAN", "P50", "P90", "P99", "P99.9", "MOST"],
            [
                [name, f"{of.mean:.0f}", *map(str, (of.p50, of.p90, of.p99, of.p999, of.longest))]
                for name, of in (("prompt", facts.isl), ("answer", facts.osl))
            ],
            right=["MEAN", "P50", "P90", "P99", "P99.9", "MOST"],
        )
        emit(
            f"sessions have {facts.session_turns:.1f} requests (90 % at most {facts.session_turns_p90})"
        )
        for line in advice(facts):
            emit(f"  - {clean(line, 300)}")
        emit("")


def draw_simulations(reports: "Mapping[str, SimReport]") -> None:
    """Print what came of each replay."""
    for name, report in reports.items():
        emit(
            f"simulation of {name}  {clean(report.name, 80)}, policy {report.policy}, seed {report.seed}: "
            f"{report.num_calls} requests, {report.num_failed} failed"
        )
        table(
            ["MS", "P50", "P95", "P99", "MEAN"],
            [
                [label, *(format_number(v) for v in (s.p50, s.p95, s.p99, s.mean))]
                for label, s in (
                    ("TTFT", report.ttft_ms),
                    ("ITL", report.itl_ms),
                    ("TPOT", report.tpot_ms),
                )
            ],
            right=["P50", "P95", "P99", "MEAN"],
        )
        emit(
            f"hit rate {report.hit_ratio:.1%}, goodput {report.goodput_ratio:.1%} of requests, "
            f"{format_number(report.out_tokens_s)} tok/s, busiest engine {report.load_spread:.2f}× the mean"
        )
        table(
            ["ENGINE", "ROLE", "REQUESTS", "BUSY", "PEAK KV", "PREEMPTED"],
            [
                [
                    load.id,
                    load.role,
                    str(load.num_requests),
                    f"{load.busy_ratio:.0%}",
                    f"{load.peak_kv_ratio:.0%}",
                    str(load.num_preemptions),
                ]
                for load in report.engines
            ],
            right=["REQUESTS", "BUSY", "PEAK KV", "PREEMPTED"],
        )
        emit("")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan, or why there is none."""

    plan: Plan | None
    refusal: str = ""


def draw_what_if(text: str, before: Outcome, after: Outcome) -> None:
    """Print both plans beside each other, and why what has no estimate has none."""
    from dynctl.planner.check import UNPRICED

    emit(f"what if {clean(text, 200)}")
    for label, outcome in (("now", before), ("then", after)):
        if outcome.plan is None:
            emit(f"{label}: refused: {clean(outcome.refusal, 500)}")
    rows, reasons = [], []
    names = dict.fromkeys(
        d.name for outcome in (before, after) if outcome.plan for d in outcome.plan.deployments
    )
    for name in names:
        for label, outcome in (("now", before), ("then", after)):
            planned = _named(outcome.plan, name)
            if planned is not None:
                rows.append([name, label, *_summary(planned)])
                reasons += [
                    f"{name} {label}: {clean(reason, 500)}"
                    for reason in planned.reasons
                    if reason.startswith(UNPRICED)
                ]
    table(
        ["DEPLOYMENT", "", "LAYOUT", "GPUS", "TTFT", "ITL", "GOODPUT", "TOK/S AT MOST"],
        rows,
        right=["GPUS", "TTFT", "ITL", "GOODPUT", "TOK/S AT MOST"],
    )
    emit("\n".join([*reasons, "nothing was written"]))


def _named(plan: Plan | None, name: str) -> PlannedDeployment | None:
    found = plan.deployments if plan is not None else ()
    return next((d for d in found if d.name == name), None)


def _summary(planned: PlannedDeployment) -> list[str]:
    from dynctl.planner.drawing import parallelism_text

    layout = " + ".join(
        f"{len(pool.replicas)} {pool.role.value} {parallelism_text(pool.parallelism)}"
        for pool in planned.pools
    )
    replicas = [replica for pool in planned.pools for replica in pool.replicas]
    gpus = sum(len(member.gpus) for replica in replicas for member in replica.members)
    found = planned.estimate
    if found is None:
        return [layout, str(gpus), "–", "–", "–", "–"]
    return [
        layout,
        str(gpus),
        _milliseconds(found.ttft_ms.expected),
        _milliseconds(found.itl_ms.expected),
        _expected(found.goodput_rps),
        _expected(found.out_tokens_s),
    ]


def _expected(figure: Figure | None) -> str:
    return "–" if figure is None else format_number(figure.expected)
