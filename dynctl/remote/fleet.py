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
    """The hosts of a run; one that could not be reached is there as its error."""

    def __init__(
        self,
        entries: Sequence[HostEntry],
        remotes: Mapping[str, Remote | DynctlError],
        parallel: int = 32,
    ) -> None:
        self.entries = tuple(entries)
        self._remotes = dict(remotes)
        self._parallel = parallel

    @property
    def errors(self) -> dict[str, DynctlError]:
        """The hosts that could not be reached, and why."""
        return {n: r for n, r in self._remotes.items() if isinstance(r, DynctlError)}

    def remote(self, name: str) -> Remote:
        """Return a host's remote.

        Raises:
            DynctlError: when the host could not be reached; the reason it had then.
        """
        remote = self._remotes[name]
        if isinstance(remote, DynctlError):
            raise remote
        return remote

    async def map(
        self,
        work: Callable[[HostEntry, Remote], Awaitable[T]],
        hosts: Iterable[str] | None = None,
        timeout_s: float = 300.0,
    ) -> dict[str, T | DynctlError]:
        """Do the same on many hosts and return every host's result or error, in inventory order.

        Errors other than DynctlError are mistakes of `work` and end the whole call.
        """
        wanted = None if hosts is None else set(hosts)
        entries = [entry for entry in self.entries if wanted is None or entry.name in wanted]
        slots = asyncio.Semaphore(self._parallel)

        async def one(entry: HostEntry) -> T | DynctlError:
            try:
                remote = self.remote(entry.name)
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
    """Connect to all hosts at once and close every connection at the end.

    Hosts that cannot be reached are in `Fleet.errors`. New host keys: with `host_keys: accept-new` they are added to
    known_hosts and logged; otherwise `confirm` is asked once about all of them, and without it they are refused.
    """
    connector = _connector(ssh) if any(not entry.is_local for entry in entries) else None
    remotes: dict[str, Remote | DynctlError] = {}
    try:
        waiting = list(entries)
        for _ in range(MAX_ROUNDS):
            remotes |= await _each(waiting, lambda entry: _open(entry, connector))
            waiting = await _accept(entries, remotes, ssh, confirm)
            if not waiting:
                break
        yield Fleet(entries, remotes, ssh.parallel)
    finally:
        for remote in remotes.values():
            if not isinstance(remote, DynctlError):
                await remote.close()
        if connector is not None:
            await connector.close()


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
    entries: Sequence[HostEntry],
    remotes: Mapping[str, Remote | DynctlError],
    ssh: SshSettings,
    confirm: Confirm | None,
) -> list[HostEntry]:
    """Settle new host keys and return the hosts to try again."""
    new = {n: r.new for n, r in remotes.items() if isinstance(r, UnknownKeyError)}
    if not new:
        return []
    keys = _distinct(new.values())
    if ssh.host_keys == "accept-new":
        for key in keys:
            _LOG.warning(
                "new host key of %s accepted: %s %s", key.name, key.key.kind, key.key.fingerprint
            )
    elif confirm is None or not await confirm(keys):
        return []
    known_hosts = KnownHosts(Path(ssh.known_hosts).expanduser())  # noqa: ASYNC240 - reads $HOME only
    await asyncio.to_thread(known_hosts.add, [(k.host, k.port, k.key) for k in keys])
    return [entry for entry in entries if entry.name in new]


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
