"""Opening a TCP connection when a name has several addresses of which some may be dead. IO: DNS, network."""

import asyncio
import socket

STAGGER_S = 0.25
"""An address that has not answered for this long gets company. Source: RFC 8305, section 5."""


async def dial(host: str, port: int, family: int = socket.AF_UNSPEC) -> socket.socket:
    """Connect to whichever address answers first, starting one attempt every STAGGER_S; the caller limits the time.

    Raises:
        OSError: when every address refused; the first one's error.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    pending: set[asyncio.Task[socket.socket]] = set()
    errors: list[OSError] = []
    waiting = list(dict.fromkeys((item[0], item[4]) for item in found))
    try:
        while waiting or pending:
            if waiting:
                kind, address = waiting.pop(0)
                pending.add(asyncio.create_task(_one(kind, address), name=f"dial:{host}"))
            limit_s = STAGGER_S if waiting else None
            done, pending = await asyncio.wait(
                pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    pending |= done - {task}
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                errors.append(error)
    finally:
        await _drop(pending)
    raise errors[0]


async def _one(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _drop(tasks: set[asyncio.Task[socket.socket]]) -> None:
    """End the attempts nobody needs any more, and close what they opened meanwhile."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()
