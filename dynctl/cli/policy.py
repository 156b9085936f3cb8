"""`dynctl policy`: show or change the policy of running routers, and let another one follow on trial. IO: ssh, sockets, terminal."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dynctl.cli.options import (
    DEFAULT_INVENTORY,
    AdminSocket,
    InventoryPath,
    Local,
    Output,
    OutputOption,
    finite,
)
from dynctl.cli.output import emit_json, say, table, wait_for
from dynctl.cli.routers import Answers, ask_deployments, ask_socket
from dynctl.errors import UsageError

_TARGETS = ("/policy", "/shadow")


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy to use from now on; without it nothing changes."),
    ] = None,
    *,
    stickiness: Annotated[
        float | None,
        typer.Option(
            "--stickiness",
            min=0.0,
            callback=finite,
            help="How long kv holds on to caches: 1 is usual, 0 ignores them, 2 lets half as much excess load draw requests away.",
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option("--shadow", help="A policy that follows all decisions without acting."),
    ] = None,
    no_shadow: Annotated[
        bool, typer.Option("--no-shadow", help="End that; what it counted is forgotten.")
    ] = False,
    deployment: Annotated[
        str | None, typer.Option("--deployment", help="Of this deployment only.")
    ] = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    admin_socket: AdminSocket = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how running routers choose engines, or change it at once: no request is dropped or waits.

    A shadow says what another policy would have done on the same requests, each engine's cache simulated: after some
    hundred requests `dynctl explain hits` shows what switching would gain, and how sure that is.

    A change lasts until the router is started anew or `dynctl up` changes its settings; to keep it, write it to the
    inventory (router: {policy: …, settings: {stickiness: …}}). Exit 3 when some hosts could not be asked; the others are changed.

    Example: dynctl policy --shadow prefix
    """
    from dynctl.cli.session import load

    if shadow is not None and no_shadow:
        raise UsageError("--shadow and --no-shadow exclude each other")
    for one in (name, shadow):
        _check(one)
    wanted = [] if name is None else [f"name={name}"]
    if stickiness is not None:
        wanted.append(f"stickiness={stickiness:g}")
    changes = [f"/policy?{'&'.join(wanted)}"] if wanted else []
    if shadow is not None or no_shadow:
        changes.append(f"/shadow?policy={shadow or ''}")
    if admin_socket is not None:
        path = str(admin_socket)
        answers = Answers({path: wait_for(ask_socket(path, _TARGETS, changes))})
    else:
        cluster = load(inventory, local=local)
        answers = wait_for(ask_deployments(cluster, _TARGETS, changes, deployment))
    _show(answers.by_router, output)
    answers.raise_failures("changed" if changes else "answered")


def _check(name: str | None) -> None:
    """Refuse a policy there is none of, before anything changes.

    Raises:
        DynctlError: when there is none; lists the ones there are.
    """
    from dynctl import registry

    if name is not None:
        registry.load("dynctl.router.policies", name, "POLICY")


def _show(told: Mapping[str, list[Any]], output: Output) -> None:
    rows = [
        {
            "router": router,
            "policy": policy["policy"],
            "stickiness": policy.get("stickiness"),
            "shadow": shadow and shadow["shadow"]["policy"],
            "num_decisions": shadow and shadow["num_decisions"],
        }
        for router, (policy, shadow) in told.items()
    ]
    if output is Output.JSON:
        emit_json({"schema": "dynctl.policy/1", "routers": rows})
        return
    cells = [
        [
            row["router"],
            row["policy"],
            "–" if row["stickiness"] is None else f"{row['stickiness']:g}",
            row["shadow"] or "–",
            "–" if row["num_decisions"] is None else str(row["num_decisions"]),
        ]
        for row in rows
    ]
    headings = ["ROUTER", "POLICY", "STICKINESS", "SHADOW", "FOLLOWED"]
    table(headings, cells, right=("STICKINESS", "FOLLOWED"))
    if any(row["shadow"] for row in rows):
        say("what switching would gain: dynctl explain hits")
