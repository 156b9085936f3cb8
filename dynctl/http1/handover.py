"""A listening port passed from a process to its successor: no connection is refused in between.

The kernel's queue of connections belongs to the socket, not to the process: whoever holds its descriptor accepts from it.
So the successor takes the descriptors over a Unix socket, listens beside its predecessor, and only then the predecessor
lets go. Binding the port twice (SO_REUSEPORT) would lose what waits in the first one's queue.
Not here: when it happens. IO: sockets.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_MAX_SOCKETS = 16
_TAKE_S = 5.0
_UCRED = struct.Struct("3i")


class Offer:
    """Holds descriptors ready for a successor of the same user; `close` it."""

    def __init__(self, path: str, descriptors: Callable[[], Sequence[int]]) -> None:
        """Listen at `path` (mode 0600), in a directory of ours.

        Raises: OSError when it cannot be bound.
        """
        self.is_taken = False
        """Whether somebody else may listen now, too."""
        self._path = Path(path)
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._path.chmod(0o600)
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            raise
        self._loop.add_reader(self._listener.fileno(), self._give)

    def _give(self) -> None:
        try:
            taker, _ = self._listener.accept()
        except OSError:
            return
        with taker:
            credentials = taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            if _UCRED.unpack(credentials)[1] != os.getuid():
                return
            with suppress(OSError):
                socket.send_fds(taker, [b"\n"], list(self._descriptors())[:_MAX_SOCKETS])
                self.is_taken = True

    def close(self) -> None:
        """Offer it no more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._path.unlink(missing_ok=True)


async def take_over(path: str) -> list[socket.socket]:
    """Return the listening sockets a predecessor offers; they are ours to close.

    Raises: OSError when there is nobody or nothing comes in time.
    """

    def take() -> list[socket.socket]:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(_TAKE_S)
            asker.connect(path)
            _, descriptors, _, _ = socket.recv_fds(asker, 1, _MAX_SOCKETS)
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]

    taken = await asyncio.to_thread(take)
    if not taken:
        raise ConnectionError(f"{path} offers no socket")
    for one in taken:
        one.setblocking(False)
    return taken
