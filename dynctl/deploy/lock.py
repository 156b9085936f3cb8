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
"""Sends one action (`take`, `renew`, `release`) to some hosts."""


@asynccontextmanager
async def hold_locks(
    fleet: Fleet, seats: Mapping[str, Seat], operation: str
) -> AsyncIterator[Mapping[str, int | DynctlError]]:
    """Hold the lock of every one of some hosts for the time of the block; gives each one's fencing number.

    The first by name is taken before the others: two who want all hosts meet there, and one of them goes on. Who wants
    only some looks nowhere else. A host that cannot be asked has its error: what is done there next meets it as well.

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

    async def ask(action: str, names: Iterable[str]) -> Mapping[str, Answer | DynctlError]:
        async def one(entry: HostEntry, remote: Remote) -> Answer:
            seat = seats[entry.name]
            wish = {"root": seat.place.root, "action": action, "owner": owner}
            answer: Answer = await call(remote, seat.python, "lock", wish, PROGRAM_TIMEOUT_S)
            return answer

        return await fleet.map(one, names)

    held: dict[str, int | DynctlError] = {}
    names, asked = sorted(seats), []
    try:
        for some in (names[:1], names[1:]):
            asked += some
            for name, answer in (await ask("take", some)).items():
                held[name] = _taken(name, answer)
        renewal = asyncio.create_task(_renew(ask, names), name="locks")
        try:
            yield held
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])
    finally:
        # Also what was being taken when we were interrupted: others' locks stay. A host that is gone, or whose
        # directory `down` removed, has none to give back; one that cannot be reached lets it expire.
        await asyncio.shield(ask("release", asked))


def _taken(name: str, answer: Answer | DynctlError) -> int | DynctlError:
    if isinstance(answer, DynctlError):
        return answer
    fence = answer.get("fence")
    if not isinstance(fence, int):
        raise _held(answer, name)
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
