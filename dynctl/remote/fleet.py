"""All hosts at once: connections, bounded fan-out, a result or an error per host. IO: ssh."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dynctl.core.inventory import HostEntry, SshSettings
from dynctl.errors import DynctlError, UnknownOutcomeError
from dynctl.remote.known_hosts import KnownHosts
from dynctl.remote.local import LocalRemote
from dynctl.remote.port import Remote
from dynctl.remote.trust import Confirm, NewHostKey, UnknownKeyError

if TYPE_CHECKING:
    from dynctl.remote.connect import Connector

T = TypeVar("T")

MAX_ROUNDS = 4
"""How often new host keys may come up: accepting a jump host's shows the ones behind it."""

_LOG = logging.getLogger(__name__)


class Fleet:
    """The hosts of a run, as they come in; one that could not be reached is there as its error.

    Nobody waits for a host but who wants something of it: a silent one takes its whole time limit to say nothing.
    """

    def __init__(
        self,
        entries: Sequence[HostEntry],
        remotes: Mapping[str, Remote | DynctlError],
        parallel: int = 32,
    ) -> None:
        self.entries = tuple(entries)
        self._remotes: dict[str, Remote | DynctlError] = {}
        self._came = {entry.name: asyncio.Event() for entry in entries}
        self._fault: Exception | None = None
        self._parallel = parallel
        for name, remote in remotes.items():
            self.settle(name, remote)

    def settle(self, name: str, remote: Remote | DynctlError) -> None:
        """Tell that a host is connected, or why it is not."""
        self._remotes[name] = remote
        self._came[name].set()

    def give_up(self, fault: Exception) -> None:
        """Tell that no further host comes, because connecting itself failed; whoever waits is raised this."""
        self._fault = fault
        for came in self._came.values():
            came.set()

    async def reach(self, name: str) -> Remote:
        """Return a host's remote as soon as it is connected.

        Raises:
            DynctlError: when the host cannot be reached.
        """
        await self._came[name].wait()
        if self._fault is not None and name not in self._remotes:
            raise self._fault
        return self.remote(name)

    def remote(self, name: str) -> Remote:
        """Return the remote of a host that `map` or `reach` has been through.

        Raises:
            DynctlError: when the host could not be reached; the reason it had then.
            KeyError: while it is still being connected, or is no host of this fleet.
        """
        remote = self._remotes[name]
        if isinstance(remote, DynctlError):
            raise remote
        return remote

    async def close(self) -> None:
        """Close the connections there are."""
        for remote in self._remotes.values():
            if not isinstance(remote, DynctlError):
                await remote.close()

    async def map(
        self,
        work: Callable[[HostEntry, Remote], Awaitable[T]],
        hosts: Iterable[str] | None = None,
        timeout_s: float = 300.0,
    ) -> dict[str, T | DynctlError]:
        """Do the same on many hosts and return every host's result or error, in inventory order.

        Each begins as soon as its host is connected; `timeout_s` counts from there. Errors other than DynctlError are mistakes of `work` and end the whole call.
        """
        wanted = None if hosts is None else set(hosts)
        entries = [entry for entry in self.entries if wanted is None or entry.name in wanted]
        slots = asyncio.Semaphore(self._parallel)

        async def one(entry: HostEntry) -> T | DynctlError:
            try:
                remote = await self.reach(entry.name)
                async with slots, asyncio.timeout(timeout_s):
                    return await work(entry, remote)
            except TimeoutError:
                return UnknownOutcomeError(f"{entry.name}: not done within {timeout_s:g} s")
            except DynctlError as error:
                return error

        return await _each(entries, one)


@contextlib.asynccontextmanager
async def open_fleet(
    entries: Sequence[HostEntry], ssh: SshSettings, confirm: Confirm | None = None
) -> AsyncIterator[Fleet]:
    """Begin to connect to all hosts at once, and close every connection at the end.

    New host keys: with `host_keys: accept-new` they are added to known_hosts and logged; otherwise `confirm` is asked
    once about all of them, when every other host has answered, and without it they are refused.
    """
    connector = _connector(ssh) if any(not entry.is_local for entry in entries) else None
    fleet = Fleet(entries, {}, ssh.parallel)
    connecting = asyncio.create_task(_connect(fleet, ssh, connector, confirm), name="fleet")
    try:
        yield fleet
    finally:
        connecting.cancel()
        await asyncio.wait([connecting])
        await fleet.close()
        if connector is not None:
            await connector.close()


async def _connect(
    fleet: Fleet, ssh: SshSettings, connector: "Connector | None", confirm: Confirm | None
) -> None:
    """Fill the fleet; hosts with new keys come when those are accepted, which may show more of them behind."""

    async def one(entry: HostEntry) -> UnknownKeyError | None:
        remote = await _open(entry, connector)
        if isinstance(remote, UnknownKeyError):
            return remote
        fleet.settle(entry.name, remote)
        return None

    waiting = fleet.entries
    try:
        for _ in range(MAX_ROUNDS):
            answers = await _each(waiting, one)
            refused = {name: error for name, error in answers.items() if error is not None}
            accepted = bool(refused) and await _accept(refused.values(), ssh, confirm)
            waiting = tuple(entry for entry in waiting if entry.name in refused)
            if not accepted:
                break
        for entry in waiting:
            fleet.settle(entry.name, refused[entry.name])
    except Exception as error:  # noqa: BLE001 - raised where hosts are waited for
        fleet.give_up(error)


def _connector(ssh: SshSettings) -> "Connector":
    # Half a second of CPU, which runs on this machine alone need not pay.
    from dynctl.remote.connect import Connector  # noqa: PLC0415

    return Connector(ssh)


async def _open(entry: HostEntry, connector: "Connector | None") -> Remote | DynctlError:
    if entry.is_local or connector is None:
        return LocalRemote(entry.name)
    from dynctl.remote.routes import hop_of  # noqa: PLC0415 - as above
    from dynctl.remote.ssh import SshRemote  # noqa: PLC0415 - as above

    try:
        return await SshRemote.open(entry.name, hop_of(entry), connector)
    except DynctlError as error:
        return error


async def _accept(
    refused: Iterable[UnknownKeyError], ssh: SshSettings, confirm: Confirm | None
) -> bool:
    """Settle new host keys; whether they are known from now on."""
    keys = _distinct(error.new for error in refused)
    if ssh.host_keys == "accept-new":
        for key in keys:
            _LOG.warning(
                "new host key of %s accepted: %s %s", key.name, key.key.kind, key.key.fingerprint
            )
    elif confirm is None or not await confirm(keys):
        return False
    known_hosts = KnownHosts(Path(ssh.known_hosts).expanduser())  # noqa: ASYNC240 - reads $HOME only
    await asyncio.to_thread(known_hosts.add, [(k.host, k.port, k.key) for k in keys])
    return True


def _distinct(keys: Iterable[NewHostKey]) -> list[NewHostKey]:
    return list({(key.host, key.port, key.key.blob): key for key in keys}.values())


async def _each(
    entries: Sequence[HostEntry], work: Callable[[HostEntry], Awaitable[T]]
) -> dict[str, T]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = {
                entry.name: tasks.create_task(_awaited(work(entry)), name=f"host:{entry.name}")
                for entry in entries
            }
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return {name: task.result() for name, task in running.items()}


async def _awaited(work: Awaitable[T]) -> T:
    return await work
