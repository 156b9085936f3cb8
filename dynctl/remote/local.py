"""This machine as a host: processes without SSH, files without copying over a wire. IO: processes, files, sockets."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from dynctl.core.command import Command, Completed
from dynctl.core.text import clean
from dynctl.errors import CommandError, ConnectError, MissingFileError, UnknownOutcomeError
from dynctl.files import reason
from dynctl.remote.port import MAX_LINE_BYTES, MAX_OUTPUT_BYTES, check_command, expand, tail

_CHUNK_BYTES = 1024**2
_CONNECT_TIMEOUT_S = 5.0


class LocalRemote:
    """Runs commands as children of this process, each in a session of its own."""

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.home = str(Path.home())
        self.identity: str | None = None

    async def run(self, command: Command) -> Completed:
        """Run a command to its end; see `Remote.run`."""
        process = await self._spawn(command)
        try:
            async with asyncio.timeout(command.timeout_s):
                out, err = await _communicate(process, command.stdin)
                status = await process.wait()
        except TimeoutError as error:
            raise UnknownOutcomeError(
                f"{self.name}: {command.argv[0]} did not end within {command.timeout_s:g} s and was killed"
            ) from error
        finally:
            await _end(process)
        return Completed(command, status, out, err)

    async def put(self, path: str, content: bytes | Path, mode: int = 0o600) -> None:
        """Replace a file; see `Remote.put`."""
        target = Path(expand(self.home, path))
        try:
            await asyncio.to_thread(_replace, target, content, mode)
        except OSError as error:
            raise CommandError(f"{self.name}: cannot write {target}: {reason(error)}") from error

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Read a file of at most `max_bytes`; see `Remote.get`."""
        source = Path(expand(self.home, path))
        try:
            content = await asyncio.to_thread(_read, source, max_bytes + 1)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            kind = MissingFileError if is_missing else CommandError
            raise kind(f"{self.name}: cannot read {source}: {reason(error)}") from error
        if len(content) > max_bytes:
            raise CommandError(f"{self.name}: {source} is larger than {max_bytes} bytes")
        return content

    @contextlib.asynccontextmanager
    async def lines(self, command: Command) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give a command's stdout line by line; see `Remote.lines`."""
        process = await self._spawn(command)
        feeding = asyncio.create_task(_feed(process, command.stdin), name=f"stdin:{self.name}")
        errors = asyncio.create_task(_last_bytes(process), name=f"stderr:{self.name}")
        try:
            yield self._each_line(process, errors)
        finally:
            feeding.cancel()
            errors.cancel()
            await _end(process)
            await asyncio.wait((feeding, errors))

    @contextlib.asynccontextmanager
    async def forward_socket(self, remote_socket_path: str) -> AsyncIterator[str]:
        """Give the path itself, after a look whether somebody listens; see `Remote.forward_socket`."""
        path = expand(self.home, remote_socket_path)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_unix_connection(path)
        except (OSError, TimeoutError) as error:
            raise ConnectError(f"{self.name}: nothing listens on {path}") from error
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        yield path

    async def close(self) -> None:
        """Nothing to close: every command ends with its call."""

    async def _spawn(self, command: Command) -> Process:
        check_command(command)
        environment = {**os.environ, "LC_ALL": "C", **dict(command.env)}
        try:
            return await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=DEVNULL if command.stdin is None else PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=environment,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except FileNotFoundError:
            return await _absent(command.argv[0], 127, "not found")
        except PermissionError:
            # Also what execvp says when some directory on PATH may not be looked into and no other has it.
            if shutil.which(command.argv[0], mode=os.F_OK, path=environment.get("PATH")) is None:
                return await _absent(command.argv[0], 127, "not found")
            return await _absent(command.argv[0], 126, "permission denied")
        except OSError as error:
            raise CommandError(
                f"{self.name}: cannot start {command.argv[0]}: {reason(error)}"
            ) from error

    async def _each_line(
        self, process: Process, errors: asyncio.Task[bytes]
    ) -> AsyncIterator[bytes]:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(MAX_LINE_BYTES):
            *complete, rest = (rest + data).split(b"\n")
            for line in complete:
                yield line
            while len(rest) > MAX_LINE_BYTES:
                yield rest[:MAX_LINE_BYTES]
                rest = rest[MAX_LINE_BYTES:]
        if rest:
            yield rest
        status = await process.wait()
        if status != 0:
            raise CommandError(
                f"{self.name}: command ended with status {status}: {clean(tail(await errors))}"
            )


async def _absent(program: str, status: int, reason: str) -> Process:
    """A program that cannot be started ends as it would under a shell, so that both ways look the same."""
    script = 'printf "%s: %s\\n" "$1" "$2" >&2; exit "$3"'
    return await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", script, "sh", program, reason, str(status),
        stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
    )  # fmt: skip


async def _feed(process: Process, stdin: bytes | None) -> None:
    """Write stdin and close it; a command may end without reading it all."""
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if stdin:
            process.stdin.write(stdin)
            await process.stdin.drain()
    process.stdin.close()


async def _bounded(reader: asyncio.StreamReader) -> bytes:
    pieces, total = [], 0
    while data := await reader.read(_CHUNK_BYTES):
        total += len(data)
        if total > MAX_OUTPUT_BYTES:
            raise CommandError(f"a command printed more than {MAX_OUTPUT_BYTES} bytes")
        pieces.append(data)
    return b"".join(pieces)


async def _communicate(process: Process, stdin: bytes | None) -> tuple[bytes, bytes]:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process, stdin))
            out = tasks.create_task(_bounded(process.stdout))
            err = tasks.create_task(_bounded(process.stderr))
    except BaseExceptionGroup as group:
        # Not `except*`: before Python 3.11.4 what is raised below it comes out wrapped again.
        if group.subgroup(CommandError) is None:
            raise
        raise group.exceptions[0] from None
    return out.result(), err.result()


async def _last_bytes(process: Process, keep_bytes: int = 4096) -> bytes:
    assert process.stderr is not None
    kept = b""
    while data := await process.stderr.read(_CHUNK_BYTES):
        kept = (kept + data)[-keep_bytes:]
    return kept


async def _end(process: Process) -> None:
    """Kill the command's whole session unless it ended by itself, close its pipes, and reap it."""
    if not _has_ended(process):
        _kill_session(process)
    # Nothing public closes the pipes; without it, wait() hangs on a paused one or on one a grandchild holds.
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001
    await process.wait()


def _has_ended(process: Process) -> bool:
    """Whether the command is over: its leader has exited, and nothing it left behind can still write to us."""
    outputs = (process.stdout, process.stderr)
    return process.returncode is not None and all(out is None or out.at_eof() for out in outputs)


def _kill_session(process: Process) -> None:
    """Kill the command's process group, and the groups that a shell or `timeout` made in its session."""
    if process.returncode is not None and _session_of(process.pid) is not None:
        return  # A number is used again only when its session is empty: this is somebody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for entry in Path("/proc").glob("[0-9]*"):
        if _session_of(int(entry.name)) == process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _replace(target: Path, content: bytes | Path, mode: int) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        written = _write(temporary, content)
        if written != _digest(temporary):
            raise CommandError(f"{temporary} holds other bytes than were written")
        temporary.chmod(mode)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes | Path) -> bytes:
    """Write and flush to the disk; return the SHA-256 of what was to be written."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        if isinstance(content, bytes):
            digest.update(content)
            file.write(content)
        else:
            with content.open("rb") as source:
                while data := source.read(_CHUNK_BYTES):
                    digest.update(data)
                    file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.digest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes)
