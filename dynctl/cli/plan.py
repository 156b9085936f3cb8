"""`dynctl plan`: lay out pools on the hosts and say what to expect. IO: ssh, files, terminal."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local
from dynctl.cli.output import emit, emit_json, say, table, wait_for
from dynctl.cli.session import load
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Plan, PlannedDeployment


class PlanOutput(StrEnum):
    """How the plan is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the plan; default: plan.yaml by the inventory."),
    ] = None,
    detailed_exitcode: Annotated[
        bool,
        typer.Option(
            "--detailed-exitcode", help="Exit 10 when the plan differs from the file, 0 when not."
        ),
    ] = False,
    output: Annotated[
        PlanOutput, typer.Option("-o", "--output", help="table for people, json or yaml.")
    ] = PlanOutput.TABLE,
) -> None:
    """Lay out prefill and decode pools, with predicted latency and throughput.

    Describes the hosts, reads the models' config.json from them, and writes plan.yaml, which dynctl up brings about.
    Changes nothing on a host. Exit 4 when a deployment cannot be laid out, 3 when hosts had to be left out.

    Example: dynctl plan --out plan.yaml
    """
    wanted = load(inventory, local=local)
    topology, plan = wait_for(_plan(wanted))
    path = out or plan_path(wanted)
    is_changed = _write(path, plan)
    _print(plan, output)
    say(
        f"{'wrote' if is_changed else 'no changes in'} {path}; next: dynctl up{_flags(inventory, local=local)}"
    )
    _raise_failures(topology, path)
    if detailed_exitcode and is_changed:
        from dynctl.errors import ExitCode

        raise typer.Exit(int(ExitCode.CHANGES))


def plan_path(inventory: Inventory) -> Path:
    """Where a cluster's plan lies: beside the inventory, or in the state directory when there is no file."""
    path = Path(inventory.path)
    if path.suffix:
        return path.with_name("plan.yaml")
    return Path(".dynctl") / inventory.cluster / "plan.yaml"


def _flags(inventory: Path, *, local: bool) -> str:
    if local:
        return " --local"
    return "" if inventory == DEFAULT_INVENTORY else f" -i {inventory}"


async def _plan(wanted: Inventory) -> tuple[Topology, Plan]:
    from dynctl.cli.up import ask_about_keys
    from dynctl.discovery.survey import survey
    from dynctl.remote.fleet import open_fleet

    async with open_fleet(wanted.hosts, wanted.ssh, ask_about_keys) as fleet:
        found = await survey(wanted, fleet)
        return found.topology, found.plan()


def _write(path: Path, plan: Plan) -> bool:
    """Write the plan unless the file already holds these bytes; return whether it changed."""
    from dynctl.files import write_atomic
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
        write_atomic(kept, before, 0o644)
        say(f"{path} had been edited by hand: kept as {kept}")
    write_atomic(path, content, 0o644)
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


def _print(plan: Plan, output: PlanOutput) -> None:
    if output is PlanOutput.JSON:
        from dataclasses import asdict

        emit_json({"schema": "dynctl.plan/1", **asdict(plan)})
    elif output is PlanOutput.YAML:
        from dynctl.planner.text import to_yaml

        emit(to_yaml(plan))
    else:
        for deployment in plan.deployments:
            _draw(plan, deployment)
        for warning in plan.warnings:
            say(warning)


def _draw(plan: Plan, planned: PlannedDeployment) -> None:
    from dynctl.core.text import clean
    from dynctl.planner.drawing import estimate_rows, memory_rows, replica_rows

    emit(f"{planned.name}  {clean(planned.model, 60)}  engine {planned.engine_kind}")
    emit(f"verdict  {clean(planned.verdict, 200)}")
    for reason in planned.reasons:
        emit(f"  - {clean(reason, 300)}")
    emit("")
    table(["ENGINE", "ROLE", "HOST", "PARALLEL", "GPUS", "PORT"], replica_rows(planned))
    relays = ", ".join(f"{host.name}:{host.relay_port}" for host in plan.hosts)
    emit(
        f"router   {planned.router.host_name}  {planned.router.listen}  policy {planned.router.policy}"
    )
    emit(f"relays   {relays}")
    if rows := memory_rows(planned):
        emit("")
        columns = ["PER GPU", "TOTAL", "RESERVE", "WEIGHTS", "ACTIVATIONS", "KV", "KV TOKENS"]
        table(columns, rows, right=columns[1:])
    if rows := estimate_rows(planned):
        emit("")
        table(["EXPECTED", "LOW", "LIKELY", "HIGH", "HOW"], rows, right=["LOW", "LIKELY", "HIGH"])
    emit("")


def _raise_failures(topology: Topology, path: Path) -> None:
    if topology.failures:
        from dynctl.discovery.survey import causes
        from dynctl.errors import DynctlError, ExitCode

        raise DynctlError(
            f"{path} was planned without hosts that could not be described:\n{causes(topology)}",
            "correct them and plan again, or take them out of the inventory",
            code=ExitCode.PARTIAL,
        )
