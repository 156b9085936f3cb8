"""`dynctl policy`: show or change the policy of running routers, and let another one follow on trial. IO: ssh, sockets, terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Output, OutputOption
from dynctl.cli.output import emit_json, say, table, wait_for
from dynctl.cli.routers import ask_deployments, ask_socket
from dynctl.errors import UsageError

_TARGETS = ("/policy", "/shadow")


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy to use from now on; without it nothing changes."),
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
    admin_socket: Annotated[
        Path | None,
        typer.Option("--admin-socket", help="Of a router that `dynctl route` runs here."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how running routers choose engines, or change it at once: no request is dropped or waits.

    A shadow says what another policy would have done on the same requests, each engine's cache simulated: after some
    hundred requests `dynctl explain hits` shows what switching would gain, and how sure that is.

    A change lasts until the router is started anew or `dynctl up` changes its settings; to keep it, write it to the
    inventory (router: {policy: …}).

    Example: dynctl policy --shadow prefix
    """
    from dynctl.cli.session import load

    if shadow is not None and no_shadow:
        raise UsageError("--shadow and --no-shadow exclude each other")
    for wanted in (name, shadow):
        _check(wanted)
    changes = [f"/policy?name={name}"] if name is not None else []
    if shadow is not None or no_shadow:
        changes.append(f"/shadow?policy={shadow or ''}")

    def ask(targets: Sequence[str], method: str) -> Mapping[str, list[Any]]:
        if admin_socket is not None:
            path = str(admin_socket)
            return {path: wait_for(ask_socket(path, targets, method))}
        wanted = load(inventory, local=local)
        return wait_for(ask_deployments(wanted, targets, method, deployment))

    if changes:
        ask(changes, "POST")
    _show(ask(_TARGETS, "GET"), output)


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
            row["shadow"] or "–",
            "–" if row["num_decisions"] is None else str(row["num_decisions"]),
        ]
        for row in rows
    ]
    table(["ROUTER", "POLICY", "SHADOW", "FOLLOWED"], cells, right=("FOLLOWED",))
    if any(row["shadow"] for row in rows):
        say("what switching would gain: dynctl explain hits")
