"""Which private keys to offer a host: the named one, else a few of the agent's and the usual files.

At most `MAX_KEYS` are offered, since servers cut the connection after a handful. Nothing here asks for a passphrase.
IO: files, the SSH agent's socket.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import asyncssh

from dynctl.errors import ConnectError
from dynctl.files import reason

MAX_KEYS = 3

_USUAL_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")
_AGENT_TIMEOUT_S = 5.0


class KeyRing:
    """The agents and key files of one run."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path.home() / ".ssh"
        self._agents: dict[str, asyncssh.SSHAgentClient] = {}

    async def keys(
        self, name: str, key: str | None, identity_files: Sequence[str], agent_path: str | None
    ) -> list[asyncssh.SSHKeyPair]:
        """Return the keys to offer, in order: only the named ones if there are any.

        Raises:
            ConnectError: when the named key is missing or locked, or there is no key at all.
        """
        in_agent = await self._agent_keys(agent_path)
        if key is not None:
            pairs = await self._named(_expand(key), in_agent)
            if not pairs:
                raise ConnectError(
                    f"{name}: the key {key} is locked by a passphrase", f"unlock it: ssh-add {key}"
                )
            return pairs
        present = [p for p in map(_expand, identity_files) if _is_there(p)]
        pairs = [pair for path in present for pair in await self._named(path, in_agent)]
        if not present:
            usual = [self._directory / file for file in _USUAL_FILES]
            files = [
                pair for path in usual if path.exists() for pair in await self._named(path, [])
            ]
            listed = {pair.public_data for pair in in_agent}
            pairs = [*in_agent, *(pair for pair in files if pair.public_data not in listed)]
        if not pairs:
            raise ConnectError(
                f"{name}: there is no SSH key to offer: no agent with keys, and no unlocked file in {self._directory}",
                "make one with ssh-keygen -t ed25519, unlock one with ssh-add, or name one by key: in the inventory",
            )
        return pairs[:MAX_KEYS]

    async def close(self) -> None:
        """Close the connections to agents."""
        for agent in self._agents.values():
            agent.close()
            await agent.wait_closed()
        self._agents.clear()

    async def _agent_keys(self, agent_path: str | None) -> list[asyncssh.SSHKeyPair]:
        path = agent_path or os.environ.get("SSH_AUTH_SOCK", "")
        if path == "SSH_AUTH_SOCK":
            path = os.environ.get("SSH_AUTH_SOCK", "")
        if not path:
            return []
        agent = self._agents.setdefault(path, asyncssh.SSHAgentClient(str(_expand(path))))
        try:
            async with asyncio.timeout(_AGENT_TIMEOUT_S):
                return list(await agent.get_keys())
        except (ValueError, TimeoutError):
            return []  # no agent is not an error: files may do

    async def _named(
        self, path: Path, in_agent: Sequence[asyncssh.SSHKeyPair]
    ) -> list[asyncssh.SSHKeyPair]:
        """Load a key file; a locked one, or a public one, is used through the agent if the agent holds it."""
        try:
            return list(await asyncio.to_thread(asyncssh.load_keypairs, str(path)))
        except asyncssh.KeyImportError:
            return await asyncio.to_thread(_held, path, list(in_agent))
        except OSError as error:
            if held := await asyncio.to_thread(_held, path, list(in_agent)):
                return held
            raise ConnectError(f"cannot read the key {path}: {reason(error)}") from error


def _expand(text: str) -> Path:
    return Path(text).expanduser()


def _is_there(path: Path) -> bool:
    return path.exists() or path.with_name(path.name + ".pub").exists()


def _held(path: Path, in_agent: list[asyncssh.SSHKeyPair]) -> list[asyncssh.SSHKeyPair]:
    public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    try:
        data = asyncssh.read_public_key(str(public)).public_data
    except (OSError, asyncssh.KeyImportError):
        return []
    return [pair for pair in in_agent if pair.public_data == data]
