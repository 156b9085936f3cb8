"""A lab: hosts on one bridge, an operator's home with keys, and an end that leaves nothing.

    with Lab([HostSpec("gpu-1", gpus="hgx-h100"), HostSpec("head")]) as lab:
        lab.write_inventory([...])
        lab.dynctl("discover")

IO: everything in this package.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from hostlab import gpu_files, network, rootfs, sysfs, teardown
from hostlab.gpus import PRESETS
from hostlab.host import HostSpec, LabHost
from hostlab.operator_home import OperatorHome, new_key
from hostlab.rootfs import OPS_USER
from hostlab.shell import LabError

_PACKAGE_ROOT = Path(__file__).resolve().parents[1]


class Lab(OperatorHome):
    """Hosts that run until the block ends, and their operator. Entering boots them all at once."""

    def __init__(self, specs: Sequence[HostSpec]) -> None:
        self.id = secrets.token_hex(3)
        self.specs = tuple(specs)
        self.hosts: dict[str, LabHost] = {}
        self.directory = teardown.run_root() / self.id
        self._reaper: subprocess.Popen[bytes] | None = None
        super().__init__(self.directory / "operator", self._inside)

    def __enter__(self) -> Self:
        teardown.sweep()
        lower = rootfs.ensure_rootfs()
        teardown.claim(self.id)
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "hostlab.teardown", self.id],
            stdin=subprocess.PIPE,
            cwd=_PACKAGE_ROOT,
            start_new_session=True,
        )
        try:
            self.make()
            network.add_hub(self.hub)
            network.add_member(self.hub, self.outsider, network.OUTSIDER_ADDRESS)
            for index, spec in enumerate(self.specs):
                self._make_host(index, spec, lower)
            for host in self.hosts.values():
                host.power_on()
            for host in self.hosts.values():
                host.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and remove everything the lab made."""
        for host in self.hosts.values():
            host.cut_power()
        teardown.tear_down(self.id)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(timeout=60)
            self._reaper = None

    def _make_host(self, index: int, spec: HostSpec, lower: Path) -> None:
        directory = self.directory / "hosts" / spec.name
        host = LabHost(self.id, spec, network.host_address(index), directory, lower)
        self.hosts[spec.name] = host
        host.make()
        self._write_identity(host)
        for source, target in spec.binds:
            if not Path(source).exists():
                raise LabError(f"{spec.name}: nothing at {source} to show at {target}")
        machine = PRESETS[spec.gpus](spec.name) if spec.gpus is not None else None
        if machine is not None:
            gpu_files.install(host.root, machine)
        sysfs.install(host.root, machine.nics if machine is not None else ())
        if not spec.has_python:
            for name in ("python3", "python3.11"):
                (host.root / "usr/bin" / name).unlink(missing_ok=True)

    def _write_identity(self, host: LabHost) -> None:
        """Give a host what makes it one: its names, its keys, and who may log in."""
        private = host.directory / "host_key"
        public = new_key(private)
        host.write("/etc/ssh/ssh_host_ed25519_key", private.read_text(), mode=0o600)
        host.write("/etc/ssh/ssh_host_ed25519_key.pub", public)
        self.trust((host.name, host.address), public)
        names = "".join(
            f"{network.host_address(i)} {spec.name}\n" for i, spec in enumerate(self.specs)
        )
        host.write("/etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{names}")
        host.write("/etc/hostname", f"{host.name}\n")
        # Stable over reboots, and different on every host, as on real machines.
        host.write("/etc/machine-id", f"{secrets.token_hex(16)}\n")
        host.write("/root/.ssh/authorized_keys", self.public_key, mode=0o600)
        mine = f"/home/{OPS_USER}/.ssh/authorized_keys"
        host.write(mine, self.public_key, mode=0o600, user=OPS_USER)
        entry = {"name": host.name, "address": host.address, "user": OPS_USER}
        self.entries.append({**entry, "key": str(self.key)})

    @property
    def hub(self) -> str:
        """The operator's network namespace."""
        return teardown.hub_namespace(self.id)

    @property
    def outsider(self) -> str:
        """A namespace on the same network that owns nothing: where an attacker would sit."""
        return teardown.member_namespace(self.id, "outsider")

    @property
    def reaper_pid(self) -> int | None:
        """The process that cleans up should this one die."""
        return self._reaper.pid if self._reaper is not None else None

    def __getitem__(self, name: str) -> LabHost:
        return self.hosts[name]

    def _inside(self) -> AbstractContextManager[None]:
        return network.inside(self.hub)

    def open_ports(self, host: str) -> list[int]:
        """Return the TCP ports of a host that an outsider on the network can connect to."""
        return network.scan_ports(self.outsider, self[host].address)

    def left_on_hosts(self) -> dict[str, list[str]]:
        """Return, per host, what of dynctl and engines is there and stays: processes, ports and directories."""
        deadline_s = time.monotonic() + 10.0
        while (found := self._on_hosts_now()) and time.monotonic() < deadline_s:
            time.sleep(0.2)  # what was told to end may still be ending
        return found

    def _on_hosts_now(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for host in self.hosts.values():
            left = [p.line for p in host.processes(r"dynctl|vllm|VLLM")]
            left += [f"{address}:{port}" for address, port in host.listening() if port != 22]
            for place in (f"home/{OPS_USER}/.dynctl", "root/.dynctl"):
                if (host.root / place).exists():
                    left.append(f"/{place}")
            if left:
                found[host.name] = left
        return found


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Wait until something holds; the time limit only catches hangs.

    Raises:
        LabError: naming `what` did not come to pass.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise LabError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)
