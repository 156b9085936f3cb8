"""Logging in: hop by hop, each with its own options; host keys checked before anything secret is sent.

Not here: commands. Foreign errors end here as ConnectError and TrustError with the next step.
IO: network, files (known_hosts, keys).
"""

import asyncio
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from dynctl.core.inventory import SshSettings
from dynctl.core.text import clean
from dynctl.errors import ConnectError, TrustError
from dynctl.files import reason
from dynctl.remote.dial import dial
from dynctl.remote.keys import KeyRing
from dynctl.remote.known_hosts import HostKey, KnownHosts, KnownKey, lookup_name
from dynctl.remote.routes import MAX_HOPS, Hop, Route, resolve
from dynctl.remote.trust import NewHostKey, UnknownKeyError

KEEPALIVE_COUNT = 3
MAX_STARTS_PER_JUMP = 8
"""Connections being opened through one jump host at a time; sshd drops logins past MaxStartups."""
MAX_TRIES = 3
_BACKOFF_S = 0.3
_JUMP_FAILURE_S = 5.0
"""A jump host that failed is not tried again for this long, or every host behind it would wait in turn."""


_PLAIN: dict[str, Any] = {
    "client_keys": None,  # the gate hands them out one by one
    "preferred_auth": "publickey",
    "public_key_auth": True,
    "password_auth": False,
    "kbdint_auth": False,
    "gss_auth": False,
    "gss_kex": False,
    "host_based_auth": False,
    "agent_forwarding": False,
    "x11_forwarding": False,
    "command": None,
    "request_pty": False,
    "connect_timeout": None,  # limited by our own blocks
    "login_timeout": 0,
    "keepalive_count_max": KEEPALIVE_COUNT,
}
"""What holds for every login: public keys only, nothing forwarded, nothing asked."""


@dataclass(slots=True)
class Link:
    """An open connection and the route it took."""

    connection: asyncssh.SSHClientConnection
    route: Route
    host_key: HostKey


class Connector:
    """Opens connections; jump hosts are shared by all hosts behind them."""

    def __init__(self, settings: SshSettings, keys: KeyRing | None = None) -> None:
        self.settings = settings
        self.known_hosts = KnownHosts(Path(settings.known_hosts).expanduser())
        self._config = Path(settings.config).expanduser() if settings.config else None
        self._keys = keys or KeyRing()
        self._jumps: dict[Hop, tuple[asyncio.Lock, asyncio.Semaphore]] = {}
        self._jump_links: dict[Hop, Link] = {}
        self._jump_failures: dict[Hop, tuple[float, ConnectError]] = {}
        self._starts = asyncio.Semaphore(settings.parallel)

    async def connect(self, name: str, hop: Hop) -> Link:
        """Log in to a host, through its jump hosts.

        Raises:
            ConnectError: when it cannot be reached or does not let us in.
            UnknownKeyError: when its host key is not known.
            TrustError: when its host key has changed or was revoked.
        """
        return await self._through(name, await self._chain(name, hop))

    async def close(self) -> None:
        """Close jump connections and agents."""
        for link in self._jump_links.values():
            link.connection.abort()
            await link.connection.wait_closed()
        self._jump_links.clear()
        await self._keys.close()

    async def _chain(self, name: str, hop: Hop) -> list[Route]:
        """The host's route and those of its jump hosts, nearest to the host first; never a circle."""
        chain = [await resolve(hop, self._config)]
        while (jump := chain[-1].jump) is not None:
            if jump in (route.hop for route in chain) or len(chain) > MAX_HOPS:
                raise ConnectError(
                    f"{name}: the jump hosts go round in a circle",
                    "look at ProxyJump in the SSH configuration, and at jump: in the inventory",
                )
            chain.append(await resolve(jump, self._config))
        return chain

    async def _through(self, name: str, chain: Sequence[Route]) -> Link:
        route, *before = chain
        if not before:
            async with self._starts:
                return await self._start(name, route, None)
        via = await self._jump(name, before)
        _, starts = self._jumps[before[0].hop]
        async with starts, self._starts:
            return await self._start(name, route, via)

    async def _jump(self, name: str, chain: Sequence[Route]) -> Link:
        """The shared connection to a jump host, opened when nobody has it yet."""
        hop = chain[0].hop
        fresh = (asyncio.Lock(), asyncio.Semaphore(MAX_STARTS_PER_JUMP))
        lock, _ = self._jumps.setdefault(hop, fresh)
        async with lock:
            link = self._jump_links.get(hop)
            if link is None or link.connection.is_closed():
                try:
                    link = self._jump_links[hop] = await self._reopen(hop, chain)
                except ConnectError as error:
                    raise ConnectError(f"{name}: jump host {error.message}", error.hint) from error
            return link

    async def _reopen(self, hop: Hop, chain: Sequence[Route]) -> Link:
        failed_s, failure = self._jump_failures.get(hop, (-_JUMP_FAILURE_S, None))
        if failure is not None and time.monotonic() - failed_s < _JUMP_FAILURE_S:
            raise failure
        try:
            return await self._through(hop.address, chain)
        except ConnectError as error:
            self._jump_failures[hop] = (time.monotonic(), error)
            raise

    async def _start(self, name: str, route: Route, via: Link | None) -> Link:
        """Try a few times when the server drops us before login, which a busy sshd does (MaxStartups)."""
        for attempt in range(1, MAX_TRIES + 1):
            try:
                return await self._login(name, route, via)
            except (ConnectionResetError, BrokenPipeError, asyncssh.ConnectionLost) as error:
                if attempt == MAX_TRIES:
                    raise ConnectError(
                        f"{name}: {_at(route)} closed the connection {MAX_TRIES} times before login",
                        "the server may limit logins (MaxStartups) or ban this address; look at its log",
                    ) from error
                # Jitter keeps many hosts behind one server from coming back at the same moment.
                await asyncio.sleep(_BACKOFF_S * attempt * (0.5 + random.random()))  # noqa: S311
            except TimeoutError as error:
                limit_s = self.settings.connect_timeout_s
                raise ConnectError(
                    f"{name}: no answer from {_at(route)} within {limit_s:g} s",
                    "is the host up, and does a firewall let this address in?",
                ) from error
        raise AssertionError("unreachable")

    async def _login(self, name: str, route: Route, via: Link | None) -> Link:
        hop = route.hop
        pairs = await self._keys.keys(name, hop.key, route.identity_files, route.agent_path)
        gate = _Gate(self.known_hosts, route, pairs)
        sock = None
        if via is None and not route.dials_itself:
            sock = await self._dial(name, route)
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                connection = await asyncssh.connect(
                    hop.address,
                    hop.port or (),
                    config=[self._config] if self._config and self._config.exists() else None,
                    username=hop.user or (),
                    sock=sock,
                    tunnel=via.connection if via else None,
                    client_factory=lambda: gate,
                    known_hosts=gate.trusted,
                    server_host_key_algs=gate.algorithms(),
                    keepalive_interval=self.settings.keepalive_s,
                    **({"proxy_command": None} if via else {}),
                    **_PLAIN,
                )
        except asyncssh.HostKeyNotVerifiable as error:
            raise gate.refusal(name, str(error)) from error
        except asyncssh.PermissionDenied as error:
            raise _denied(name, route, gate.offered) from error
        except (asyncssh.ConnectionLost, ConnectionResetError, TimeoutError):
            raise
        except (asyncssh.DisconnectError, asyncssh.ChannelOpenError) as error:
            raise ConnectError(
                f"{name}: {_at(route)}: {clean(error.reason or str(error))}",
                f"via jump host {via.route.hop.address}" if via else None,
            ) from error
        except OSError as error:
            raise ConnectError(f"{name}: {_at(route)}: {reason(error)}") from error
        finally:
            if sock is not None and gate.connection is None:
                sock.close()
        return Link(connection, route, gate.presented(connection))

    async def _dial(self, name: str, route: Route) -> socket.socket:
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                return await dial(route.host, route.port, route.family)
        except socket.gaierror as error:
            raise ConnectError(
                f"{name}: cannot resolve {route.host!r}: {reason(error)}",
                "correct the host's address in the inventory, or add it to ~/.ssh/config or DNS",
            ) from error
        except ConnectionResetError:
            raise
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectError(
                f"{name}: cannot reach {_at(route)}: {reason(error)}",
                "is the host up, and does sshd listen on that port?",
            ) from error


class _Gate(asyncssh.SSHClient):
    """One login's decisions: which host key to trust, which keys to offer."""

    def __init__(
        self, known_hosts: KnownHosts, route: Route, pairs: Sequence[asyncssh.SSHKeyPair]
    ) -> None:
        self._path = known_hosts.path
        self._route = route
        self._known = known_hosts.lookup(route.key_name, route.port)
        self._pairs = list(pairs)
        self._refused: HostKey | None = None
        self.offered: list[asyncssh.SSHKeyPair] = []
        self.connection: asyncssh.SSHClientConnection | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self.connection = conn

    def public_key_auth_requested(self) -> asyncssh.SSHKeyPair | None:
        if not self._pairs:
            return None
        self.offered.append(self._pairs.pop(0))
        return self.offered[-1]

    def validate_host_public_key(
        self, _host: str, _addr: str, _port: int, key: asyncssh.SSHKey
    ) -> bool:
        """Called for keys that are not among the trusted ones: remember which it was, and refuse."""
        self._refused = HostKey(key.algorithm.decode(), key.public_data)
        return False

    def trusted(
        self, _host: str, _addr: str, _port: int | None
    ) -> Sequence[Sequence[asyncssh.SSHKey]]:
        """The trusted, certifying and revoked keys of this host, as asyncssh asks for them."""
        return [_usable(self._known, marker) for marker in ("", "@cert-authority", "@revoked")]

    def algorithms(self) -> list[str]:
        """Known kinds first, so that a host with several keys shows the one we know; then all others."""
        certified = any(known.marker == "@cert-authority" for known in self._known)
        wanted = [*get_default_certificate_algs()] if certified else []
        for key in _usable(self._known, ""):
            wanted += key.sig_algorithms
        wanted += get_default_public_key_algs()
        return [algorithm.decode() for algorithm in dict.fromkeys(wanted)]

    def presented(self, connection: asyncssh.SSHClientConnection) -> HostKey:
        """The key the host proved to hold."""
        key = connection.get_server_host_key()
        assert key is not None
        return HostKey(key.algorithm.decode(), key.public_data)

    def refusal(self, name: str, reason: str) -> TrustError:
        """Say why the host key was refused."""
        where = lookup_name(self._route.key_name, self._route.port)
        plain = [known for known in self._known if known.marker == ""]
        if self._refused is None:
            return TrustError(f"{name}: the host key of {where} is refused: {clean(reason)}")
        if not plain:
            new = NewHostKey(name, self._route.key_name, self._route.port, self._refused)
            return UnknownKeyError(new, self._path)
        same_kind = [known for known in plain if known.key.kind == self._refused.kind]
        old = (same_kind or plain)[0]
        return TrustError(
            f"{name}: the host key of {where} has CHANGED: {old.path}:{old.line_number} has "
            f"{old.key.kind} {old.key.fingerprint}, the host shows {self._refused.kind} {self._refused.fingerprint}",
            f"if the host was reinstalled: ssh-keygen -R {where!r} -f {old.path}, then connect again; "
            "otherwise somebody may be listening in",
        )


def _usable(known: Sequence[KnownKey], marker: str) -> list[asyncssh.SSHKey]:
    """Keys of a kind asyncssh can check; others can't be trusted and are left out."""
    keys = []
    for entry in known:
        if entry.marker == marker:
            try:
                keys.append(asyncssh.import_public_key(entry.key.line))
            except asyncssh.KeyImportError:
                continue
    return keys


def _denied(name: str, route: Route, offered: Sequence[asyncssh.SSHKeyPair]) -> ConnectError:
    shown = ", ".join(
        f"{HostKey(pair.algorithm.decode(), pair.public_data).fingerprint} ({clean(pair.get_comment() or pair.algorithm.decode())})"
        for pair in offered
    )
    return ConnectError(
        f"{name}: {_at(route)} refused user {route.user}; keys offered: {shown or 'none'}",
        f"add the public key to ~{route.user}/.ssh/authorized_keys there, or name the right one by key: in the inventory",
    )


def _at(route: Route) -> str:
    if route.has_proxy_command:
        return f"{route.host} (by ProxyCommand)"
    return f"{route.host} port {route.port}"
