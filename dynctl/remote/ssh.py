"""A host over SSH: commands, files and sockets on one multiplexed connection. Not here: logging in.

Files travel over a command's stdin rather than SFTP: that survives login shells that print, says `No space left on
device` where SFTP says `Failure`, and checks, flushes and renames in the same round trip.
IO: ssh, files (temporary directories for forwarded sockets).
"""

import asyncio
import contextlib
import hashlib
import math
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh

from dynctl.core.command import Command, Completed
from dynctl.core.text import clean
from dynctl.errors import CommandError, ConnectError, MissingFileError, UnknownOutcomeError
from dynctl.remote.connect import Connector, Link
from dynctl.remote.port import MAX_OUTPUT_BYTES, expand, tail
from dynctl.remote.routes import Hop
from dynctl.remote.shell import HAS_TIMEOUT, MarkedLines, as_signal, between, end_session, wrap

MAX_CHANNELS = 8
"""Commands at a time on one connection; sshd's MaxSessions is 10 unless somebody lowered it."""

_HOST_LIMIT_AFTER_S = 5
"""Later than our own time limit the host ends a command by itself: when the link was lost, or where a server gives commands
no session of their own, so that we cannot end one that ignores a signal."""

_MISSING = ("No such file or directory", "Not a directory")
"""What `head` says in the end; the locale is ours."""
_CHUNK_BYTES = 256 * 1024
_SLOWEST_BYTES_S = 100 * 1024
_SOCKET_TIMEOUT_S = 10.0
_MAX_NOISE_BYTES = 4096
_CLOSE_TIMEOUT_S = 2.0
_SESSION_RETRY_S = 0.1
_MAX_SESSION_TRIES = 20

_ASK = """printf '%s\\0' "$HOME"; "$@" 2>/dev/null && printf yes"""
# $1 directory, $2 temporary file, $3 target, $4 mode, $5 SHA-256.
_PUT = """
umask 077
mkdir -p -- "$1" || exit 91
[ ! -d "$3" ] || { echo "$3 is a directory" >&2; exit 91; }
trap 'rm -f -- "$2"' EXIT
trap 'exit 95' HUP INT TERM
cat > "$2" || exit 92
set -- "$@" "$(sha256sum < "$2")"
[ "${6%% *}" = "$5" ] || exit 93
chmod -- "$4" "$2" && { sync -- "$2" 2>/dev/null || sync; } && mv -f -- "$2" "$3" || exit 94
"""


class SshRemote:
    """One host; the connection is opened again when it was lost between two calls."""

    def __init__(self, name: str, hop: Hop, connector: Connector, link: Link) -> None:
        self.name = name
        self.home = ""
        self.identity: str | None = link.host_key.fingerprint
        self._hop = hop
        self._connector = connector
        self._link = link
        self._relink = asyncio.Lock()
        self._channels = asyncio.Semaphore(MAX_CHANNELS)
        self._num_open = 0
        self._has_timeout = False

    @classmethod
    async def open(cls, name: str, hop: Hop, connector: Connector) -> "SshRemote":
        """Log in and learn the home directory.

        Raises:
            ConnectError: when the host cannot be reached, or its login shell runs no commands.
            TrustError: when the host key is unknown or has changed.
        """
        remote = cls(name, hop, connector, await connector.connect(name, hop))
        try:
            done = await remote.run(Command(("sh", "-c", _ASK, "sh", *HAS_TIMEOUT), timeout_s=20.0))
            home, _, has_timeout = done.stdout.partition(b"\0")
            remote.home = home.decode("utf-8", "replace")
            remote._has_timeout = has_timeout == b"yes"
        except BaseException:
            await remote.close()
            raise
        if not remote.home.startswith("/"):
            await remote.close()
            raise ConnectError(f"{name}: the user has no home directory there")
        return remote

    async def run(self, command: Command) -> Completed:
        """Run a command to its end; see `Remote.run`."""
        return await self._run(command, _pieces(command.stdin))

    async def put(self, path: str, content: bytes | Path, mode: int = 0o600) -> None:
        """Replace a file; see `Remote.put`."""
        target = expand(self.home, path)
        directory, _, base = target.rpartition("/")
        directory = directory or ("/" if target.startswith("/") else ".")
        temporary = f"{directory}/.{base}.{secrets.token_hex(4)}.tmp"
        digest, size_bytes = await asyncio.to_thread(_measure, content)
        argv = ("sh", "-c", _PUT, "sh", directory, temporary, target, f"{mode:o}", digest)
        command = Command(argv, timeout_s=60.0 + size_bytes / _SLOWEST_BYTES_S)
        done = await self._run(command, _pieces(content))
        if not done.is_ok:
            reason = {93: "other bytes arrived than were sent"}.get(done.exit_status)
            reason = reason or clean(tail(done.stderr)) or f"status {done.exit_status}"
            hint = "free some space there" if "No space left" in reason else None
            raise CommandError(f"{self.name}: cannot write {target}: {reason}", hint)

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Read a file of at most `max_bytes`; see `Remote.get`."""
        source = expand(self.home, path)
        done = await self.run(Command(("head", "-c", str(max_bytes + 1), "--", source)))
        if not done.is_ok:
            said = clean(tail(done.stderr))
            kind = MissingFileError if said.endswith(_MISSING) else CommandError
            raise kind(f"{self.name}: cannot read {source}: {said}")
        if len(done.stdout) > max_bytes:
            raise CommandError(f"{self.name}: {source} is larger than {max_bytes} bytes")
        return done.stdout

    @contextlib.asynccontextmanager
    async def lines(self, command: Command) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give a command's stdout line by line; see `Remote.lines`."""
        nonce = secrets.token_hex(16)
        line = wrap(command, nonce)
        async with self._channels:
            try:
                async with asyncio.timeout(command.timeout_s):
                    process = await self._start(command, line)
            except TimeoutError as error:
                reason = f"it did not start within {command.timeout_s:g} s"
                raise self._unknown(command, reason) from error
            said: list[bytes] = []
            errors = asyncio.create_task(_collect(process.stderr, said), name=f"err:{self.name}")
            feeding = asyncio.create_task(_feed(process, _pieces(command.stdin)))
            marks = MarkedLines(nonce)
            try:
                yield self._each_line(process, command, nonce, marks, (errors, said))
            finally:
                feeding.cancel()
                errors.cancel()
                await self._end(process, marks.session, nonce)
                await asyncio.wait((feeding, errors))

    @contextlib.asynccontextmanager
    async def forward_socket(self, remote_socket_path: str) -> AsyncIterator[str]:
        """Give a local Unix socket that leads to one on the host; see `Remote.forward_socket`."""
        path = expand(self.home, remote_socket_path)
        connection = await self._live()
        await self._probe(connection, path)
        directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="dynctl-")
        try:
            local = f"{directory}/s"
            listener = await connection.forward_local_path(local, path)
            try:
                yield local
            finally:
                listener.close()
                await listener.wait_closed()
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def close(self) -> None:
        """End the connection."""
        self._link.connection.abort()
        await self._link.connection.wait_closed()

    async def _live(self) -> asyncssh.SSHClientConnection:
        """The connection, opened again if it was lost: nothing runs on it now, so nothing can be run twice."""
        async with self._relink:
            if self._link.connection.is_closed():
                self._link = await self._connector.connect(self.name, self._hop)
            return self._link.connection

    async def _start(self, command: Command, line: str) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command; where sshd allows fewer sessions than we use, wait until one of ours has ended."""
        num_alone = 0
        while True:
            connection = await self._live()
            try:
                process = await connection.create_process(line, encoding=None, request_pty=False)
            except asyncssh.ChannelOpenError as error:
                num_alone += self._num_open == 0
                if num_alone > _MAX_SESSION_TRIES:
                    raise ConnectError(
                        f"{self.name}: the host opens no session: {clean(error.reason)}",
                        "does its sshd_config set MaxSessions 0?",
                    ) from error
                await asyncio.sleep(_SESSION_RETRY_S)
            except (asyncssh.Error, OSError) as error:
                raise self._unknown(command, "the connection was lost as it started") from error
            else:
                self._num_open += 1
                return process

    async def _end(
        self, process: asyncssh.SSHClientProcess[bytes], session: int, nonce: str
    ) -> None:
        """End a command unless it ended by itself: by a signal, and by a kill where sshd passes none on."""
        has_ended = process.exit_status is not None and process.stdout.at_eof()
        try:
            if not has_ended and not self._link.connection.is_closed():
                with contextlib.suppress(asyncssh.Error, OSError):
                    process.terminate()
                if session > 1:
                    await self._kill(session, nonce)
            process.close()
            with contextlib.suppress(asyncssh.Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await process.wait_closed()
        finally:
            self._num_open -= 1

    async def _kill(self, session: int, nonce: str) -> None:
        command = end_session(session, nonce)
        line = wrap(command, secrets.token_hex(16))
        with contextlib.suppress(asyncssh.Error, OSError, TimeoutError):
            async with asyncio.timeout(command.timeout_s):
                await self._link.connection.run(
                    line, stdin=asyncssh.DEVNULL, encoding=None, request_pty=False
                )

    async def _run(self, command: Command, pieces: AsyncIterator[bytes]) -> Completed:
        nonce = secrets.token_hex(16)
        limit_s = math.ceil(command.timeout_s) + _HOST_LIMIT_AFTER_S
        line = wrap(command, nonce, limit_s if self._has_timeout else None)
        async with self._channels:
            try:
                async with asyncio.timeout(command.timeout_s):
                    out, err, status = await self._exchange(command, line, nonce, pieces)
            except TimeoutError as error:
                raise self._unknown(
                    command, f"it did not end within {command.timeout_s:g} s"
                ) from error
        marked = between(out, nonce)
        if status is None:
            raise self._unknown(command, "the connection was lost while it ran")
        if not marked.has_begun:
            said = clean(tail(marked.noise + err)) or f"status {status}"
            raise ConnectError(
                f"{self.name}: the login shell did not run the command; it said: {said}",
                "the user needs a login shell that runs commands (sh, bash, zsh, fish, csh)",
            )
        if marked.exit_status is None:
            raise self._unknown(command, "its shell was ended while it ran")
        stderr = between(err, nonce)
        return Completed(
            command,
            as_signal(marked.exit_status),
            marked.content,
            stderr.content if stderr.has_begun else err,
            marked.noise[:_MAX_NOISE_BYTES],
        )

    async def _exchange(
        self, command: Command, line: str, nonce: str, pieces: AsyncIterator[bytes]
    ) -> tuple[bytes, bytes, int | None]:
        process = await self._start(command, line)
        out: list[bytes] = []
        err: list[bytes] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                feeding = tasks.create_task(_feed(process, pieces))
                tasks.create_task(_collect(process.stdout, out))
                tasks.create_task(_collect(process.stderr, err))
                await process.wait_closed()
                feeding.cancel()
        except BaseExceptionGroup as group:
            # Not `except*`: before Python 3.11.4 what is raised below it comes out wrapped again.
            if group.subgroup(CommandError) is None:
                raise
            raise CommandError(f"{self.name}: {group.exceptions[0]}") from None
        finally:
            await self._end(process, between(b"".join(out), nonce).session, nonce)
        return b"".join(out), b"".join(err), process.returncode

    async def _each_line(
        self,
        process: asyncssh.SSHClientProcess[bytes],
        command: Command,
        nonce: str,
        marks: MarkedLines,
        stderr: tuple[asyncio.Task[None], list[bytes]],
    ) -> AsyncIterator[bytes]:
        try:
            while data := await process.stdout.read(_CHUNK_BYTES):
                for line in marks.feed(data):
                    yield line
        except (asyncssh.Error, OSError) as error:
            raise self._unknown(command, "the connection was lost while it ran") from error
        if marks.exit_status is None:
            raise self._unknown(command, "its output ended early")
        if marks.exit_status != 0:
            reading, said = stderr
            await reading
            shown = clean(tail(between(b"".join(said), nonce).content))
            raise CommandError(
                f"{self.name}: command ended with status {as_signal(marks.exit_status)}: {shown}"
            )

    async def _probe(self, connection: asyncssh.SSHClientConnection, path: str) -> None:
        """Connect once, so that a socket nobody listens on is an error here and not a hang later."""
        try:
            async with asyncio.timeout(_SOCKET_TIMEOUT_S):
                _, writer = await connection.open_unix_connection(path)
        except asyncssh.ChannelOpenError as error:
            # sshd gives the same reason for a socket that is not there and for one it may not forward to.
            is_there = (await self.run(Command(("test", "-S", path)))).is_ok
            raise ConnectError(
                f"{self.name}: {'nobody answers on' if is_there else 'there is no'} socket {path}",
                "is its process alive, and does sshd_config there say AllowStreamLocalForwarding yes?"
                if is_there
                else None,
            ) from error
        except (asyncssh.Error, OSError, TimeoutError) as error:
            raise ConnectError(f"{self.name}: no answer from the socket {path}") from error
        writer.close()
        with contextlib.suppress(asyncssh.Error, OSError):
            await writer.wait_closed()

    def _unknown(self, command: Command, reason: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self.name}: the outcome of {command.argv[0]} is unknown: {reason}",
            "look at the host's state before doing it again",
        )


async def _pieces(content: bytes | Path | None) -> AsyncIterator[bytes]:
    if isinstance(content, Path):
        with await asyncio.to_thread(content.open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield data
    elif content:
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


async def _feed(process: asyncssh.SSHClientProcess[bytes], pieces: AsyncIterator[bytes]) -> None:
    """Write stdin and close it; a command may end without reading it all."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, asyncssh.Error):
        async for data in pieces:
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.write_eof()


async def _collect(reader: asyncssh.SSHReader[bytes], pieces: list[bytes]) -> None:
    """Read to the end; a lost connection ends it too, and shows as a missing exit status."""
    total = 0
    with contextlib.suppress(asyncssh.Error, OSError):
        while data := await reader.read(_CHUNK_BYTES):
            total += len(data)
            if total > MAX_OUTPUT_BYTES:
                raise CommandError(f"a command printed more than {MAX_OUTPUT_BYTES} bytes")
            pieces.append(data)


def _measure(content: bytes | Path) -> tuple[str, int]:
    """SHA-256 and size of what is to be sent."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), content.stat().st_size
