"""Which process holds a TCP port, as far as /proc lets us see. IO: files under /proc."""

from contextlib import suppress
from pathlib import Path

from dynctl.core.text import clean

_LISTEN = "0A"


def port_owner(port: int) -> str:
    """Name the process that listens on a port: `NAME (pid N)`; empty when it cannot be seen."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _lines(table)
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if not wanted:
        return ""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _holds(process, wanted):
            with suppress(OSError):
                name = (process / "comm").read_text(errors="replace")
                return f"{clean(name, 40)} (pid {process.name})"
    return ""


def _lines(table: str) -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return []


def _holds(process: Path, wanted: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) in wanted:
                    return True
    return False
