"""Starting and stopping agents on hosts. IO: ssh."""

from dynctl.core.inventory import Inventory
from dynctl.core.text import clean
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.places import unit_name, unit_text
from dynctl.errors import DeployError
from dynctl.remote.port import Remote


async def start_agent(inventory: Inventory, seat: Seat, remote: Remote, digest: str) -> str:
    """Start or restart a host's agent with a bundle; returns a note for the operator, empty when there is none.

    Raises:
        DeployError: when it does not come up; says what it printed last.
    """
    wish = {
        "root": seat.place.root,
        "action": "start",
        "scope": seat.scope,
        "unit": unit_name(inventory.cluster),
        "unit_text": unit_text(inventory.cluster, seat.place, seat.python, digest, seat.scope),
        "bundle_path": seat.place.bundle_path(digest),
        "python": seat.python,
    }
    answer = await call(remote, seat.python, "launch", wish, 2 * PROGRAM_TIMEOUT_S)
    if answer["error"]:
        raise DeployError(
            f"{remote.name}: the agent does not start: {clean(answer['error'], 600)}",
            f"look at {seat.place.root}/logs/agent.log or journalctl on {remote.name}",
        )
    return clean(answer["note"])


async def stop_agent(inventory: Inventory, seat: Seat, remote: Remote) -> None:
    """Stop a host's agent and forget its unit. Engines it left running go on."""
    wish = {
        "root": seat.place.root,
        "action": "stop",
        "scope": seat.scope,
        "unit": unit_name(inventory.cluster),
    }
    await call(remote, seat.python, "launch", wish, PROGRAM_TIMEOUT_S)
