"""New host keys: what a person is asked about. Not here: asking, connecting. IO: none of its own; the kinds of keys are `known_hosts`'s."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynctl.errors import TrustError
from dynctl.remote.known_hosts import HostKey, lookup_name


@dataclass(frozen=True, slots=True)
class NewHostKey:
    """A host key nobody has accepted yet."""

    name: str
    """The host's name in the inventory, or the jump host's address."""
    host: str
    port: int
    key: HostKey


class UnknownKeyError(TrustError):
    """Raised when a host shows a key that known_hosts does not list."""

    def __init__(self, new: NewHostKey, path: Path) -> None:
        self.new = new
        where = lookup_name(new.host, new.port)
        super().__init__(
            f"{new.name}: the host key of {where} is not known: {new.key.kind} {new.key.fingerprint}",
            f"compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_{_short(new.key.kind)}_key.pub), then add "
            f"this line to {path}: {where} {new.key.line}",
        )


Confirm = Callable[[Sequence[NewHostKey]], Awaitable[bool]]
"""Asks a person once about all new host keys; true accepts them."""


def _short(kind: str) -> str:
    """The part of OpenSSH's host key file names: `ssh-ed25519` is in ssh_host_ed25519_key."""
    return "ecdsa" if kind.startswith("ecdsa") else kind.removeprefix("ssh-")
