"""An SSH server in this process whose login shell is a real one, with faults on demand."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field

import asyncssh
import pytest

from dynctl.core.inventory import HostEntry, SshSettings


@dataclass
class Sshd:
    """One server on 127.0.0.1; the knobs change what it does from the next command on."""

    host_key: asyncssh.SSHKey
    authorized: list[str] = field(default_factory=list)
    shell: tuple[str, ...] = ("sh", "-c")
    noise: bytes = b""
    """Printed by the login before the command's own output, as a chatty rc file does."""
    corrupt_stdin: bool = False
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    commands: list[str] = field(default_factory=list)
    offered_users: list[str] = field(default_factory=list)
    num_logins: int = 0
    connections: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    children: list[asyncio.subprocess.Process] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self):
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=lambda: _Login(self),
            server_host_keys=[self.host_key],
            process_factory=self._serve,
            encoding=None,
        )
        self.port = server.get_port()
        try:
            yield self
        finally:
            self.cut()
            server.close()
            await server.wait_closed()
            for child in self.children:
                await self._reap(child)

    def cut(self):
        """Drop every connection, as a link that is lost."""
        for connection in self.connections:
            connection.abort()

    async def _serve(self, process):
        self.commands.append(process.command)
        if self.noise:
            process.stdout.write(self.noise)
            process.stderr.write(self.noise)
        child = await asyncio.create_subprocess_exec(
            *self.shell,
            process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **self.env},
        )
        self.children.append(child)
        process.signal_received = lambda name: os.killpg(child.pid, getattr(signal, "SIG" + name))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed(process, child))
                tasks.create_task(_copy(child.stdout, process.stdout))
                tasks.create_task(_copy(child.stderr, process.stderr))
                status = await child.wait()
            if status < 0:
                process.exit_with_signal(signal.Signals(-status).name[3:])
            else:
                process.exit(status)
        except* (asyncssh.Error, OSError):
            pass
        finally:
            await self._reap(child)

    async def _feed(self, process, child):
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await process.stdin.read(65536):
                if self.corrupt_stdin:
                    data = data.swapcase()
                child.stdin.write(data)
                await child.stdin.drain()
        child.stdin.close()

    async def _reap(self, child):
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        child._transport.close()
        await child.wait()


async def _copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


class _Login(asyncssh.SSHServer):
    def __init__(self, sshd: Sshd) -> None:
        self._sshd = sshd

    def connection_made(self, conn):
        self._sshd.connections.append(conn)

    def begin_auth(self, username):
        self._sshd.num_logins += 1
        return True

    def public_key_auth_supported(self):
        return True

    def validate_public_key(self, username, key):
        self._sshd.offered_users.append(username)
        return key.get_fingerprint() in self._sshd.authorized

    def password_auth_supported(self):
        return True

    def validate_password(self, username, password):
        raise AssertionError("nobody may try a password")

    def unix_connection_requested(self, dest_path):
        return True

    def connection_requested(self, dest_host, dest_port, orig_host, orig_port):
        return True


@dataclass
class Home:
    """An operator's home directory: keys, configuration, known hosts."""

    path: object
    user_key: asyncssh.SSHKey

    @property
    def ssh(self):
        return self.path / ".ssh"

    def known(
        self, sshd: Sshd, name: str = "127.0.0.1", key: asyncssh.SSHKey | None = None
    ) -> None:
        public = (key or sshd.host_key).export_public_key().decode().strip()
        with (self.ssh / "known_hosts").open("a") as file:
            file.write(f"[{name}]:{sshd.port} {public}\n")

    def settings(self, **changes) -> SshSettings:
        values = {
            "config": str(self.ssh / "config"),
            "known_hosts": str(self.ssh / "known_hosts"),
            "connect_timeout_s": 60.0,
        }
        return SshSettings(**(values | changes))

    def entry(self, sshd: Sshd, name: str = "h1", **changes) -> HostEntry:
        values = {"address": "127.0.0.1", "port": sshd.port, "user": "ops"}
        return HostEntry(name=name, **(values | changes))


@pytest.fixture(scope="session")
def host_keys():
    return [asyncssh.generate_private_key("ssh-ed25519") for _ in range(4)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, so that the developer's keys, agent and known hosts play no part."""
    path = tmp_path / "home"
    (path / ".ssh").mkdir(parents=True, mode=0o700)
    user_key = asyncssh.generate_private_key("ssh-ed25519", comment="ops@test")
    user_key.write_private_key(str(path / ".ssh" / "id_ed25519"))
    user_key.write_public_key(str(path / ".ssh" / "id_ed25519.pub"))
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return Home(path, user_key)


@pytest.fixture
def sshd(host_keys, home):
    return Sshd(host_keys[0], [home.user_key.get_fingerprint()])


@pytest.fixture
def second_sshd(host_keys, home):
    return Sshd(host_keys[1], [home.user_key.get_fingerprint()])
