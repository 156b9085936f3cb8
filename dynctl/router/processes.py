"""Several router processes on one port: the first one starts the others, starts them again, and drains them with itself.

Each listens on its own socket of the port, watches all engines, and has the whole index; their books of load are shared
(`shared_books`). Figures are added up over all of them, whichever is asked. IO: processes, sockets, signals.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from dynctl.core.units import whole
from dynctl.errors import RouterError
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.router.config import RouterConfig
from dynctl.router.shared_books import clear_share, make_books

log = logging.getLogger("dynctl.router")

_MIN_RESTART_S = 0.5
_MAX_RESTART_S = 10.0
_ASK_S = 2.0
_CLOSING_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes this is."""

    process: int
    num_processes: int
    books: int
    """Descriptor of the shared books."""
    folder: str
    """Where each process has a socket for the others."""

    def socket_of(self, process: int) -> str:
        """The path at which a process answers the others."""
        return f"{self.folder}/{process}.sock"

    @property
    def own_socket(self) -> str:
        """Where this one answers."""
        return self.socket_of(self.process)


def listen_together(host: str, port: int) -> socket.socket:
    """Bind a socket of a port that several processes share.

    Raises:
        OSError: when the port cannot be bound.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class Siblings:
    """The other processes, asked for their figures; `close` it."""

    def __init__(self, place: Place) -> None:
        self._pools = [
            Upstream(Address(path=place.socket_of(process)))
            for process in range(place.num_processes)
            if process != place.process
        ]

    async def ask(self, method: str, target: str) -> list[bytes]:
        """What the others answer with 200; those that do not are left out."""
        answers = await asyncio.gather(*(self._ask(pool, method, target) for pool in self._pools))
        return [answer for answer in answers if answer is not None]

    async def ask_first(self, target: str) -> bytes | None:
        """What the first of them answers: of a process that is started anew, the one that started it."""
        return await self._ask(self._pools[0], "GET", target)

    async def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            await pool.close()

    @staticmethod
    async def _ask(pool: Upstream, method: str, target: str) -> bytes | None:
        try:
            answer = await pool.fetch(method, target, timeout_s=_ASK_S)
        except UpstreamError:
            return None
        return answer.body if answer.status == 200 else None


class Processes:
    """The processes beside the first one; use it as a context manager in the first one."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._reserved: socket.socket | None = None
        self._folder = ""
        self._books = -1
        self._config_file = -1
        self._lifeline = (-1, -1)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._cut = asyncio.Event()
        self.config = config
        """With the port that was bound."""
        self.place: Place

    async def __aenter__(self) -> Self:
        """Reserve the port and start the others.

        Raises:
            OSError: when the port cannot be bound.
        """
        number = self._config.workers
        host, port = self._config.host_port
        # Bound and never listening: it keeps the port ours while single processes come and go.
        self._reserved = listen_together(host, port)
        shown = f"[{host}]" if ":" in host else host
        listen = f"{shown}:{self._reserved.getsockname()[1]}"
        self.config = replace(self._config, listen=listen)
        self._folder = tempfile.mkdtemp(prefix="dynctl-router-", dir=_short_folder())
        self._books = make_books(number)
        self._config_file = os.memfd_create("dynctl-router-config", 0)
        os.write(self._config_file, msgspec.json.encode(self.config))
        self._lifeline = os.pipe()
        self.place = Place(0, number, self._books, self._folder)
        self._tasks = [
            asyncio.create_task(self._keep(process), name=f"process:{process}")
            for process in range(1, number)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until the others have drained."""
        self.drain()
        await asyncio.gather(*self._tasks)
        for descriptor in (self._books, self._config_file, self._lifeline[0]):
            os.close(descriptor)
        if self._reserved is not None:
            self._reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def drain(self) -> None:
        """Let the others drain: they end when they are done."""
        if not self._stopping.is_set():
            self._stopping.set()
            os.close(self._lifeline[1])

    def cut(self) -> None:
        """End the others at once."""
        self.drain()
        self._cut.set()

    async def _keep(self, process: int) -> None:
        """Run one process, and run it again when it dies."""
        loop = asyncio.get_running_loop()
        pause_s = _MIN_RESTART_S
        while not self._stopping.is_set():
            started_s = loop.time()
            code = await self._run(process)
            if self._stopping.is_set():
                return
            clear_share(self._books, process)
            log.error("router process %d ended with %s and is started again", process, code)
            if loop.time() - started_s > _MAX_RESTART_S:
                pause_s = _MIN_RESTART_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, _MAX_RESTART_S)

    async def _run(self, process: int) -> int:
        """Start one and wait for its end; one that does not drain in time is killed."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "dynctl.router", "--config", f"/proc/self/fd/{self._config_file}"),
            *("--process", f"{process}/{self._config.workers}", "--books", str(self._books)),
            *("--folder", self._folder, "--lifeline", str(self._lifeline[0])),
            pass_fds=(self._books, self._config_file, self._lifeline[0]),
            stdin=asyncio.subprocess.DEVNULL,
        )
        ended = asyncio.ensure_future(child.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
            limit_s = self._config.settings.drain_s + _CLOSING_S
            await asyncio.wait([ended, cut], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            cut.cancel()
            if not ended.done():
                child.kill()
        return await ended


def _short_folder() -> str | None:
    """Paths of Unix sockets are short: the usual place for temporary files may be too deep."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 and Path("/tmp").is_dir() else None  # noqa: S108


def parse_place(process: str, books: int, folder: str) -> Place:
    """Read the flags a process is started with.

    Raises:
        RouterError: when they make no sense.
    """
    first, _, last = process.partition("/")
    own, number = whole(first), whole(last)
    if own is None or number is None or not 0 < own < number:
        raise RouterError(f"--process {process} is not K/N")
    return Place(own, number, books, folder)
