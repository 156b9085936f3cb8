"""Reaching agents: their Unix socket, forwarded over the SSH connection. IO: ssh, HTTP."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from dynctl.agents.client import AgentClient
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.deploy.places import place_of
from dynctl.errors import CommandError, ConnectError, DynctlError
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote


class NoAgentError(ConnectError):
    """Raised when a host is reachable and no agent of this cluster answers there."""


async def agent_socket(entry: HostEntry, remote: Remote, inventory: Inventory) -> str:
    """Read where a host's agent listens.

    Raises:
        NoAgentError: when dynctl is not on that host.
    """
    root = place_of(entry, inventory, remote.home).root
    try:
        return (await remote.get(f"{root}/agent.socket-path", 4096)).decode().strip()
    except CommandError as error:
        raise NoAgentError(
            f"{entry.name}: no agent of cluster {inventory.cluster} here", "dynctl up starts one"
        ) from error


@asynccontextmanager
async def open_agent(
    entry: HostEntry, remote: Remote, inventory: Inventory
) -> AsyncIterator[AgentClient]:
    """Connect to one host's agent and check that it answers.

    Raises:
        NoAgentError: when none is there or it does not answer.
    """
    path = await agent_socket(entry, remote, inventory)
    async with AsyncExitStack() as stack:
        try:
            local = await stack.enter_async_context(remote.forward_socket(path))
            client = AgentClient(local)
            stack.push_async_callback(client.close)
            await client.status()
        except ConnectError as error:
            raise NoAgentError(
                f"{entry.name}: the agent does not answer on {path}: {error.message}",
                "dynctl up starts it again",
            ) from error
        yield client


@asynccontextmanager
async def reach_agents(
    inventory: Inventory, fleet: Fleet, hosts: Sequence[str] | None = None
) -> AsyncIterator[Mapping[str, AgentClient | DynctlError]]:
    """Connect to the agents of all (or some) hosts; a host without one maps to the reason."""
    async with AsyncExitStack() as stack:

        async def connect(entry: HostEntry, remote: Remote) -> AsyncExitStack:
            own = AsyncExitStack()
            clients[entry.name] = await own.enter_async_context(
                open_agent(entry, remote, inventory)
            )
            return own

        clients: dict[str, AgentClient | DynctlError] = {}
        for name, result in (await fleet.map(connect, hosts)).items():
            if isinstance(result, DynctlError):
                clients[name] = result
            else:
                stack.push_async_exit(result)
        yield clients
