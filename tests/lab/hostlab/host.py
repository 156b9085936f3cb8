"""One lab host: its file system, its systemd, its processes, and what can befall it.

IO: mounts, cgroups, processes.
"""

import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hostlab import network, teardown
from hostlab.rootfs import OPS_UID, OPS_USER
from hostlab.shell import LabError, run

REBOOT_STATUS = 133
"""What systemd-nspawn ends with when its system asked for a reboot."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host to make."""

    name: str
    gpus: str | None = None
    """Name of a GPU preset of `hostlab.gpus`, None for a host without GPUs."""
    binds: tuple[tuple[str, str], ...] = ()
    """(path on this machine, path on the host), read-only there."""
    has_python: bool = True


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process on a host, by its pid as this machine sees it."""

    pid: int
    uid: int
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command line, words joined by spaces."""
        return " ".join(self.argv)


@dataclass(slots=True)
class LabHost:
    """A booted machine of the lab."""

    lab_id: str
    spec: HostSpec
    address: str
    directory: Path
    rootfs: Path
    _process: subprocess.Popen[bytes] | None = None
    _runner: threading.Thread | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    exit_statuses: list[int] = field(default_factory=list)
    """How each boot so far ended."""

    @property
    def name(self) -> str:
        """The host's name, in the lab and as its own hostname."""
        return self.spec.name

    @property
    def namespace(self) -> str:
        """The host's network namespace."""
        return teardown.member_namespace(self.lab_id, self.name)

    @property
    def hub(self) -> str:
        """The operator's network namespace."""
        return teardown.hub_namespace(self.lab_id)

    @property
    def root(self) -> Path:
        """The host's file system, readable and writable whether it runs or not."""
        return self.directory / "root"

    @property
    def console(self) -> str:
        """What the host printed on its console."""
        path = self.directory / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    # Life -------------------------------------------------------------------------------------

    def make(self) -> None:
        """Lay the host's own layer over the shared file system and give it a network."""
        for name in ("upper", "work", "root"):
            (self.directory / name).mkdir(parents=True)
        layers = f"lowerdir={self.rootfs},upperdir={self.directory / 'upper'}"
        options = f"{layers},workdir={self.directory / 'work'}"
        run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)])
        network.add_member(self.hub, self.namespace, self.address)

    def power_on(self) -> None:
        """Start the host, or start it again with its files as they are."""
        if self.is_on:
            raise LabError(f"{self.name} is on already")
        self._stopping.clear()
        self._runner = threading.Thread(target=self._keep_running, name=f"lab:{self.name}")
        self._runner.daemon = True
        self._runner.start()

    def _keep_running(self) -> None:
        """Run the container until it is powered off; a reboot is a new run on the same files."""
        while not self._stopping.is_set():
            for path in self._cgroups:
                path.mkdir(parents=True, exist_ok=True)
            with (self.directory / "console").open("ab") as console:
                self._process = subprocess.Popen(
                    self._argv(), stdin=subprocess.DEVNULL, stdout=console, stderr=console
                )
            status = self._process.wait()
            self.exit_statuses.append(status)
            teardown.kill_cgroup(self._cgroups[0])
            if status != REBOOT_STATUS:
                return

    def _argv(self) -> list[str]:
        # Without an own control group all hosts would share one, and each systemd the others' units.
        join = " ".join(f"echo $$ > {path}/cgroup.procs &&" for path in self._cgroups)
        nspawn = [
            "systemd-nspawn",
            "--register=no",
            "--keep-unit",
            "-q",
            f"--directory={self.root}",
            f"--machine={self.namespace}",
            f"--hostname={self.name}",
            f"--network-namespace-path=/run/netns/{self.namespace}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            *[f"--bind-ro={source}:{target}" for source, target in self.spec.binds],
            "--boot",
        ]
        return ["sh", "-c", f'{join} exec "$@"', "sh", *nspawn]

    @property
    def _cgroups(self) -> list[Path]:
        return teardown.host_cgroups(self.lab_id, self.name)

    @property
    def is_on(self) -> bool:
        """Whether the host runs (or reboots just now)."""
        return self._runner is not None and self._runner.is_alive()

    def leader(self) -> int | None:
        """Return this machine's pid of the host's PID 1, None while there is none."""
        process = self._process
        if process is None or process.poll() is not None:
            return None
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            words = path.read_text().split()
        except OSError:
            return None
        return int(words[0]) if words else None

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until sshd answers and the user manager of `ops` runs."""
        deadline_s = time.monotonic() + timeout_s
        while not (self.answers_ssh() and self._is_user_manager_up()):
            if not self.is_on:
                raise LabError(
                    f"{self.name} ended with {self.exit_statuses}: {self.console[-800:]}"
                )
            if time.monotonic() > deadline_s:
                raise LabError(
                    f"{self.name} not up after {timeout_s:g} s; console ends: {self.console[-800:]}"
                )
            time.sleep(0.05)

    def answers_ssh(self) -> bool:
        """Tell whether sshd greets the operator within a second."""
        try:
            with (
                network.inside(self.hub),
                socket.create_connection((self.address, 22), timeout=1.0) as sock,
            ):
                return sock.recv(4) == b"SSH-"
        except OSError:
            return False

    def _is_user_manager_up(self) -> bool:
        leader = self.leader()
        return leader is not None and (
            Path(f"/proc/{leader}/root/run/user/{OPS_UID}/bus").exists()
            and Path(f"/proc/{leader}/root/run/dbus/system_bus_socket").exists()
        )

    def reboot(self, timeout_s: float = 60.0) -> None:
        """Reboot the way an operator does, and wait until the host is up again."""
        before, boots = self.leader(), len(self.exit_statuses)
        self.run(["systemctl", "reboot"])
        self._wait_for(lambda: len(self.exit_statuses) > boots, "end for its reboot", timeout_s)
        self._wait_for(lambda: self.leader() not in (None, before), "start again", timeout_s)
        self.wait_ready(timeout_s)

    def power_off(self, timeout_s: float = 60.0) -> None:
        """Shut the host down in order."""
        self._stopping.set()
        self.run(["systemctl", "poweroff"])
        self._wait_for(lambda: not self.is_on, "power off", timeout_s)

    def cut_power(self) -> None:
        """End every process of the host at once; files written so far stay."""
        self._stopping.set()
        teardown.kill_cgroup(self._cgroups[0])
        if self._runner is not None:
            self._runner.join(timeout=20)

    def _wait_for(self, is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline_s:
                raise LabError(f"{self.name} did not {what} within {timeout_s:g} s")
            time.sleep(0.05)

    def freeze(self) -> None:
        """Stop every process of the host where it is; its network stays up but nobody answers."""
        self._set_frozen(frozen=True)

    def thaw(self) -> None:
        """Let a frozen host go on."""
        self._set_frozen(frozen=False)

    def _set_frozen(self, *, frozen: bool) -> None:
        group = self._cgroups[0]
        (group / "cgroup.freeze").write_text("1" if frozen else "0")
        wanted = f"frozen {int(frozen)}"
        self._wait_for(
            lambda: wanted in (group / "cgroup.events").read_text(), f"become {wanted}", 10.0
        )

    # Network ----------------------------------------------------------------------------------

    def unplug(self) -> None:
        """Pull the network cable."""
        network.set_link(self.hub, self.address, up=False)

    def cut_off(self, peers: Sequence[str] | None = None) -> None:
        """Drop all packets silently, or only those to and from the addresses in `peers`."""
        network.drop_packets(self.namespace, tuple(peers) if peers is not None else None)

    def heal(self) -> None:
        """Undo `unplug` and `cut_off`."""
        network.set_link(self.hub, self.address, up=True)
        network.allow_again(self.namespace)

    def throttle(self, bits_s: int | None) -> None:
        """Limit the host's link, or free it with None."""
        network.throttle(self.hub, self.namespace, self.address, bits_s)

    def listening(self) -> list[tuple[str, int]]:
        """Return (address, port) of the host's listening TCP sockets."""
        leader = self.leader()
        if leader is None:
            raise LabError(f"{self.name} is off")
        return network.listening(leader)

    # Inside -----------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        check: bool = True,
        timeout_s: float = 60.0,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host without SSH, so that it works while the network is cut."""
        leader = self.leader()
        if leader is None:
            raise LabError(f"{self.name} is off")
        enter = ["nsenter", f"--target={leader}", "--all", "--wd=/", "--"]
        uid = 0 if user == "root" else OPS_UID
        home = "/root" if user == "root" else f"/home/{user}"
        env = [
            "env",
            "-i",
            f"HOME={home}",
            f"USER={user}",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            f"XDG_RUNTIME_DIR=/run/user/{uid}",
        ]
        become = (
            []
            if user == "root"
            else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        )
        return run([*enter, *become, *env, *argv], check=check, timeout_s=timeout_s, stdin=stdin)

    def write(
        self, path: str, content: str | bytes, *, mode: int = 0o644, user: str = "root"
    ) -> None:
        """Put a file on the host, with its directories."""
        target = self.root / path.lstrip("/")
        owner = OPS_UID if user == OPS_USER else 0
        missing = [p for p in target.parents if not p.exists() and p.is_relative_to(self.root)]
        target.parent.mkdir(parents=True, exist_ok=True)
        for directory in missing:
            os.chown(directory, owner, owner)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(mode)
        os.chown(target, owner, owner)

    def processes(self, pattern: str = "") -> list[HostProcess]:
        """Return the host's processes whose command line matches a regular expression."""
        found = []
        for pid in teardown.pids_in(self._cgroups[0] / "payload"):
            try:
                raw = Path(f"/proc/{pid}/cmdline").read_bytes()
                uid = Path(f"/proc/{pid}").stat().st_uid
            except OSError:
                continue
            argv = tuple(word.decode(errors="replace") for word in raw.split(b"\0") if word)
            if argv and re.search(pattern, " ".join(argv)):
                found.append(HostProcess(pid, uid, argv))
        return found

    def pid_inside(self, pid: int) -> int:
        """Return a process's pid as the host itself knows it, 0 when it is gone."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return 0
        numbers = next(line for line in lines if line.startswith("NSpid:"))
        return int(numbers.split()[-1])

    def pid_one_started(self) -> str:
        """Return when the host's PID 1 started, as the kernel's clock ticks."""
        return self.run(["cat", "/proc/1/stat"]).stdout.rpartition(")")[2].split()[19]

    def mount_small_disk(self, path: str, size_bytes: int) -> None:
        """Mount a tiny file system for `ops` at `path`, until the next boot."""
        self.run(["mkdir", "-p", path])
        options = f"size={size_bytes},uid={OPS_UID},gid={OPS_UID},mode=700"
        self.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path])
