"""Who listens on which TCP port of this host, and runs of ports nobody uses.

A port that answers proves nothing about who answers: engines bind with SO_REUSEPORT, so the owner's PID counts.
IO: /proc, sockets.
"""

import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dynctl.agents.host import processes
from dynctl.errors import EngineError

_LISTEN = "0A"  # Source: TCP_LISTEN in include/net/tcp_states.h
# Below the range the kernel takes for outgoing connections (32768 by default), above what services use.
_FIRST, _LAST = 21000, 29984


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that listens; PID None when it is not ours to see."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else "another user's process"


def listening() -> dict[int, set[str]]:
    """Map every listening TCP port to its socket inodes."""
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                port = int(fields[1].rpartition(":")[2], 16)
                found.setdefault(port, set()).add(fields[9])
    return found


def owners(port: int, pids: Iterable[int] | None = None) -> tuple[Owner, ...]:
    """Name who listens on a port; looks at these processes only, or at all. Empty: nobody does."""
    inodes = listening().get(port)
    if not inodes:
        return ()
    links = {f"socket:[{inode}]" for inode in inodes}
    candidates = processes.pids() if pids is None else pids
    found = [Owner(pid, processes.name_of(pid)) for pid in candidates if _holds(pid, links)]
    if found or pids is not None:
        return tuple(found)
    return (Owner(None, "unknown"),)


def free_run(count: int, taken: Collection[int], start: int) -> int:
    """Find `count` successive loopback ports nobody listens on and that are not `taken`; `start` spreads the search.

    Raises:
        EngineError: when there is no such run.
    """
    busy = set(listening()) | set(taken)
    slots = (_LAST - _FIRST) // count
    for number in range(slots):
        first = _FIRST + (start + number) % slots * count
        run = range(first, first + count)
        if busy.isdisjoint(run) and all(_can_bind(port) for port in (run[0], run[-1])):
            return first
    raise EngineError(f"no {count} free ports in a row between {_FIRST} and {_LAST}")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _holds(pid: int, links: Collection[str]) -> bool:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if os.readlink(entry.path) in links:  # noqa: PTH115 - no Path per descriptor
                        return True
                except OSError:
                    continue
    except OSError:
        return False
    return False
