"""Holding the cluster's lock while something changes: one on each host that is changed. IO: ssh."""

import asyncio
import getpass
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.deploy.onhost.lock import TTL_S
from dynctl.errors import DynctlError, ExitCode
from dynctl.remote.fleet import Fleet
from dynctl.remote.port import Remote

RENEW_S = 15.0

Answer = dict[str, object]
Ask = Callable[[str, Iterable[str]], Awaitable[Mapping[str, Answer | DynctlError]]]
"""Sends one action (`take`, `renew`, `release`, or `raise` to the highest number held) to some hosts."""


@asynccontextmanager
async def hold_locks(
    fleet: Fleet, seats: Mapping[str, Seat], operation: str
) -> AsyncIterator[Mapping[str, int | DynctlError]]:
    """Hold the lock of every one of some hosts for the time of the block; gives each one's fencing number.

    The first by name is taken before the others: two who want all hosts meet there, and one of them goes on. Who wants
    only some looks nowhere else. Hosts count on their own, so all are raised to the highest number among them: it is
    the same on every host, and higher than any its agent was sent before. A host that could not be asked has its error
    instead: somebody else may hold its lock, so nothing may be changed there.

    Raises:
        DynctlError: exit 5 when somebody else holds one; names who, from where and since when.
    """
    token = secrets.token_hex(8)
    owner = {
        "token": token,
        "user": getpass.getuser(),
        "machine": socket.gethostname(),
        "pid": str(os.getpid()),
        "operation": operation,
    }

    held: dict[str, int | DynctlError] = {}

    async def ask(action: str, names: Iterable[str]) -> Mapping[str, Answer | DynctlError]:
        fence = _highest(held)

        async def one(entry: HostEntry, remote: Remote) -> Answer:
            seat = seats[entry.name]
            wish = {"root": seat.place.root, "action": action, "owner": owner, "fence": fence}
            answer: Answer = await call(remote, seat.python, "lock", wish, PROGRAM_TIMEOUT_S)
            return answer

        return await fleet.map(one, names)

    names = sorted(seats)
    asked: list[str] = []
    # Asking a silent host takes as long as a lock lasts: those there are must be renewed meanwhile.
    renewal = asyncio.create_task(_renew(ask, asked), name="locks")
    try:
        for some in (names[:1], names[1:]):
            asked += some
            for name, answer in (await ask("take", some)).items():
                held[name] = _taken(name, answer)
        highest = _highest(held)
        behind = [name for name, had in held.items() if isinstance(had, int) and had < highest]
        for name, answer in (await ask("raise", behind)).items():
            held[name] = _raised(name, answer, highest)
        yield held
    finally:
        renewal.cancel()
        try:
            await asyncio.wait([renewal])
        finally:
            # Also what was being taken when we were interrupted: others' locks stay. A host that is gone, or whose
            # directory `down` removed, has none to give back; one that cannot be reached lets it expire.
            await _to_its_end(asyncio.create_task(ask("release", asked), name="locks:release"))


async def _to_its_end(task: asyncio.Task[Mapping[str, Answer | DynctlError]]) -> None:
    """Wait until a task is done, also when we are cancelled meanwhile: that comes out afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _taken(name: str, answer: Answer | DynctlError) -> int | DynctlError:
    if isinstance(answer, DynctlError):
        return answer
    fence = answer.get("fence")
    if not isinstance(fence, int):
        raise _held(answer, name)
    return fence


def _highest(held: Mapping[str, int | DynctlError]) -> int:
    return max((fence for fence in held.values() if isinstance(fence, int)), default=0)


def _raised(name: str, answer: Answer | DynctlError, fence: int) -> int | DynctlError:
    if isinstance(answer, DynctlError):
        return answer
    if "lost" in answer:
        raise DynctlError(
            f"{name}: the lock was lost while those of other hosts were taken",
            "nothing was changed; look at `dynctl status` and start again",
            code=ExitCode.LOCKED,
        )
    return fence


async def _renew(ask: Ask, names: Iterable[str]) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        # A missed renewal is no reason to stop: agents refuse us by fence if the lock is lost for good.
        await ask("renew", names)


def _held(answer: dict[str, object], host_name: str) -> DynctlError:
    who = answer.get("held_by")
    holder = who if isinstance(who, dict) else {}
    age = answer.get("age_s")
    age_s = age if isinstance(age, float) else 0.0
    text = f"{holder.get('operation', 'an operation')} of {holder.get('user', '?')}@{holder.get('machine', '?')} (pid {holder.get('pid', '?')})"
    return DynctlError(
        f"{host_name}: the cluster is locked by {clean(text)}, last seen {format_seconds(age_s)} ago",
        f"wait until it is done; if it died, the lock is free in {max(1.0, TTL_S - age_s):.0f} s",
        code=ExitCode.LOCKED,
    )
