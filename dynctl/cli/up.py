"""`dynctl up`: bring the cluster to the plan. IO: ssh, files, terminal."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.kept import plan_path, plan_text, read_book, read_calibration
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Yes
from dynctl.cli.output import Stage, confirm, emit, progress, say, unasked, wait_for
from dynctl.cli.session import ask_about_keys, load
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Plan
from dynctl.core.text import clean
from dynctl.errors import DeployError, DynctlError, ExitCode, UsageError

if TYPE_CHECKING:
    from dynctl.agents.protocol import AgentStatus
    from dynctl.deploy.up import Comparison
    from dynctl.discovery.survey import Survey
    from dynctl.planner.calibration import Calibration


def command(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="The plan to bring about; default: plan.yaml by the inventory, made if missing."
        ),
    ] = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    yes: Yes = False,
) -> None:
    """Bring the cluster to the plan: agents, engines, router.

    Compares the plan with what runs, shows the steps, checks every host for what would stop them, and only then
    changes anything. Running it again changes nothing. Exit 4 when it is refused beforehand, 3 when some hosts failed,
    5 when somebody else is at it, 6 when an engine does not become ready, or a router does not reach it.

    Example: dynctl up --yes
    """
    if plan is not None:
        _refuse_inventory(plan)
    wanted = load(inventory, local=local)
    stage = Stage("interrupted; nothing was changed on the hosts")
    after = (
        "interrupted; agents go on with what they were told: dynctl status shows how far that is\n"
        f"to go on from there: {unasked()}; to undo it: dynctl down {'--local' if local else shlex.join(['-i', str(inventory)])} --yes"
    )
    wait_for(
        _up(
            wanted,
            plan or plan_path(wanted),
            after,
            stage,
            yes=yes or local,
            must_exist=plan is not None,
        ),
        stage,
    )


async def _up(
    wanted: Inventory, path: Path, after: str, stage: Stage, *, yes: bool, must_exist: bool
) -> None:
    from dynctl.deploy import up
    from dynctl.deploy.slices import listens_openly, routed_by_text
    from dynctl.discovery.survey import survey
    from dynctl.remote.fleet import open_fleet

    calibration = read_calibration()
    written = _read(path, must_exist=must_exist)
    async with open_fleet(wanted.hosts, wanted.ssh, ask_about_keys) as fleet:
        found = await survey(wanted, fleet)
        found = replace(found, topology=found.topology.with_links(read_book(wanted)))
        plan = _check_or_make(path, written, found, calibration)
        _tell_failures(found.topology, plan)
        comparison = await up.compare(wanted, plan, found.topology, fleet, progress)
        if not comparison.steps:
            statuses = await up.confirm_ready(comparison)
            say("no changes")
        else:
            _show(comparison, plan)
            problems = await up.check(comparison, found.topology)
            if problems:
                lines = [
                    f"{p.host_name}: {p.text}" + (f"\n    {p.hint}" if p.hint else "")
                    for p in problems
                ]
                raise DeployError(
                    "not started, nothing was changed:\n  " + "\n  ".join(lines),
                    f"correct {'it' if len(lines) == 1 else 'them'} and run {unasked()} again",
                    code=ExitCode.REFUSED,
                )
            await confirm("go ahead?", yes=yes)
            stage.if_interrupted = after
            statuses = await up.change(comparison)
        for name, host_name in routed_by_text(wanted, plan):
            say(
                f"note: {name} is routed by blocks of text, not of tokens: its servers do not say which tokenizer they use; "
                f"deployments[].tokenizer names a directory on {host_name} that holds it"
            )
        for goal in comparison.work.goals.hosts.values():
            for address in listens_openly(goal.slice):
                say(f"note: {goal.slice.host_name} listens on {address}")
    _show_addresses(wanted, plan, statuses)


def _show_addresses(wanted: Inventory, plan: Plan, statuses: "Mapping[str, AgentStatus]") -> None:
    """Where clients connect, of each deployment that serves; of the others `up` has said that they answer nobody."""
    from dynctl.deploy.awaited import emptied

    unserved = emptied(statuses.values())
    for deployment in plan.deployments:
        if deployment.name not in unserved:
            scheme = "https" if _has_tls(wanted, deployment.name) else "http"
            at = f"{scheme}://{deployment.router.listen}/v1"
            emit(f"{deployment.name}  {at}  on {deployment.router.host_name}")


def _refuse_inventory(path: Path) -> None:
    """Inventories go by -i: what this argument takes is a plan.

    Raises:
        UsageError: when the file is no plan but may be an inventory.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return  # whatever reads it as a plan says it better
    if path.suffix == ".py" or not any(line.startswith(("schema:", "digest:")) for line in lines):
        raise UsageError(
            f"{path} is no plan",
            f"if it is an inventory: dynctl up -i {path}; plans are what dynctl plan writes",
        )


def _has_tls(wanted: Inventory, name: str) -> bool:
    return any(wish.router.tls_cert is not None for wish in wanted.deployments if wish.name == name)


def _read(path: Path, *, must_exist: bool) -> tuple[str, Plan] | None:
    """Read a plan as it is written, and what it says; None when there is none.

    Raises:
        InventoryError: when it cannot be read, with every problem of it.
        UsageError: when it has to be there and is not.
    """
    from dynctl.planner.text import from_yaml

    text = plan_text(path)
    if text is None:
        if must_exist:
            raise UsageError(f"{path} does not exist", "dynctl plan writes it")
        return None
    return text, from_yaml(text, str(path))


def _check_or_make(
    path: Path, read: tuple[str, Plan] | None, found: "Survey", calibration: "Calibration"
) -> Plan:
    from dynctl.deploy.up import refuse_missing
    from dynctl.files import rewrite
    from dynctl.planner.check import refuse_simulated
    from dynctl.planner.faults import PlanFaultsError
    from dynctl.planner.text import located, to_yaml

    if read is None:
        _refuse_failures(found.topology)
        plan = found.plan(calibration)
        refuse_simulated(plan, found.topology)
        rewrite(path, to_yaml(plan).encode())
        say(f"wrote {path}")
        return plan
    text, written = read
    refuse_missing(written, found.topology)
    try:
        plan = found.check(written, calibration)
    except PlanFaultsError as error:
        raise located(error, text, str(path)) from error
    if plan.digest != written.digest:
        say(f"{path} was edited since it was planned; it fits the cluster and is estimated anew")
    elif _is_older(path, Path(found.inventory.path)):
        _tell_outdated(found, plan, calibration, path)
    return plan


def _is_older(plan: Path, inventory: Path) -> bool:
    try:
        return plan.stat().st_mtime_ns < inventory.stat().st_mtime_ns
    except FileNotFoundError:
        return False  # `--local` has no inventory


def _tell_outdated(found: "Survey", plan: Plan, calibration: "Calibration", path: Path) -> None:
    """Say that an inventory which was changed after it was planned does nothing by itself."""
    since = f"note: {found.inventory.path} was changed after {path} was made"
    try:
        is_same = found.plan(calibration).digest == plan.digest
    except DynctlError as error:
        say(f"{since}, and cannot be planned now: {error.message}")
    else:
        if not is_same:
            say(f"{since}, and would be planned otherwise now: dynctl plan, then dynctl up")


def _refuse_failures(topology: Topology) -> None:
    """A first plan is not made without hosts the operator wrote down; leaving them out must be on purpose.

    Raises:
        DeployError: exit 7 when trust is the cause, else 4; names each host and why.
    """
    from dynctl.discovery.survey import causes

    if topology.failures:
        codes = {failure.exit_code for failure in topology.failures}
        raise DeployError(
            f"some hosts could not be described, nothing was changed:\n{causes(topology)}",
            "correct them, or plan without them: dynctl plan, then dynctl up",
            code=ExitCode.TRUST if ExitCode.TRUST in codes else ExitCode.REFUSED,
        )


def _tell_failures(topology: Topology, plan: Plan) -> None:
    planned = {host.name for host in plan.hosts}
    for failure in topology.failures:
        if failure.name not in planned:
            say(
                f"note: {failure.name} could not be described and is not in the plan: {failure.cause}"
            )


def _show(comparison: "Comparison", plan: Plan) -> None:
    digest = plan.digest.removeprefix("sha256:")[:8]
    count = len(comparison.work.goals.hosts)
    say(f"plan {digest}  {count} host{'s' if count != 1 else ''}")
    for step in comparison.steps:
        mark = "!" if step.is_disruptive else " "
        say(f" {mark}{step.host_name:<12} {step.kind.value:<8} {clean(step.detail, 300)}")
    disruptive = comparison.num_disruptive
    say(
        f"{disruptive} of {len(comparison.steps)} steps stop something that runs (!)"
        if disruptive
        else "nothing that runs is stopped"
    )
