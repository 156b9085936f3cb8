"""Where things lie on a host, and what the agent's service is called. Pure."""

from dataclasses import dataclass
from pathlib import Path

from dynctl.core.hardware import Host
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.remote.port import expand


@dataclass(frozen=True, slots=True)
class Place:
    """The directory dynctl owns on one host."""

    host_name: str
    root: str
    home: str = ""
    """The user's home directory there."""

    def path(self, wished: str) -> str:
        """A path of the inventory on this host: `~/` is the home directory."""
        return expand(self.home, wished)

    def bundle_path(self, digest: str) -> str:
        """Where a bundle is unpacked; this directory goes onto PYTHONPATH."""
        return f"{self.root}/bundles/{digest}"

    def tls(self, name: str) -> str:
        """A certificate or key."""
        return f"{self.root}/tls/{name}"

    def tokenizer(self, deployment: str) -> str:
        """Where a tokenizer copied from an engine's host lies."""
        return f"{self.root}/tokenizers/{deployment}"

    def decisions(self, router: str) -> str:
        """Where a router's decision log lies."""
        return f"{self.root}/state/decisions/{router}"


def place_of(entry: HostEntry, inventory: Inventory, home: str) -> Place:
    """Tell where dynctl keeps its files on a host: `root` if given, else a directory per cluster."""
    if entry.root is not None:
        root = expand(home, entry.root)
        return Place(entry.name, f"{root.rstrip('/')}/{inventory.cluster}", home)
    if entry.is_local:
        return Place(entry.name, str(state_dir(inventory) / "hosts" / entry.name), home)
    return Place(entry.name, f"{home.rstrip('/')}/.dynctl/{inventory.cluster}", home)


def state_dir(inventory: Inventory) -> Path:
    """The operator's own directory for a cluster: `.dynctl/CLUSTER` beside the inventory."""
    path = Path(inventory.path)
    beside = path.parent if path.suffix else Path()
    return (beside / ".dynctl" / inventory.cluster).absolute()


def unit_name(cluster: str) -> str:
    """The agent's systemd unit."""
    return f"dynctl-{cluster}.service"


def scope_of(entry: HostEntry, host: Host) -> str:
    """How the agent is kept alive: `system` or `user` unit, or `none` for a session of its own.

    `local` is never put under systemd: what a laptop tries must not survive on it.
    """
    if entry.is_local:
        return "none"
    if host.is_root and host.has_systemd_system:
        return "system"
    return "user" if host.has_systemd_user and not host.is_root else "none"


def unit_text(cluster: str, place: Place, python: str, digest: str, scope: str) -> str:
    """The agent's unit file. Engines run in scopes of their own, so stopping this stops no engine."""
    bundle = place.bundle_path(digest)
    limits = "LimitMEMLOCK=infinity\nLimitNOFILE=1048576\n" if scope == "system" else ""
    log = f"{place.root}/logs/agent.log".replace("%", "%%")
    wanted_by = "multi-user.target" if scope == "system" else "default.target"
    return (
        f"[Unit]\nDescription=dynctl agent of cluster {cluster}\nStartLimitIntervalSec=0\n\n"
        "[Service]\nType=notify\nNotifyAccess=main\n"
        f"Environment={_quote(f'PYTHONPATH={bundle}')} DYNCTL_SCOPE={scope} PYTHONUNBUFFERED=1\n"
        f"ExecStart={_quote(python)} -sP -m dynctl.agents --root {_quote(place.root)}\n"
        f"StandardOutput=append:{log}\nStandardError=append:{log}\n"
        f"Restart=always\nRestartSec=1\nKillMode=process\nTimeoutStopSec=20\nUMask=0077\n{limits}\n"
        f"[Install]\nWantedBy={wanted_by}\n"
    )


def _quote(text: str) -> str:
    """Quote a word for a unit file: systemd reads C escapes, `%` specifiers and `$` variables."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
