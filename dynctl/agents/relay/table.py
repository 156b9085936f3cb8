"""The agent's table of engines, as lines: reading it, and writing what routers may see of it.

Not here: sockets, who watches.
IO: none of its own; it makes addresses for `upstream`.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from dynctl.agents.protocol import MemberInfo, RelayEntry
from dynctl.core.deployment import EngineInfo
from dynctl.errors import DynctlError
from dynctl.http1.upstream import Address

MAX_LINE_BYTES = 4 * 1024 * 1024

_entries = msgspec.json.Decoder(tuple[RelayEntry, ...])


class LineSplitter:
    """Cuts a byte stream into lines, however it was split on the way."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completed, without their line ends.

        Raises: DynctlError when a line does not end within 4 MiB.
        """
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise DynctlError(f"a table line is longer than {MAX_LINE_BYTES} bytes")
        return [bytes(line) for line in lines if line]


def read_table(line: bytes) -> dict[str, RelayEntry]:
    """Read one line: engine id to entry.

    Raises: DynctlError when it is no table, or two entries claim one id.
    """
    try:
        entries = _entries.decode(line)
    except msgspec.MsgspecError as error:
        raise DynctlError(f"not a table of engines: {error}") from error
    table = {entry.info.id: entry for entry in entries}
    if len(table) != len(entries):
        raise DynctlError("two engines of the table have the same id")
    return table


def write_line(infos: Sequence[EngineInfo | MemberInfo]) -> bytes:
    """Write the line that routers, or members of gangs, watch."""
    return msgspec.json.encode(infos) + b"\n"


def address_of(entry: RelayEntry) -> Address | None:
    """Say where the engine's HTTP server is, or None while it has none."""
    if entry.socket:
        return Address(path=entry.socket)
    if not entry.url:
        return None
    parts = urlsplit(entry.url)
    if parts.scheme != "http" or not parts.hostname:
        return None
    return Address(host=parts.hostname, port=parts.port or 80)


def is_same_run(one: RelayEntry, other: RelayEntry) -> bool:
    """Tell whether two entries are the same process at the same places, whatever its state."""
    return (
        one.info.incarnation == other.info.incarnation
        and one.socket == other.socket
        and one.url == other.url
        and one.kv_events == other.kv_events
        and one.kv_replay == other.kv_replay
        and one.topic == other.topic
        and one.block_hash_seed == other.block_hash_seed
    )
