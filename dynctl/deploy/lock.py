"""Holding the cluster's lock while something changes. IO: ssh."""

import asyncio
import getpass
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.observe import PROGRAM_TIMEOUT_S, Seat, call
from dynctl.errors import DynctlError, ExitCode
from dynctl.remote.port import Remote

RENEW_S = 15.0

Ask = Callable[[str], Awaitable[dict[str, object]]]
"""Sends one action (`take`, `renew`, `release`) to the lock's host."""


@asynccontextmanager
async def hold_lock(remote: Remote, seat: Seat, operation: str) -> AsyncIterator[int]:
    """Hold the lock for the time of the block; gives the fencing number agents check.

    The lock lives on one host chosen by name, so that two operators always meet there.

    Raises:
        DynctlError: exit 5 when somebody else holds it; names who, from where and since when.
    """
    token = secrets.token_hex(8)
    owner = {
        "token": token,
        "user": getpass.getuser(),
        "machine": socket.gethostname(),
        "pid": str(os.getpid()),
        "operation": operation,
    }

    async def ask(action: str) -> dict[str, object]:
        wish = {"root": seat.place.root, "action": action, "owner": owner}
        answer: dict[str, object] = await call(remote, seat.python, "lock", wish, PROGRAM_TIMEOUT_S)
        return answer

    answer = await ask("take")
    fence = answer.get("fence")
    if not isinstance(fence, int):
        raise _held(answer, remote.name)
    renewal = asyncio.create_task(_renew(ask), name=f"lock:{remote.name}")
    try:
        yield fence
    finally:
        renewal.cancel()
        await asyncio.wait([renewal])
        await asyncio.shield(_release(ask))


async def refuse_held(remote: Remote, seat: Seat) -> None:
    """Look whether somebody changes the cluster just now, without taking the lock.

    Raises:
        DynctlError: exit 5 when somebody does; names who, from where and since when.
    """
    wish = {"root": seat.place.root, "action": "look"}
    answer: dict[str, object] = await call(remote, seat.python, "lock", wish, PROGRAM_TIMEOUT_S)
    if "held_by" in answer:
        raise _held(answer, remote.name)


async def _renew(ask: Ask) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await ask("renew")
        except DynctlError:
            # A missed renewal is no reason to stop: agents refuse us by fence if the lock is lost for good.
            continue


async def _release(ask: Ask) -> None:
    try:
        await ask("release")
    except DynctlError:
        # The host is gone or the directory was removed by `down`; the lock expires by itself.
        return


def _held(answer: dict[str, object], host_name: str) -> DynctlError:
    who = answer.get("held_by")
    holder = who if isinstance(who, dict) else {}
    age = answer.get("age_s")
    since = format_seconds(age) if isinstance(age, float) else "?"
    text = f"{holder.get('operation', 'an operation')} of {holder.get('user', '?')}@{holder.get('machine', '?')} (pid {holder.get('pid', '?')})"
    return DynctlError(
        f"{host_name}: the cluster is locked by {clean(text)}, last seen {since} ago",
        "wait until it is done; a holder that died loses the lock after 60 s",
        code=ExitCode.LOCKED,
    )
