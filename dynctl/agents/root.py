"""The agent's directory: where things lie, and what it remembers of its units over restarts.

Not here: what the units are doing (`supervisor`). Everything is 0700 or 0600. Socket paths have 107 bytes at most,
so a long root has its sockets in a private directory under the temporary one.
IO: files.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from dynctl.agents.host.processes import Identity
from dynctl.agents.launch import Endpoints
from dynctl.agents.protocol import EngineWish, HostSlice, RelayWish, RouterUnit
from dynctl.core.deployment import EngineState
from dynctl.errors import DynctlError, ExitCode
from dynctl.files import reason, write_atomic

T = TypeVar("T")

# 107 − "/" − 10 of the incarnation − "/" − 36 of the socket names vLLM invents.
_MAX_RUN_BYTES = 107 - 1 - 10 - 1 - 36
_SECRET = re.compile(r"\$\{file:([^}]*)\}\Z")
_SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine told about itself when it was ready; 0: not told."""

    block_size_tokens: int = 0
    kv_capacity_tokens: int = 0
    max_model_len_tokens: int = 0
    version: str = ""
    """Of the engine; asked of kinds that have a floor."""


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a unit."""

    incarnation: str
    at: Endpoints
    identity: Identity | None = None
    """None: no process of ours (an adopted server)."""
    internal_port: int = 0
    started_unix_s: float = 0.0
    facts: Facts = field(default_factory=Facts)
    bundle: str = ""
    """Digest of the code it was started with; empty: not from a bundle."""
    argv: tuple[str, ...] = ()
    """What was started; empty: nothing of ours, or by an older agent."""


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One unit as remembered, enough to adopt its process again; exactly one wish is set."""

    id: str
    state: EngineState
    engine: EngineWish | None = None
    router: RouterUnit | None = None
    relay: RelayWish | None = None
    run: Run | None = None
    num_restarts: int = 0
    log_offset: int = 0
    is_held: bool = False
    """Drained by a person: stays down until a restart is asked for."""
    last_incarnation: str = ""
    """Of its last start, also after that ended: a member of a gang joins none twice."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`state/units.json`."""

    boot: str = ""
    units: tuple[UnitRecord, ...] = field(default=())


class Root:
    """Paths under one root and the files the agent owns there."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.run = self._short_run()
        self.logs = self.path / "logs"
        self.socket = self.run / "agent.sock"
        self._lock_fd = -1

    def _short_run(self) -> Path:
        run = self.path / "run"
        if len(os.fsencode(run)) <= _MAX_RUN_BYTES:
            return run
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:10]
        return Path(tempfile.gettempdir()) / f"dynctl-{os.getuid()}-{name}"

    def prepare(self) -> None:
        """Make the directories and take the lock that keeps a second agent away.

        Raises:
            DynctlError: when another agent runs here or the socket directory belongs to someone else.
        """
        for directory in (self.path, self.run, self.logs, self.path / "state"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.run.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise DynctlError(f"{self.run} is not a private directory of ours", "remove it")
        self._lock_fd = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise DynctlError(
                f"another agent runs in {self.path}", "stop it first", code=ExitCode.LOCKED
            ) from error
        write_atomic(self.path / "agent.socket-path", f"{self.socket}\n".encode())

    def close(self) -> None:
        """Give the lock back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def leave(self) -> None:
        """Remove what only a running agent needs: sockets, and the socket directory outside the root."""
        self.socket.unlink(missing_ok=True)
        (self.path / "agent.socket-path").unlink(missing_ok=True)
        if self.run.parent != self.path:
            shutil.rmtree(self.run, ignore_errors=True)

    def log_path(self, unit_id: str) -> Path:
        """Where a unit's output goes."""
        return self.logs / f"{unit_id}.log"

    def make_directory(self, incarnation: str) -> Path:
        """Make the directory of one start."""
        directory = self.run / incarnation
        directory.mkdir(mode=0o700)
        return directory

    def drop_directory(self, incarnation: str) -> None:
        """Remove the directory of one start with the sockets left in it."""
        if incarnation:
            shutil.rmtree(self.run / incarnation, ignore_errors=True)

    def resolve(self, value: str) -> str:
        """Return an environment value, read from `secrets/` when it says `${file:NAME}`.

        Raises:
            DynctlError: when there is no such secret.
        """
        match = _SECRET.match(value)
        if match is None:
            return value
        if not _SECRET_NAME.match(match[1]):
            raise DynctlError(f"{match[1]!r} is no name of a secret", "use letters, digits, . _ -")
        path = self.path / "secrets" / match[1]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise DynctlError(f"secret {path}: {reason(error)}", "run `dynctl up` again") from error
        with os.fdopen(fd, encoding="utf-8") as file:
            return file.read().removesuffix("\n")

    def load_slice(self) -> HostSlice | None:
        """Read the desired state, None when there is none yet."""
        return _load(self.path / "slice.json", HostSlice)

    def save_slice(self, wanted: HostSlice) -> None:
        """Write the desired state."""
        write_atomic(self.path / "slice.json", msgspec.json.encode(wanted))

    def forget_slice(self) -> None:
        """Drop the desired state: nothing shall run any more, also after a reboot."""
        (self.path / "slice.json").unlink(missing_ok=True)

    def load_memory(self) -> Memory:
        """Read what ran when it was last written."""
        return _load(self.path / "state" / "units.json", Memory) or Memory()

    def save_memory(self, memory: Memory) -> None:
        """Write what runs."""
        write_atomic(self.path / "state" / "units.json", msgspec.json.encode(memory))


def _load(path: Path, kind: type[T]) -> T | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        # Not ours to guess: the file is kept aside for a person to look at.
        aside = path.with_name(path.name + ".unreadable")
        path.replace(aside)
        raise DynctlError(
            f"{path} cannot be read: {error}", f"kept as {aside}; run `dynctl up` again"
        ) from error
