"""Reaching agents: their Unix socket, forwarded over the SSH connection. IO: ssh, HTTP."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from dynctl.agents.client import AgentClient
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.snapshot import HostSnapshot
from dynctl.deploy.places import place_of
from dynctl.errors import CommandError, ConnectError, DynctlError, MissingFileError
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote

_MAX_LOG_BYTES = 1 << 20


class NoAgentError(ConnectError):
    """Raised when a host is reachable and no agent of this cluster answers there."""


class NotHereError(NoAgentError):
    """Raised when nothing of the cluster was ever started on a host, or all of it was taken down."""


async def agent_socket(entry: HostEntry, remote: Remote, inventory: Inventory) -> str:
    """Read where a host's agent listens.

    Raises:
        NotHereError: when dynctl is not on that host.
        CommandError: when what is there cannot be read.
    """
    root = place_of(entry, inventory, remote.home).root
    try:
        return (await remote.get(f"{root}/agent.socket-path", 4096)).decode().strip()
    except MissingFileError as error:
        raise NotHereError(
            f"{entry.name}: no agent of cluster {inventory.cluster} here", "dynctl up starts one"
        ) from error
    except CommandError as error:
        raise CommandError(error.message, f"who owns {root} there?") from error


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
            why = error.message.removeprefix(f"{entry.name}: ").removeprefix("no agent answers: ")
            raise NoAgentError(
                f"{entry.name}: the agent does not answer: {why}",
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
        results = await fleet.map(connect, hosts)
        for name, result in results.items():
            if isinstance(result, DynctlError):
                clients[name] = result
            else:
                stack.push_async_exit(result)
        yield {name: clients[name] for name in results}


class SteadyAgent:
    """One host's agent, reached anew after it or the way to it was lost: for watching over hours."""

    def __init__(self, entry: HostEntry, remote: Remote, inventory: Inventory) -> None:
        self._entry, self._remote, self._inventory = entry, remote, inventory
        self._stack = AsyncExitStack()
        self._client: AgentClient | None = None

    async def sample(self) -> HostSnapshot:
        """Return the host now.

        Raises:
            DynctlError: when it cannot be asked; the next call connects again.
        """
        try:
            if self._client is None:
                agent = open_agent(self._entry, self._remote, self._inventory)
                self._client = await self._stack.enter_async_context(agent)
            return await self._client.sample()
        except BaseException:
            await self.close()
            raise

    async def ask_router(self, unit_id: str, target: str) -> bytes:
        """Return what a router's admin socket answers, over the connection of `sample`.

        Raises:
            DynctlError: when it cannot be asked.
        """
        return await self._connected().ask_router(unit_id, target)

    async def log_lines(self, unit_id: str, count: int) -> list[str]:
        """Return the last lines of a unit's output, a mebibyte at most, over the connection of `sample`.

        Raises:
            DynctlError: when they cannot be read.
        """
        text = b""
        async with self._connected().logs(unit_id, count) as pieces:
            async for piece in pieces:
                text = (text + piece)[-_MAX_LOG_BYTES:]
        return text.decode("utf-8", "replace").splitlines()[-count:]

    async def command(self, unit_id: str) -> str:
        """Return the command a unit was started with, over the connection of `sample`; empty when that is not known.

        Raises:
            DynctlError: when the agent cannot be asked.
        """
        units = (await self._connected().status()).units
        return next((unit.command for unit in units if unit.id == unit_id), "")

    def _connected(self) -> AgentClient:
        if self._client is None:
            raise ConnectError(f"{self._entry.name}: no agent answers")
        return self._client

    async def close(self) -> None:
        """End the connection; a later `sample` opens another."""
        stack, self._stack, self._client = self._stack, AsyncExitStack(), None
        await stack.aclose()


@asynccontextmanager
async def steady_agents(
    inventory: Inventory, fleet: Fleet, hosts: Sequence[str]
) -> AsyncIterator[Mapping[str, SteadyAgent | DynctlError]]:
    """The agents of hosts that SSH reaches; other hosts map to the reason, those nothing runs on are left out.

    Agents that do not answer now are tried again at every sample, unless none answers at all: then all map to why.
    """

    async def connect(entry: HostEntry, remote: Remote) -> SteadyAgent:
        agent = SteadyAgent(entry, remote, inventory)
        async with open_agent(entry, remote, inventory):
            return agent

    first = await fleet.map(connect, hosts)
    if first and all(isinstance(found, DynctlError) for found in first.values()):
        yield {name: found for name, found in first.items() if isinstance(found, DynctlError)}
        return
    agents: dict[str, SteadyAgent | DynctlError] = {}
    for name, found in first.items():
        if isinstance(found, NotHereError):
            continue
        is_silent = isinstance(found, NoAgentError)
        agents[name] = (
            SteadyAgent(inventory.host(name), fleet.remote(name), inventory) if is_silent else found
        )
    try:
        yield agents
    finally:
        for agent in agents.values():
            if isinstance(agent, SteadyAgent):
                await agent.close()
