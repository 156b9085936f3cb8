"""Take a lab apart by its id alone: processes, mounts, namespaces, files.

Run as `python -m hostlab.teardown ID` it waits for the end of its stdin first: the lab keeps the
other end of that pipe, so a test process that dies takes its hosts with it.
IO: /proc, cgroups, mounts, files.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from hostlab.rootfs import cache_dir
from hostlab.shell import LabError, run

NAMESPACE_PREFIX = "dynlab-"


def run_root() -> Path:
    """Return the directory that holds one directory per living lab."""
    return cache_dir() / "run"


def hub_namespace(lab_id: str) -> str:
    """Return the name of the lab's operator namespace."""
    return f"{NAMESPACE_PREFIX}{lab_id}"


def member_namespace(lab_id: str, name: str) -> str:
    """Return the name of a host's (or the outsider's) namespace."""
    return f"{NAMESPACE_PREFIX}{lab_id}-{name}"


def cgroup_roots() -> list[Path]:
    """Return where a host's control group is made: cgroup2, and systemd's own v1 tree where it is.

    Raises:
        LabError: when there is no cgroup2 mount.
    """
    unified, named = None, None
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" and unified is None:
            unified = Path(where)
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            named = Path(where)
    if unified is None:
        raise LabError("no cgroup2 mount")
    return [unified] if named is None else [unified, named]


def host_cgroups(lab_id: str, name: str) -> list[Path]:
    """Return the control groups of one host, the cgroup2 one first."""
    return [root / f"dynlab-{lab_id}" / name for root in cgroup_roots()]


def kill_cgroup(path: Path, timeout_s: float = 20.0) -> None:
    """Kill every process below a cgroup2 directory and wait until it is empty."""
    deadline_s = time.monotonic() + timeout_s
    while path.exists() and pids_in(path):
        (path / "cgroup.freeze").write_text("0")
        (path / "cgroup.kill").write_text("1")
        if time.monotonic() > deadline_s:
            raise LabError(f"{path}: processes {pids_in(path)} survive SIGKILL")
        time.sleep(0.02)


def pids_in(path: Path) -> list[int]:
    """Return the processes in a control group and all below it."""
    pids = []
    for file in [path / "cgroup.procs", *path.rglob("cgroup.procs")]:
        try:
            pids += [int(word) for word in file.read_text().split()]
        except OSError:
            continue  # the group went away while we looked
    return sorted(set(pids))


def remove_cgroup(path: Path) -> None:
    """Remove an empty control group and all below it; one that is busy stays."""
    if not path.exists():
        return
    for below in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        _rmdir(below)
    _rmdir(path)


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return


def tear_down(lab_id: str) -> None:
    """End everything that belongs to a lab. Harmless when there is nothing."""
    roots = [root / f"dynlab-{lab_id}" for root in cgroup_roots()]
    kill_cgroup(roots[0])
    for root in roots:
        remove_cgroup(root)
    namespaces = lab_namespaces(lab_id)
    for namespace in namespaces:
        _kill_members(namespace)
    directory = run_root() / lab_id
    for mount in lab_mounts(lab_id):
        run(["umount", "--lazy", mount], check=False)
    for namespace in namespaces:
        run(["ip", "netns", "delete", namespace], check=False)
    for leftover in Path("/run/systemd/nspawn/propagate").glob(f"{hub_namespace(lab_id)}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def lab_namespaces(lab_id: str) -> list[str]:
    """Return the names of a lab's network namespaces."""
    name = hub_namespace(lab_id)
    root = Path("/run/netns")
    found = [path.name for path in root.iterdir()] if root.exists() else []
    return sorted(n for n in found if n == name or n.startswith(f"{name}-"))


def lab_mounts(lab_id: str) -> list[str]:
    """Return a lab's mount points on this machine, deepest first."""
    prefix = f"{run_root() / lab_id}/"
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sorted((w for line in lines if (w := line.split()[1]).startswith(prefix)), reverse=True)


def _kill_members(namespace: str) -> None:
    """Kill what still runs in a namespace, but never this process."""
    listed = run(["ip", "netns", "pids", namespace], check=False).stdout.split()
    for pid in {int(word) for word in listed} - {os.getpid(), os.getppid()}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def process_started(pid: int) -> str:
    """Return the start time of a process in clock ticks, as text; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def claim(lab_id: str) -> Path:
    """Make a lab's directory and note which process owns it."""
    directory = run_root() / lab_id
    # Renamed into place with its owner inside, so that no sweep ever sees a lab without one.
    fresh = run_root() / f".{lab_id}"
    fresh.mkdir(parents=True)
    (fresh / "owner").write_text(f"{os.getpid()} {process_started(os.getpid())}")
    fresh.rename(directory)
    return directory


def sweep() -> list[str]:
    """Take apart every lab whose owner is gone, and return their ids."""
    stale = []
    for directory in sorted(run_root().glob("[!.]*")):
        owner = directory / "owner"
        words = owner.read_text().split() if owner.exists() else []
        if len(words) == 2 and process_started(int(words[0])) == words[1]:
            continue
        tear_down(directory.name)
        stale.append(directory.name)
    return stale


def main() -> None:
    """Wait until the lab's process is gone, then clean up after it."""
    sys.stdin.buffer.read()
    tear_down(sys.argv[1])


if __name__ == "__main__":
    main()
