"""`dynctl plan`: lay out pools on the hosts and say what to expect. IO: ssh, files, terminal."""

import errno
import os
import shlex
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.cli.kept import plan_path, read_book, read_calibration
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, finite
from dynctl.cli.output import emit, emit_json, say, table, wait_for
from dynctl.cli.second_opinion import Predictor, find_python
from dynctl.cli.session import ask_about_keys, load
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Plan, PlannedDeployment
from dynctl.errors import DynctlError, PlanError, UsageError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.cli.planning import Outcome, Traced
    from dynctl.planner.choosing import Trail
    from dynctl.planner.opinion import Opinion
    from dynctl.planner.whatif import Case
    from dynctl.planner.why import Story


class PlanOutput(StrEnum):
    """How the plan is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Out = Annotated[
    Path | None,
    typer.Option("--out", help="Where to write the plan; default: plan.yaml by the inventory."),
]
Why = Annotated[
    bool, typer.Option("--why", help="Tell every layout that was looked at, and why not it.")
]
WhatIf = Annotated[
    str | None,
    typer.Option("--what-if", help="Compare with a change: '+2 h100, rate x1.5, kv fp8'."),
]
Traces = Annotated[
    list[str] | None,
    typer.Option("--trace", help="[DEPLOYMENT=]FILE of JSON lines: plan for this workload."),
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Replay the workload on simulated engines.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=10**12, help="Of the simulation.")]
Advanced = Annotated[
    bool, typer.Option("--advanced", help="Try pipelines also where the model fits without.")
]
PythonTopology = Annotated[
    Path | None,
    typer.Option("--python-topology", help="Run this Python file instead of the inventory."),
]
Captures = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="[NAME=]PATH",
        help="Plan from what dynctl discover --script printed, without reaching the hosts.",
    ),
]
DetailedExitcode = Annotated[
    bool,
    typer.Option(
        "--detailed-exitcode", help="Exit 10 when the plan differs from the file, 0 when not."
    ),
]
Second = Annotated[
    Predictor | None,
    typer.Option("--predictor", help="Ask this predictor too, and show both with the gap."),
]
SecondPython = Annotated[
    Path | None,
    typer.Option(
        "--predictor-python",
        envvar="DYNCTL_PREDICTOR_PYTHON",
        help="Python of the environment that has the predictor, or that environment's directory.",
    ),
]
SecondTimeout = Annotated[
    float,
    typer.Option(
        "--predictor-timeout",
        min=1,
        max=86400,
        callback=finite,
        help="Seconds it may take for all answers.",
    ),
]
PlanOutputOption = Annotated[
    PlanOutput, typer.Option("-o", "--output", help="table for people, json or yaml.")
]


def command(
    *,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    out: Out = None,
    why: Why = False,
    what_if: WhatIf = None,
    trace: Traces = None,
    simulate: Simulate = False,
    seed: Seed = 1,
    advanced: Advanced = False,
    python_topology: PythonTopology = None,
    captures: Captures = None,
    detailed_exitcode: DetailedExitcode = False,
    predictor: Second = None,
    predictor_python: SecondPython = None,
    predictor_timeout: SecondTimeout = 180.0,
    output: PlanOutputOption = PlanOutput.TABLE,
) -> None:
    """Lay out prefill and decode pools, with predicted latency and throughput.

    Describes the hosts, reads the models' config.json from them, and writes plan.yaml, which dynctl up brings about.
    Changes nothing on a host. Exit 4 when a deployment cannot be laid out, 3 when hosts had to be left out.

    Example: dynctl plan --why --what-if '+2 h100'
    """
    from dynctl.cli import planning

    second = find_python(predictor_python) if predictor is not None else None
    if python_topology is not None:
        wanted = planning.load_python(python_topology).inventory
    else:
        wanted = load(inventory, local=local)
    path = out or plan_path(wanted)
    _check_out(path, Path(wanted.path), is_named=out is not None)
    traces = planning.read_traces(trace or [], wanted)
    case = planning.with_workloads(wait_for(_survey(wanted, captures or [])), traces)
    if what_if is not None:
        _compare(what_if, case, advanced=advanced, output=output)
        return
    made = _make(case, traces, advanced=advanced)
    is_changed = _write(path, made.plan)
    extra = _Extra(why, simulate, seed, second, predictor_timeout)
    failure = _print(made, extra, output)
    source = inventory if python_topology is None else python_topology
    named = "" if out is None and python_topology is None else f" {shlex.quote(str(path))}"
    following = f"dynctl up{named}{_flags(source, local=local)}"
    say(f"{'wrote' if is_changed else 'no changes in'} {path}; next: {following}")
    _tell_unfit(case.topology, made.plan)
    _raise_failures(case.topology, path)
    if failure is not None:
        raise failure
    if detailed_exitcode and is_changed:
        from dynctl.errors import ExitCode

        raise typer.Exit(int(ExitCode.CHANGES))


@dataclass(frozen=True, slots=True)
class _Extra:
    """What is said beyond the plan."""

    why: bool
    simulate: bool
    seed: int
    second: Path | None
    """Another predictor's Python; None: nobody else is asked."""
    limit_s: float


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan with what it was made from and how it was found."""

    plan: Plan
    case: "Case"
    trails: "dict[str, Trail]"
    traces: "dict[str, Traced]"


def _make(case: "Case", traces: "dict[str, Traced]", *, advanced: bool) -> _Made:
    from dynctl.cli.planning import look_again
    from dynctl.planner.choosing import Trail
    from dynctl.planner.digest import with_digest
    from dynctl.planner.search import make_plan
    from dynctl.planner.trace import with_model_len

    trails: dict[str, Trail] = {}
    plan = make_plan(
        case.topology, case.inventory, case.models, trails, case.calibration, advanced=advanced
    )
    traces = look_again(plan, traces)
    if traces:
        deployments = tuple(
            with_model_len(planned, traces[planned.name].facts)
            if planned.name in traces
            else planned
            for planned in plan.deployments
        )
        plan = with_digest(replace(plan, deployments=deployments))
    return _Made(plan, case, trails, traces)


def _compare(text: str, case: "Case", *, advanced: bool, output: PlanOutput) -> None:
    from dynctl.cli.planning import Outcome, draw_what_if
    from dynctl.planner.whatif import apply_changes

    def outcome(one: "Case") -> "Outcome":
        try:
            return Outcome(_make(one, {}, advanced=advanced).plan)
        except PlanError as error:
            return Outcome(None, f"{error.message} ({error.hint})" if error.hint else error.message)

    before, after = outcome(case), outcome(apply_changes(text, case))
    if output is PlanOutput.JSON:
        emit_json(
            {
                "schema": "dynctl.what-if/1",
                "change": text,
                "before": asdict(before),
                "after": asdict(after),
            }
        )
        return
    draw_what_if(text, before, after)


def _flags(inventory: Path, *, local: bool) -> str:
    if local:
        return " --local"
    return "" if inventory == DEFAULT_INVENTORY else f" -i {shlex.quote(str(inventory))}"


async def _survey(wanted: Inventory, captures: list[str]) -> "Case":
    from dynctl.discovery.survey import survey
    from dynctl.planner.whatif import Case
    from dynctl.remote.fleet import open_fleet

    calibration = read_calibration()
    if captures:
        from dynctl.discovery.offline import read_files, survey_files

        found = await survey_files(wanted, read_files(captures))
        return Case(found.topology, found.inventory, found.models, found.configs, calibration)
    async with open_fleet(wanted.hosts, wanted.ssh, ask_about_keys) as fleet:
        found = await survey(wanted, fleet)
        topology = found.topology.with_links(read_book(wanted))
        return Case(topology, found.inventory, found.models, found.configs, calibration)


def _check_out(out: Path, inventory: Path, *, is_named: bool) -> None:
    """Refuse, before any host is asked, what cannot be written; a directory that is not there may be mistyped.

    Raises:
        UsageError: names the directory.
    """
    what = f"--out {out}" if is_named else str(out)
    parent = Path(os.path.realpath(out)).parent
    try:
        is_directory, is_other = out.is_dir(), out.exists() and not out.is_file()
        has_parent = parent.is_dir()
        is_inventory = out.exists() and inventory.exists() and out.samefile(inventory)
    except OSError as error:
        raise UsageError(f"{what}: {reason(error)}", "name a file elsewhere: --out FILE") from error
    if is_directory:
        raise UsageError(f"{what} is a directory", f"name a file: --out {out / 'plan.yaml'}")
    if is_other:
        # Replaced by a file, a device would be gone for everybody; a pipe would be read for ever.
        raise UsageError(f"{what} is no file", "-o yaml prints the plan")
    if is_inventory:
        raise UsageError(f"{what} is the inventory itself", "name another file for the plan")
    if not is_named:
        return  # its directory is made when it is written
    if not has_parent:
        raise UsageError(
            f"--out {out}: there is no directory {parent}",
            f"make it (mkdir -p {shlex.quote(str(parent))}), or name a file elsewhere",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"--out {out}: cannot write in {parent}: {os.strerror(errno.EACCES)}",
            "name a file elsewhere",
        )


def _write(path: Path, plan: Plan) -> bool:
    """Write the plan unless the file already holds these bytes; return whether it changed."""
    from dynctl.files import rewrite
    from dynctl.planner.text import to_yaml

    content = to_yaml(plan).encode()
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        before = b""
    if before == content:
        return False
    if _is_edited(before, path):
        kept = path.with_name(path.name + ".edited")
        rewrite(kept, before)
        say(f"{path} had been edited by hand: kept as {kept}")
    rewrite(path, content)
    return True


def _is_edited(content: bytes, path: Path) -> bool:
    """Whether a plan file was changed since it was made: its digest is not that of its content."""
    from dynctl.errors import InventoryError
    from dynctl.planner.digest import digest_of
    from dynctl.planner.text import from_yaml

    if not content:
        return False
    try:
        plan = from_yaml(content.decode(errors="replace"), str(path))
    except InventoryError:
        return True
    return plan.digest != digest_of(plan)


def _print(made: _Made, extra: _Extra, output: PlanOutput) -> DynctlError | None:
    """Print the plan and what was asked beyond it; return why another predictor gave no opinion."""
    from dynctl.cli import planning, second_opinion

    plan, case = made.plan, made.case
    failure: DynctlError | None = None
    opinions: list[Opinion] = []
    if extra.second is not None:
        try:
            opinions = second_opinion.ask(plan, case, extra.second, extra.limit_s)
        except DynctlError as error:
            failure = error
    reports = planning.simulate_plan(plan, case, made.traces, extra.seed) if extra.simulate else {}
    stories: tuple[Story, ...] = ()
    if extra.why:
        from dynctl.planner.why import tell

        facts = {name: traced.facts for name, traced in made.traces.items()}
        stories = tell(
            plan, case.topology, case.inventory, case.models, made.trails, facts, case.calibration
        )
    if output is PlanOutput.JSON:
        document: dict[str, Any] = {"schema": "dynctl.plan/1", **asdict(plan)}
        if stories:
            document["why"] = [asdict(story) for story in stories]
        if made.traces:
            document["traces"] = {n: asdict(t.facts) for n, t in made.traces.items()}
        if reports:
            document["simulations"] = {name: asdict(r) for name, r in reports.items()}
        if opinions:
            document["second_opinions"] = [asdict(opinion) for opinion in opinions]
        emit_json(document)
        return failure
    if output is PlanOutput.YAML:
        from dynctl.planner.text import to_yaml

        emit(to_yaml(plan))
        return failure
    for deployment in plan.deployments:
        _draw(plan, deployment)
    planning.draw_traces(made.traces)
    planning.draw_stories(stories)
    planning.draw_simulations(reports)
    second_opinion.draw(opinions)
    for warning in plan.warnings:
        say(warning)
    return failure


def _draw(plan: Plan, planned: PlannedDeployment) -> None:
    from dynctl.core.text import clean
    from dynctl.planner.drawing import estimate_rows, limit_rows, memory_rows, replica_rows

    emit(f"{planned.name}  {clean(planned.model, 60)}  engine {planned.engine_kind}")
    emit(f"verdict  {clean(planned.verdict, 200)}")
    for why in planned.reasons:
        emit(f"  - {clean(why, 300)}")
    emit("")
    table(["ENGINE", "ROLE", "HOST", "PARALLEL", "GPUS", "PORT"], replica_rows(planned))
    relays = ", ".join(f"{host.name}:{host.relay_port}" for host in plan.hosts)
    emit(
        f"router   {planned.router.host_name}  {planned.router.listen}  policy {planned.router.policy}"
    )
    emit(f"relays   {relays}")
    if rows := memory_rows(planned):
        emit("")
        columns = [
            "PER GPU",
            "TOTAL",
            "RESERVE",
            "WEIGHTS",
            "ACTIVATIONS",
            "KV",
            "TOKENS PER ENGINE",
        ]
        table(columns, rows, right=columns[1:])
    if rows := limit_rows(planned):
        emit("")
        table(["LIMIT", "VALUE", "HOW"], rows, right=["VALUE"])
    if rows := estimate_rows(planned):
        emit("")
        columns = ["EXPECTED", "LOW", "LIKELY", "HIGH"]
        if len(sources := {row[-1] for row in rows}) == 1:
            table(columns, [row[:-1] for row in rows], right=columns[1:])
            emit(f"how      {clean(sources.pop(), 300)}")
        else:
            table([*columns, "HOW"], rows, right=columns[1:])
    emit("")


def _tell_unfit(topology: Topology, plan: Plan) -> None:
    """Say now what `up` will refuse then."""
    planned = {host.name for host in plan.hosts}
    for host in topology.hosts:
        if host.name in planned and host.python_problem:
            say(f"note: {host.name} is in the plan, and up will refuse it: {host.python_problem}")


def _raise_failures(topology: Topology, path: Path) -> None:
    if topology.failures:
        from dynctl.discovery.survey import causes
        from dynctl.errors import ExitCode

        raise DynctlError(
            f"{path} was planned without hosts that could not be described:\n{causes(topology)}",
            "correct them and plan again, or take them out of the inventory",
            code=ExitCode.PARTIAL,
        )
