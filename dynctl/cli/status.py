"""`dynctl status`: what runs, and where. IO: ssh, terminal."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynctl.cli.kept import read_plan
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local, Output, OutputOption
from dynctl.cli.output import emit_json, say, table, wait_for
from dynctl.cli.session import load, select
from dynctl.core.inventory import Inventory
from dynctl.core.text import clean
from dynctl.core.units import format_seconds

if TYPE_CHECKING:
    from dynctl.agents.client import AgentClient
    from dynctl.agents.protocol import AgentStatus
    from dynctl.errors import DynctlError
    from dynctl.router.seen import Seen

    Views = Mapping[str, Seen | DynctlError]
    """What each router sees, by its id; or why it does not say."""


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what runs, and where.

    Asks every host's agent; nothing shown here comes from a file on this machine. What routers find wrong, with engines' caches
    or themselves, stands below with the fix, and changes no exit status. Exit 0 when every unit is ready,
    3 when some hosts do not answer, 6 when a unit is not ready, unless somebody drained it or every engine behind it, or
    when a router does not reach an engine that is. A router that waits for engines which --limit leaves out is not judged.

    Example: dynctl status -o json
    """
    wanted = load(inventory, local=local)
    results, seen = wait_for(_ask(wanted, select(wanted, limit)))
    _show(wanted, results, seen, output)


async def _ask(wanted: Inventory, hosts: list[str]) -> tuple[dict[str, Any], "Views"]:
    from dynctl.deploy.reach import reach_agents
    from dynctl.deploy.routed import ask_seen
    from dynctl.errors import DynctlError
    from dynctl.remote.fleet import open_fleet

    async with (
        open_fleet(wanted.entries(hosts), wanted.ssh) as fleet,
        reach_agents(wanted, fleet, hosts) as clients,
    ):
        results = {name: await _status(client) for name, client in clients.items()}
        statuses = {n: each for n, each in results.items() if not isinstance(each, DynctlError)}
        asked = {n: c for n, c in clients.items() if not isinstance(c, DynctlError)}
        return results, await ask_seen(asked, statuses)


async def _status(client: "AgentClient | DynctlError") -> "AgentStatus | DynctlError":
    from dynctl.errors import DynctlError

    if isinstance(client, DynctlError):
        return client
    try:
        return await client.status()
    except DynctlError as error:
        return error


def _show(wanted: Inventory, results: dict[str, Any], seen: "Views", output: Output) -> None:
    from dynctl.deploy.reach import NotHereError
    from dynctl.errors import DynctlError, ExitCode
    from dynctl.remote.outcomes import failures_of, raise_host_failures

    statuses = {
        name: status for name, status in results.items() if not isinstance(status, DynctlError)
    }
    absent = [name for name, error in results.items() if isinstance(error, NotHereError)]
    failures = failures_of(results)
    if output is Output.JSON:
        emit_json(
            {
                "schema": "dynctl.status/1",
                "cluster": wanted.cluster,
                "hosts": statuses,
                "routers": {n: v for n, v in seen.items() if not isinstance(v, DynctlError)},
                "failures": {
                    name: {
                        "message": error.message,
                        "hint": error.hint,
                        "is_up": name not in absent,
                    }
                    for name, error in failures.items()
                },
            }
        )
    elif statuses:
        _draw(statuses, seen)
        for name, status in statuses.items():
            for text in status.degraded:
                say(f"{name}: the agent is degraded: {clean(text, 300)}")
        _say_findings(seen)
    if not statuses and len(absent) == len(results):
        raise DynctlError(
            f"cluster {wanted.cluster} is not up on "
            + (absent[0] if len(absent) == 1 else f"any of {len(absent)} hosts"),
            "dynctl up brings it up",
            code=ExitCode.REFUSED,
        )
    expected = _planned_hosts(wanted) if absent else set()
    for name in absent:
        if name not in expected:
            say(f"{name}: nothing of this cluster runs here")
    raise_host_failures(
        {n: r for n, r in results.items() if n not in absent or n in expected}, "answered"
    )
    unasked = [entry.name for entry in wanted.hosts if entry.name not in results]
    _raise_unready(statuses, unasked)
    _raise_unrouted(statuses, seen)


def _say_findings(seen: "Views") -> None:
    """Say what routers find wrong; all may be ready and serve, but not by what engines have cached."""
    from dynctl.router.seen import Seen

    for name, view in seen.items():
        for found in view.findings if isinstance(view, Seen) else ():
            subject = f"{clean(found.engine, 100)}: " if found.engine else ""
            say(f"{name}: {subject}{clean(found.text, 300)} ({clean(found.cause, 40)})")
            say(f"  fix: {clean(found.hint, 300)}")


def _raise_unready(statuses: "Mapping[str, AgentStatus]", unasked: Sequence[str]) -> None:
    """End with 6 when something ought to be ready and is not."""
    from dynctl.core.deployment import EngineState
    from dynctl.deploy.awaited import awaited, waiting_for_unseen
    from dynctl.errors import DynctlError, ExitCode

    # What is beside a unit is on its way in or out, and the unit itself serves.
    units = [unit for _, unit in awaited(statuses) if not unit.beside]
    unready = [unit for unit in units if unit.state is not EngineState.READY]
    if unasked:
        unjudged = waiting_for_unseen(statuses.values())
        for unit in unjudged:
            where = ", ".join(unasked)
            say(f"{unit.id} waits for engines, of which {where} may have some: not asked (--limit)")
        unready = [unit for unit in unready if unit not in unjudged]
    if unready:
        raise DynctlError(
            f"not ready: {', '.join(unit.id for unit in unready)}",
            f"dynctl logs {unready[0].id}",
            code=ExitCode.GATE,
        )


def _raise_unrouted(statuses: "Mapping[str, AgentStatus]", seen: "Views") -> None:
    """End with 6 when a router does not reach an engine that is ready; one that does not say so is only told of."""
    from dynctl.deploy.routed import lacks
    from dynctl.errors import DynctlError, ExitCode

    for name, view in seen.items():
        if isinstance(view, DynctlError):
            say(f"{name} does not say which engines it reaches: {clean(view.message, 300)}")
    left = [
        each
        for each in lacks(statuses, seen)
        if not each.is_reached and not isinstance(seen.get(each.router_id), DynctlError | None)
    ]
    if left:
        raise DynctlError(
            "\n  ".join(f"{each.host_name}: {each.router_id}: {each.text}" for each in left),
            f"dynctl logs {left[0].router_id}, and dynctl doctor for the ways between hosts",
            code=ExitCode.GATE,
        )


def _planned_hosts(wanted: Inventory) -> set[str]:
    """Hosts the plan gives work to; none when there is no readable plan."""
    from dynctl.errors import DynctlError

    try:
        plan = read_plan(wanted)
    except DynctlError:
        return set()
    if plan is None:
        return set()
    routers = {deployment.router.host_name for deployment in plan.deployments}
    return routers | {m.host_name for _, _, replica in plan.replicas() for m in replica.members}


def _draw(statuses: dict[str, Any], seen: "Views") -> None:
    from dynctl.core.deployment import EngineState
    from dynctl.deploy.routed import reach_text
    from dynctl.router.seen import Seen

    rows = []
    for name, status in statuses.items():
        for unit in (*status.units, *status.asides):
            up = (
                "–"
                if unit.started_unix_s is None
                else format_seconds(time.time() - unit.started_unix_s)
            )
            is_ready = unit.state is EngineState.READY
            note = unit.url if is_ready else unit.seen or unit.last_error
            view = seen.get(unit.id)
            if unit.kind == "router" and not unit.beside and isinstance(view, Seen):
                note += f", {reach_text(view)}"
            if unit.beside:
                is_next = unit.state is EngineState.STARTING
                note = f"{'takes over from' if is_next else 'handed over to'} {unit.beside}"
            pid = str(unit.pid or "–")
            rows.append(
                [
                    unit.id,
                    unit.kind if unit.leader else unit.role or unit.kind,
                    name,
                    unit.state.value,
                    pid,
                    up,
                    str(unit.num_restarts),
                    note,
                ]
            )
    columns = ["UNIT", "ROLE", "HOST", "STATE", "PID", "UP", "RESTARTS", "NOTE"]
    table(columns, rows, right=["PID", "UP", "RESTARTS"])
