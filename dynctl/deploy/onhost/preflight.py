"""Look for what would stop `up` on this host before anything is changed: ports, disk, paths, rights.

Runs on the host, standard library only. IO: files, sockets.
"""

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path


def existing_parent(path: Path) -> Path:
    """The nearest directory above a path that is there already."""
    while not path.exists():
        path = path.parent
    return path


def port_owner(port: int) -> tuple[int, str]:
    """Find the process that listens on a TCP port, as far as this user may see it: pid (0: unknown) and a name."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            for fd in (entry / "fd").iterdir():
                target = str(fd.readlink())
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    command = (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                        .strip()
                    )
                    return int(entry.name), f"pid {entry.name} ({command[:80]})"
        except OSError:
            continue
    return 0, "another process"


def is_ours(pid: int, root: Path) -> bool:
    """Whether a process was started from our root: one whose agent died, and which the next agent adopts."""
    try:
        return os.fsencode(root / "bundles") in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def check_port(address: str, port: int, root: Path) -> dict[str, str] | None:
    """Try to bind; a listener elsewhere on the machine also counts."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                pid, owner = port_owner(port)
                if is_ours(pid, root):
                    return None
                text = f"port {port} on {address} is in use by {owner}"
                return {
                    "code": "port-in-use",
                    "text": text,
                    "hint": "stop that process, or choose another port: ports.base, or the router's listen",
                }
            if error.errno == errno.EADDRNOTAVAIL:
                text = f"address {address} is not one of this host's"
                return {
                    "code": "address-unknown",
                    "text": text,
                    "hint": "write one of its own addresses: data_address of the host, or the router's listen",
                }
            return {
                "code": "port-refused",
                "text": f"cannot listen on {address}:{port}: {error.strerror}",
                "hint": "choose another port",
            }
    return None


def check_disk(root: Path, needed_bytes: int) -> dict[str, str] | None:
    """Ask for the room the bundle needs, and for the right to write there."""
    parent = existing_parent(root)
    if not os.access(parent, os.W_OK | os.X_OK):
        return {
            "code": "not-writable",
            "text": f"{parent} is not writable for this user",
            "hint": "set root: for this host to a directory of yours",
        }
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        text = (
            f"{parent} has {free / 2**20:.0f} MiB free, {needed_bytes / 2**20:.0f} MiB are needed"
        )
        return {
            "code": "disk-full",
            "text": text,
            "hint": "free some space, or set root: to a directory on another disk",
        }
    return None


def check_path(path: str, what: str) -> dict[str, str] | None:
    """A file or directory an engine will read must be there and readable."""
    if not Path(path).exists():
        return {
            "code": "path-missing",
            "text": f"{what} {path} does not exist",
            "hint": "copy it there, or correct the path in the inventory",
        }
    if not os.access(path, os.R_OK):
        return {
            "code": "path-unreadable",
            "text": f"{what} {path} is not readable for this user",
            "hint": f"chmod -R a+rX {path}",
        }
    return None


def main() -> None:
    """Print all problems as one JSON list."""
    wish = json.loads(sys.argv[1])
    found = [check_disk(Path(wish["root"]), wish["needed_bytes"])]
    found += [check_port(address, port, Path(wish["root"])) for address, port in wish["ports"]]
    found += [check_path(path, what) for path, what in wish["paths"]]
    print(json.dumps([problem for problem in found if problem]))


if __name__ == "__main__":
    main()
