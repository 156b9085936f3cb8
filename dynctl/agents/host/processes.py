"""Processes that outlive their parent: started in an own session or scope, watched by pidfd, known again, ended whole.

Not here: what the processes are, when to start them. Identity is PID and start time within one boot; an environment
tag says which of our starts a process belongs to. A group is everything one start has left behind: its session,
its scope, its tag and its descendants.
IO: processes, /proc.
"""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynctl.errors import EngineError
from dynctl.files import reason

TAG = "DYNCTL_INCARNATION"
ROOT_TAG = "DYNCTL_ROOT"
_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36  # Source: linux/prctl.h


@dataclass(frozen=True, slots=True)
class Identity:
    """One started process, recognisable after a restart of the agent."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: a PID used again has another."""
    incarnation: str
    scope: str = ""
    """Name of its systemd scope, empty without one."""


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    session: int
    start_ticks: int
    state: str


def boot_identity() -> str:
    """Name this boot: the kernel's id and PID 1's start time, since a container's reboot keeps the kernel's."""
    kernel = (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    first = _stat(1)
    return f"{kernel}/{first.start_ticks if first else 0}"


def spawn(
    argv: Sequence[str], env: Mapping[str, str], log: Path, incarnation: str, scope: str, mode: str
) -> Identity:
    """Start a program in a session of its own, or in a systemd scope as well; its output goes to `log`.

    `mode` is `none`, `user` or `system`.

    Raises:
        EngineError: when the program cannot be started at all.
    """
    words = list(argv) if mode == "none" else [*_scope_words(scope, mode), *argv]
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        pid = os.posix_spawnp(
            words[0],
            words,
            {**env, TAG: incarnation},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out, 1),
                (os.POSIX_SPAWN_DUP2, out, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
        )
    except OSError as error:
        raise EngineError(
            f"cannot start {argv[0]}: {reason(error)}", "check that the program exists there"
        ) from error
    finally:
        os.close(out)
    stat = _stat(pid)
    assert stat is not None, "a child that was not waited for has an entry"
    return Identity(pid, stat.start_ticks, incarnation, scope if mode != "none" else "")


def _scope_words(scope: str, mode: str) -> list[str]:
    """With `--scope` systemd-run becomes the program itself: same PID, same output."""
    words = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={scope}"]
    if mode == "user":
        words.append("--user")
    return [*words, "--"]


def is_same(identity: Identity) -> bool:
    """Tell whether this very process still runs."""
    stat = _stat(identity.pid)
    if stat is None or stat.state in "ZX" or stat.start_ticks != identity.start_ticks:
        return False
    tag = _environ(identity.pid).get(TAG)
    # Programs that rename themselves overwrite their environment; the start time is proof enough then.
    return tag in (None, identity.incarnation)


def members(identity: Identity) -> list[int]:
    """List the live processes that belong to one start, also those whose parent is gone."""
    table = {pid: stat for pid in pids() if (stat := _stat(pid)) is not None}
    found = {
        pid
        for pid, stat in table.items()
        if pid != os.getpid()
        and stat.state not in "ZX"
        and (
            stat.session == identity.pid
            or _environ(pid).get(TAG) == identity.incarnation
            or (identity.scope and _in_scope(pid, identity.scope))
        )
        # A session id is a PID, so it may be used again: nothing in ours is older than its leader.
        and stat.start_ticks >= identity.start_ticks
    }
    while True:
        more = {p for p, s in table.items() if s.parent in found and p not in found}
        more -= {p for p in more if table[p].state in "ZX"}
        if not more:
            return sorted(found)
        found |= more


def tagged(root: str) -> dict[int, str]:
    """List all processes started under a root directory, with their incarnation."""
    found = {}
    for pid in pids():
        env = _environ(pid)
        if env.get(ROOT_TAG) == root and TAG in env and pid != os.getpid():
            found[pid] = env[TAG]
    return found


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal processes; those already gone are no fault."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


async def end_group(identity: Identity, limit_s: float) -> list[int]:
    """SIGKILL everything of one start until it is gone; returns what could not be ended within the limit."""
    deadline_s = time.monotonic() + limit_s
    while True:
        left = members(identity)
        if not left or time.monotonic() >= deadline_s:
            return left
        send(left, signal.SIGKILL)
        await asyncio.sleep(0.02)


async def end_strangers(root: str, known: Collection[str], limit_s: float) -> None:
    """SIGKILL what was started under a root by starts nobody remembers (the agent died in between)."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        left = [pid for pid, incarnation in tagged(root).items() if incarnation not in known]
        if not left:
            return
        send(left, signal.SIGKILL)
        await asyncio.sleep(0.02)


class Watched:
    """A process whose end is awaited, child or not. `close` lets go of it without touching it."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.gone: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """Exit status, negative for a signal, None when it is not known (adopted process)."""
        self._fd = -1
        try:
            self._fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            self.gone.set_result(None)
            return
        asyncio.get_running_loop().add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        status = _wait_for(self.identity.pid)
        self.close()
        if not self.gone.done():
            self.gone.set_result(status)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _wait_for(pid: int) -> int | None:
    try:
        waited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if waited else None


def become_subreaper() -> None:
    """Let orphans of our children come to us, so that none stays a zombie where PID 1 does not reap."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(watched: Collection[int]) -> None:
    """Collect dead children other than the watched ones; only where every child of this process is one of ours."""
    for pid in _children():
        if pid not in watched:
            stat = _stat(pid)
            if stat is not None and stat.state == "Z":
                _wait_for(pid)


def _children() -> list[int]:
    path = _PROC / "self/task" / str(os.getpid()) / "children"
    try:
        return [int(word) for word in path.read_text("ascii").split()]
    except OSError:
        return []


def pids() -> list[int]:
    """Every process we can see."""
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def name_of(pid: int) -> str:
    """What the kernel calls a process."""
    try:
        return (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "process"


def _stat(pid: int) -> _Stat | None:
    """Read /proc/PID/stat; the name in parentheses may hold anything, so read from the last one."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return _Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode("ascii"))


def _environ(pid: int) -> dict[str, str]:
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in content.split(b"\0") if b"=" in item)
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, _, v in pairs}


def _in_scope(pid: int, scope: str) -> bool:
    try:
        text = (_PROC / str(pid) / "cgroup").read_text("utf-8", "replace")
    except OSError:
        return False
    return any(f"/{scope}" in f"{line}/" and scope in line.split("/") for line in text.split("\n"))
