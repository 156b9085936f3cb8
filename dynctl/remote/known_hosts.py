"""Known host keys with the file and line each stands on, and new ones added under a lock. Not here: connections.

Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT, OpenSSH 9.
IO: files.
"""

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GLOBAL_FILE = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public host key as it stands on the wire."""

    kind: str
    """Such as `ssh-ed25519`."""
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The form `ssh-keygen -l` prints: `SHA256:…`."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    @property
    def line(self) -> str:
        """Kind and key as they stand in a known_hosts file."""
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line that names a host."""

    path: Path
    line_number: int
    marker: str
    """Empty, `@cert-authority` or `@revoked`."""
    key: HostKey


def lookup_name(host: str, port: int) -> str:
    """The name under which a host's key is kept: with the port unless it is 22."""
    return host if port == 22 else f"[{host}]:{port}"


class KnownHosts:
    """The keys of one user file and of the machine's file."""

    def __init__(self, path: Path, others: Sequence[Path] = (GLOBAL_FILE,)) -> None:
        self.path = path
        self._others = tuple(others)

    def lookup(self, host: str, port: int) -> tuple[KnownKey, ...]:
        """Return every line that names the host, in file order."""
        name = lookup_name(host, port).lower()
        found: list[KnownKey] = []
        for path in (self.path, *self._others):
            found += _matches(path, name)
        return tuple(found)

    def add(self, keys: Iterable[tuple[str, int, HostKey]]) -> None:
        """Append keys of hosts not yet listed; several runs may do so at once."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = file.read()
            present = set(before.decode("utf-8", "replace").splitlines())
            lines = [f"{lookup_name(host, port)} {key.line}" for host, port, key in keys]
            new = "".join(f"{line}\n" for line in dict.fromkeys(lines) if line not in present)
            lead = "\n" if before and not before.endswith(b"\n") else ""
            if new:
                file.write((lead + new).encode())


def _matches(path: Path, name: str) -> list[KnownKey]:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or not _names(fields[0], name):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        found.append(KnownKey(path, number, marker, HostKey(fields[1], blob)))
    return found


def _names(patterns: str, name: str) -> bool:
    """Tell whether a comma list of patterns names a host: one matches, and none with `!` does."""
    if patterns.startswith("|1|"):
        return _hashed(patterns, name)
    is_named = False
    for pattern in patterns.lower().split(","):
        if pattern.startswith("!"):
            if _glob(pattern[1:], name):
                return False
        elif _glob(pattern, name):
            is_named = True
    return is_named


def _glob(pattern: str, name: str) -> bool:
    # Only * and ? are special here; brackets belong to [host]:port.
    literal = re.sub(r"\[", "[[]", pattern)
    return fnmatch.fnmatchcase(name, literal)


def _hashed(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        expected = base64.b64decode(digest)
        # HMAC-SHA1 is the file format's, and hides names only.
        made = hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest()
    except ValueError:
        return False
    return hmac.compare_digest(expected, made)
