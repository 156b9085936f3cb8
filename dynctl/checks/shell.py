"""Pieces of the shell lines that findings show: quoted, and the same everywhere. Pure."""

import shlex
from collections.abc import Sequence

from dynctl.core.hardware import Host
from dynctl.core.text import clean


def quote(word: object) -> str:
    """Quote a word for a shell; control characters of hostile facts are dropped first."""
    return shlex.quote(clean(str(word), 200))


def join(argv: Sequence[str]) -> str:
    """Write a program and its arguments as a shell line."""
    return " ".join(quote(word) for word in argv)


def as_root(host: Host, *argv: str) -> tuple[str, ...]:
    """A program that needs root's rights on a host: with `sudo -n`, which never asks, for other users."""
    return argv if host.is_root else ("sudo", "-n", *argv)


def root_line(host: Host, *argv: str) -> str:
    """The same as a shell line for people, who may be asked for their password."""
    return join(argv if host.is_root else ("sudo", *argv))


def listens(port: int, address: str | None = None) -> str:
    """A line that shows who listens on a TCP port, if anybody does."""
    where = f" and src {address}" if address else ""
    return f"ss -Hltnp 'sport = :{port}{where}' | grep ."
