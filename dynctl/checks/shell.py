"""Pieces of the shell lines that findings show: quoted, and the same everywhere. Pure."""

import shlex
from collections.abc import Sequence

from dynctl.core.hardware import Gpu, Host, Nic
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean


def quote(word: object) -> str:
    """Quote a word for a shell; control characters of hostile facts are dropped first."""
    return shlex.quote(clean(str(word), 200))


def program(path: str) -> str:
    """Quote the path of a program; a leading `~/` stays the home directory."""
    return f'"$HOME"/{quote(path[2:])}' if path.startswith("~/") else quote(path)


def join(argv: Sequence[str]) -> str:
    """Write a program and its arguments as a shell line."""
    return " ".join(quote(word) for word in argv)


def as_root(host: Host, *argv: str) -> tuple[str, ...]:
    """A program that needs root's rights on a host: with `sudo -n`, which never asks, for other users."""
    return argv if host.is_root else ("sudo", "-n", *argv)


def root_line(host: Host, *argv: str) -> str:
    """The same as a shell line for people, who may be asked for their password."""
    return join(argv if host.is_root else ("sudo", *argv))


def rdma_port(nic: Nic) -> str:
    """The directory of an RDMA port in sysfs."""
    return f"/sys/class/infiniband/{quote(nic.device)}/ports/{nic.port or 1}"


def on_host(entry: HostEntry, line: str) -> str:
    """A line for the operator's machine that runs another one on a host."""
    if entry.is_local:
        return f"sh -c {shlex.quote(line)}"
    port = f" -p {entry.port}" if entry.port else ""
    user = f"{quote(entry.user)}@" if entry.user else ""
    return f"ssh{port} {user}{quote(entry.address)} {shlex.quote(line)}"


def smi(gpu: Gpu, fields: str) -> str:
    """A line that asks nvidia-smi for some facts of one GPU."""
    return f"nvidia-smi -i {gpu.index} --query-gpu={fields} --format=csv,noheader"


def where(condition: str, *files: str) -> str:
    """An awk line that prints the input lines of a condition and fails when there is none."""
    return " ".join(["awk", shlex.quote(f"{condition} {{ print; n++ }} END {{ exit !n }}"), *files])
