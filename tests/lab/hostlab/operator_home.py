"""The operator's side of a lab: a home directory with keys, and the commands run from there.

The developer's own `~/.ssh`, agent and settings are kept out. IO: files, processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hostlab.rootfs import cache_dir
from hostlab.shell import run

_DROPPED = ("SSH_", "DYNCTL_", "PYTHON", "HOME", "XDG_", "COLUMNS", "LINES", "PYTEST_")


class OperatorHome:
    """One operator. `inside()` gives the block in which their network is the calling thread's."""

    def __init__(self, home: Path, inside: Callable[[], AbstractContextManager[None]]) -> None:
        self.home = home
        self.inside = inside
        self.entries: list[dict[str, object]] = []
        """One inventory entry per host, in the order they were made."""

    def make(self) -> None:
        """Make the directory and the operator's key pair."""
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        new_key(self.key)

    @property
    def key(self) -> Path:
        """The operator's private key."""
        return self.home / ".ssh/id_lab"

    @property
    def public_key(self) -> str:
        """The operator's public key line."""
        return public_half(self.key).read_text()

    @property
    def known_hosts(self) -> Path:
        """The hosts' true keys."""
        return self.home / ".ssh/known_hosts"

    def trust(self, names: Iterable[str], public_line: str) -> None:
        """Add a host's true key to known_hosts."""
        with self.known_hosts.open("a") as file:
            file.write(f"{','.join(names)} {public_line}")

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment for dynctl and ssh in which only the lab's keys exist."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
        # Wheels fetched for the bundles are kept over runs, as a real operator's are.
        own = {"HOME": str(self.home), "DYNCTL_CACHE": str(cache_dir().parent), "NO_COLOR": "1"}
        return kept | own | more

    def write_inventory(
        self,
        deployments: Sequence[Mapping[str, object]],
        *,
        hosts: Mapping[str, Mapping[str, object]] | None = None,
        path: str = "inventory.yaml",
        **top: object,
    ) -> Path:
        """Write an inventory of the hosts; `hosts` adds keys per host, `top` replaces top-level keys."""
        extra = hosts or {}
        document = {
            "cluster": "lab",
            "ssh": {"known_hosts": str(self.known_hosts), "config": False},
            "hosts": [{**entry, **extra.get(str(entry["name"]), {})} for entry in self.entries],
            "deployments": list(deployments),
        }
        target = self.home / path
        # JSON is YAML, and no value of ours can be read as anything else.
        target.write_text(json.dumps(document | top, indent=2) + "\n")
        return target

    def dynctl(
        self,
        *args: str,
        timeout_s: float = 300.0,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line tool in the operator's home; any exit status returns."""
        with self.inside():
            return subprocess.run(
                [sys.executable, "-m", "dynctl", *args],
                cwd=self.home,
                env=self.env(**(env or {})),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )

    def start(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command line tool and return while it runs."""
        with self.inside():
            return subprocess.Popen(
                [sys.executable, "-m", "dynctl", *args],
                cwd=self.home,
                env=self.env(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def ssh(
        self,
        name: str,
        *argv: str,
        user: str | None = None,
        key: Path | None = None,
        stdin: str | None = None,
        timeout_s: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host over the machine's own OpenSSH client."""
        entry = next(e for e in self.entries if e["name"] == name)
        options = ["BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"]
        options += [f"UserKnownHostsFile={self.known_hosts}", "ConnectTimeout=10"]
        flags = [part for option in options for part in ("-o", option)]
        flags += ["-p", str(entry.get("port", 22)), "-i", str(key or self.key)]
        target = f"{user or entry['user']}@{entry['address']}"
        with self.inside():
            return run(
                ["ssh", "-F", "none", *flags, target, *argv],
                check=False,
                timeout_s=timeout_s,
                stdin=stdin,
                env=self.env(),
            )


def new_key(path: Path) -> str:
    """Make an ed25519 key pair and return its public line."""
    path.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)])
    return public_half(path).read_text()


def public_half(path: Path) -> Path:
    """Return where the public half of a private key lies."""
    return path.with_name(path.name + ".pub")
