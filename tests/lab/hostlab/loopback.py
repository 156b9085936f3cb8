"""Hosts without root: one OpenSSH sshd per host on its own loopback address, run as this user.

Each has its own home directory and, if wanted, its own fake GPUs; the kernel, the processes and systemd
are the machine's. IO: sshd, files, /proc.
"""

import json
import os
import pwd
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hostlab import gpu_files
from hostlab.gpus import PRESETS
from hostlab.operator_home import OperatorHome, new_key
from hostlab.shell import LabError

_SSHD = "/usr/sbin/sshd"
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
_TAG = "DYNCTL_LOOPBACK_HOST"

# sshd enters the home of the passwd entry; the host's own home is meant. Subsystems come this way too.
_ENTER = '#!/bin/sh\ncd "$HOME" && exec /bin/sh -c "${SSH_ORIGINAL_COMMAND:-exec /bin/sh -i}"\n'


def why_no_sshd() -> str | None:
    """Say in one line why hosts on loopback cannot be had, None when they can."""
    if not Path(_SSHD).exists():
        return "OpenSSH's sshd is not installed"
    if not any(Path(p).exists() for p in _SFTP_SERVERS):
        return "OpenSSH's sftp-server is not installed"
    return None


@dataclass(slots=True)
class LoopbackHost:
    """One sshd and its home."""

    name: str
    address: str
    port: int
    directory: Path
    tag: str
    held: socket.socket
    """Keeps the port ours; sshd listens there all the same."""
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """The home directory of whoever logs in."""
        return self.directory / "home"

    @property
    def log(self) -> str:
        """What sshd said."""
        return (self.directory / "sshd.log").read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return pid → command line of everything started through this host's sshd."""
        found = {}
        wanted = f"{_TAG}={self.tag}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()
            except OSError:
                continue
        return found


class Loopback(OperatorHome):
    """Hosts that listen until the block ends; processes left on them are killed then."""

    def __init__(
        self, names: Sequence[str], directory: Path, gpus: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory / "loopback"
        self.gpus = gpus or {}
        self.hosts: dict[str, LoopbackHost] = {}
        self._names = names
        super().__init__(self.directory / "operator", nullcontext)

    def __enter__(self) -> Self:
        reason = why_no_sshd()
        if reason is not None:
            raise LabError(reason)
        self.make()
        if os.geteuid() == 0:
            # A root sshd insists on this empty directory even where it never uses it.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        try:
            for index, name in enumerate(self._names):
                self._start(index, name)
            for host in self.hosts.values():
                self._wait_ready(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sshds and what was started through them."""
        for host in self.hosts.values():
            if host.sshd is not None:
                host.sshd.terminate()
                host.sshd.wait(timeout=60)
                host.sshd = None
            host.held.close()
            # Asked again until none is left: a process may start another while we look.
            while left := host.processes():
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

    def __getitem__(self, name: str) -> LoopbackHost:
        return self.hosts[name]

    def _start(self, index: int, name: str) -> None:
        directory = self.directory / name
        address = f"127.0.88.{11 + index}"
        held = _hold_port(address)
        port = int(held.getsockname()[1])
        host = LoopbackHost(name, address, port, directory, secrets.token_hex(8), held)
        host.home.mkdir(parents=True, mode=0o700)
        self.trust([f"[{address}]:{host.port}"], new_key(directory / "host_key"))
        (directory / "authorized_keys").write_text(self.public_key)
        enter = directory / "enter"
        enter.write_text(_ENTER)
        enter.chmod(0o755)
        config = directory / "sshd_config"
        config.write_text(self._config(host, directory, enter))
        self.hosts[name] = host
        user = pwd.getpwuid(os.geteuid()).pw_name
        where = {"name": name, "address": address, "port": host.port}
        self.entries.append({**where, "user": user, "key": str(self.key)})
        with (directory / "sshd.log").open("wb") as log:
            host.sshd = subprocess.Popen(
                [_SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _config(self, host: LoopbackHost, directory: Path, enter: Path) -> str:
        env = {"HOME": str(host.home), _TAG: host.tag, "PATH": os.environ["PATH"]}
        preset = self.gpus.get(host.name)
        if preset is not None:
            gpus = directory / "gpus"
            gpu_files.install_beside(gpus, PRESETS[preset](host.name))
            env["PATH"] = f"{gpus / 'bin'}:{env['PATH']}"
            env["LD_LIBRARY_PATH"] = str(gpus / "lib")
            env["DYNCTL_LAB_GPUS"] = str(gpus / "gpus.tsv")
        pairs = " ".join(f'"{name}={value}"' for name, value in env.items())
        sftp = next(p for p in _SFTP_SERVERS if Path(p).exists())
        return (
            f"ListenAddress {host.address}\nPort {host.port}\nHostKey {directory / 'host_key'}\n"
            f"PidFile {directory / 'sshd.pid'}\nAuthorizedKeysFile {directory / 'authorized_keys'}\n"
            "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
            f"PrintMotd no\nSubsystem sftp {sftp}\nForceCommand {enter}\nSetEnv {pairs}\n"
        )

    def _wait_ready(self, host: LoopbackHost, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                with socket.create_connection((host.address, host.port), timeout=1.0) as sock:
                    if sock.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            if host.sshd is None or host.sshd.poll() is not None or time.monotonic() > deadline_s:
                raise LabError(f"{host.name}: sshd does not answer: {host.log[-800:]}")
            time.sleep(0.05)


def _hold_port(address: str) -> socket.socket:
    """Bind a port that nobody has, without listening, so that no other is given it before sshd listens there."""
    held = socket.socket()
    held.bind((address, 0))
    # Who says so as well, as sshd does, may bind it too.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def complete(port: int, prompt: str) -> dict[str, Any]:
    """Ask the simulated model behind a router for eight tokens; raises HTTPError."""
    body = {"model": "sim-model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def units(hosts: Loopback) -> dict[str, dict[str, Any]]:
    """What `status` says of all units of these hosts, by id."""
    done = hosts.dynctl("status", "-o", "json")
    statuses = json.loads(done.stdout)["hosts"].values()
    return {unit["id"]: unit for status in statuses for unit in status["units"]}
