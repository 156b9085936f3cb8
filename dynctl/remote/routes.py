"""Where a host really is: `~/.ssh/config` applied to an inventory entry, hop by hop. Not here: connecting.

IO: files (the SSH configuration), and the programs a `Match exec` there names.
"""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import asyncssh

from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.errors import ConnectError
from dynctl.files import reason

MAX_HOPS = 8

_USER = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}\$?$")
_ADDRESS = re.compile(
    r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$|^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?$"
)


@dataclass(frozen=True, slots=True)
class Hop:
    """One machine to log in to, as the inventory or a jump list writes it."""

    address: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    """Comma list as for `ssh -J`, `none` for none; None: as the configuration says."""


@dataclass(frozen=True, slots=True)
class Route:
    """A hop with the configuration applied."""

    hop: Hop
    host: str
    port: int
    user: str
    key_name: str
    """Name under which the host key is known: HostKeyAlias or the host."""
    jump: Hop | None
    identity_files: tuple[str, ...]
    agent_path: str | None
    dials_itself: bool
    """Whether asyncssh has to open the connection: a ProxyCommand or name canonicalisation is configured."""
    has_proxy_command: bool
    family: int


def hop_of(entry: HostEntry) -> Hop:
    """The last hop to a host."""
    return Hop(entry.address, entry.user, entry.port, entry.key, entry.jump)


async def resolve(hop: Hop, config: Path | None) -> Route:
    """Apply the SSH configuration to one hop.

    Raises:
        ConnectError: when the configuration has a line nobody understands, or a name that is none.
    """
    _check(hop)
    try:
        route = await asyncio.to_thread(_resolve, hop, config)
    except (asyncssh.ConfigParseError, asyncssh.IllegalUserName) as error:
        raise ConnectError(
            f"{hop.address}: the SSH configuration cannot be applied: {clean(str(error))}",
            "correct that line, or set ssh.config: false in the inventory and write user, port, key and jump there",
        ) from error
    except OSError as error:
        raise ConnectError(
            f"{hop.address}: cannot read {error.filename}: {reason(error)}"
        ) from error
    _check(Hop(route.host, route.user, route.port))
    return route


def parse_jump(text: str) -> Hop | None:
    """Read a jump list: the last name is the hop nearest to the host, reached through the ones before it.

    Raises:
        ConnectError: when a part is no `[user@]host[:port]`.
    """
    if text.strip().lower() in ("", "none"):
        return None
    *before, last = (part.strip().removeprefix("ssh://") for part in text.split(","))
    user, _, rest = last.rpartition("@")
    host, port = rest, None
    if match := re.fullmatch(r"\[([^\]]+)\](?::([0-9]+))?|([^:]+)(?::([0-9]+))?", rest):
        host = match[1] or match[3]
        digits = match[2] or match[4]
        port = int(digits) if digits else None
    hop = Hop(host, user or None, port, None, ",".join(before) or None)
    _check(hop)
    return hop


def _check(hop: Hop) -> None:
    """Refuse names that another program could take for an option or a command."""
    if not _ADDRESS.match(hop.address):
        raise ConnectError(f"{clean(repr(hop.address))} is no host name or address")
    if hop.user is not None and not _USER.match(hop.user):
        raise ConnectError(f"{hop.address}: {clean(repr(hop.user))} is no user name")
    if hop.port is not None and not 0 < hop.port < 65536:
        raise ConnectError(f"{hop.address}: {hop.port} is no port")


def _resolve(hop: Hop, config: Path | None) -> Route:
    options = asyncssh.SSHClientConnectionOptions(
        config=[config] if config is not None and config.exists() else None,
        host=hop.address,
        port=hop.port or (),
        username=hop.user or (),
        client_keys=None,
        known_hosts=b"",
    )
    found = options.config
    jump_text = hop.jump if hop.jump is not None else cast("str | None", found.get("ProxyJump"))
    jump = parse_jump(jump_text) if jump_text else None
    if jump is not None and jump.address == hop.address and hop.jump is None:
        jump = None  # `Host *` with a ProxyJump also matches the jump host itself
    agent_path = cast("str | None", found.get("IdentityAgent"))
    return Route(
        hop=hop,
        host=options.host,
        port=options.port,
        user=options.username,
        key_name=options.host_key_alias or options.host,
        jump=jump,
        identity_files=tuple(cast("list[str]", found.get("IdentityFile") or [])),
        agent_path=agent_path,
        dials_itself=bool(
            options.proxy_command or options.canonicalize_hostname or found.has_match_final()
        ),
        has_proxy_command=bool(options.proxy_command),
        family=options.family,
    )
