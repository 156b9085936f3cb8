"""What every way of reaching a host offers. Not here: any way of reaching one.

Outcomes are three-valued. A `Completed` means the command ran and ended, whatever its exit status.
`ConnectError` or `TrustError` mean that it did not run. `UnknownOutcomeError` means that nobody knows: the link
was lost or the time limit passed while it ran, so the state has to be read again.
Pure.
"""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from dynctl.core.command import Command, Completed
from dynctl.errors import CommandError

MAX_OUTPUT_BYTES = 32 * 1024**2
"""A command that prints more than this is stopped: hosts may be hostile or broken."""
MAX_LINE_BYTES = 64 * 1024
"""Longer lines of `Remote.lines` arrive in pieces of this size."""

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class Remote(Protocol):
    """One host, reached somehow."""

    @property
    def name(self) -> str:
        """The host's name in the inventory."""

    @property
    def home(self) -> str:
        """The user's home directory on the host; a path that begins with `~/` means this one."""

    @property
    def identity(self) -> str | None:
        """What tells two hosts with equal machine ids apart: the fingerprint of the host key; None without SSH."""

    async def run(self, command: Command) -> Completed:
        """Run a command to its end and return what it printed.

        Raises:
            ConnectError: when it could not be started.
            UnknownOutcomeError: when the link was lost or the time limit passed while it ran.
            CommandError: when it printed more than MAX_OUTPUT_BYTES; it was stopped.
        """

    async def put(self, path: str, content: bytes | Path, mode: int = 0o600) -> None:
        """Replace a file: temporary name, checksum verified on the host, renamed; parents are made with mode 0700.

        Raises:
            CommandError: when the host refused (disk full, no permission) or the checksum differs; the old file stays.
        """

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Read a file of at most `max_bytes`.

        Raises:
            MissingFileError: when there is none.
            CommandError: when it is unreadable or larger.
        """

    def lines(self, command: Command) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Run a command and give its stdout line by line, without line ends, while it runs.

        `timeout_s` limits only the start; leaving the block ends the command. The iterator raises
        CommandError when the command ends with another status than 0.
        """

    def forward_socket(self, remote_socket_path: str) -> AbstractAsyncContextManager[str]:
        """Give a local Unix socket path whose connections reach a socket on the host.

        Raises:
            ConnectError: when nothing listens there, or the host forbids forwarding.
        """

    async def close(self) -> None:
        """End the connection; commands that still run are of unknown outcome."""


def expand(home: str, path: str) -> str:
    """Replace a leading `~` by the home directory; other paths stay as they are."""
    if path == "~":
        return home
    return f"{home.rstrip('/')}/{path[2:]}" if path.startswith("~/") else path


def check_command(command: Command) -> None:
    """Refuse what no process can be given.

    Raises:
        CommandError: when argv is empty, a text holds a NUL, or an environment name is none.
    """
    if not command.argv or not command.argv[0]:
        raise CommandError("a command without a program")
    for name, value in command.env:
        if not _ENV_NAME.match(name):
            raise CommandError(f"{name!r} is no name for an environment variable")
        if "\0" in value:
            raise CommandError(f"the value of {name} holds a NUL character")
    if any("\0" in word for word in command.argv):
        raise CommandError(f"an argument of {command.argv[0]!r} holds a NUL character")


def tail(text: bytes, max_lines: int = 3) -> str:
    """The last lines of an output, for an error message; still to be cleaned before it is shown."""
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-max_lines:])
