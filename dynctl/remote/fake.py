"""A host of scripted answers that records what it was asked, for tests of everything above. Not here: processes.

IO: none but what a caller's own answer function does.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from dynctl.core.command import Command, Completed
from dynctl.errors import CommandError, ConnectError, DynctlError, MissingFileError
from dynctl.remote.port import check_command, expand

Answer = bytes | Completed | DynctlError | Callable[[Command], "bytes | Completed"]
"""stdout of a success, a whole result, an error to raise, or a function that gives one of the first two."""


class FakeRemote:
    """Answers by whole argv first, then by program name; anything else is status 127, as a shell would say.

    `commands` holds what ran, `files` what was put (path to content) and may be filled before; `modes` their modes.
    """

    def __init__(
        self,
        name: str = "fake",
        answers: Mapping[str | tuple[str, ...], Answer] | None = None,
        files: Mapping[str, bytes] | None = None,
        home: str = "/home/ops",
    ) -> None:
        self.name = name
        self.home = home
        self.identity: str | None = f"SHA256:{name}"
        self.answers = dict(answers or {})
        self.files = dict(files or {})
        self.modes: dict[str, int] = {}
        self.sockets: dict[str, str] = {}
        """Remote socket path to the local one that stands for it."""
        self.commands: list[Command] = []
        self.is_closed = False

    async def run(self, command: Command) -> Completed:
        """Record a command and give the scripted answer."""
        check_command(command)
        self.commands.append(command)
        answer = self.answers.get(command.argv, self.answers.get(command.argv[0]))
        if callable(answer):
            answer = answer(command)
        if isinstance(answer, DynctlError):
            raise answer
        if answer is None:
            return Completed(command, 127, b"", f"{command.argv[0]}: not found\n".encode())
        return answer if isinstance(answer, Completed) else Completed(command, 0, answer, b"")

    async def put(self, path: str, content: bytes | Path, mode: int = 0o600) -> None:
        """Keep the content in `files`."""
        where = expand(self.home, path)
        if isinstance(content, Path):
            content = await asyncio.to_thread(content.read_bytes)
        self.files[where] = content
        self.modes[where] = mode

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Return a content of `files`."""
        where = expand(self.home, path)
        if where not in self.files:
            raise MissingFileError(f"{self.name}: cannot read {where}: No such file or directory")
        if len(self.files[where]) > max_bytes:
            raise CommandError(f"{self.name}: {where} is larger than {max_bytes} bytes")
        return self.files[where]

    @contextlib.asynccontextmanager
    async def lines(self, command: Command) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the scripted stdout line by line."""
        done = await self.run(command)

        async def each() -> AsyncIterator[bytes]:
            for line in done.stdout.splitlines():
                yield line
            if not done.is_ok:
                raise CommandError(f"{self.name}: command ended with status {done.exit_status}")

        yield each()

    @contextlib.asynccontextmanager
    async def forward_socket(self, remote_socket_path: str) -> AsyncIterator[str]:
        """Give the local path listed in `sockets`."""
        where = expand(self.home, remote_socket_path)
        if where not in self.sockets:
            raise ConnectError(f"{self.name}: nothing listens on {where}")
        yield self.sockets[where]

    async def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True
