"""The agent's table stream: read, and opened again whenever it breaks. The last table stays in force.

IO: sockets (through http1).
"""

import asyncio
import logging
from collections.abc import Callable

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.table import LineSplitter, read_table
from dynctl.errors import DynctlError
from dynctl.http1.call import Call, UpstreamError
from dynctl.http1.message import Header
from dynctl.http1.upstream import Address, Upstream, UpstreamLimits

SILENCE_S = 10.0
"""The agent writes a line every 2 s: after so long it is asked anew."""
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0

_log = logging.getLogger("dynctl.relay")


class TableFeed:
    """Follows the table; `close` it."""

    def __init__(self, agent_socket: str, take: Callable[[dict[str, RelayEntry]], None]) -> None:
        self._take = take
        limits = UpstreamLimits(silence_timeout_s=SILENCE_S)
        self._upstream = Upstream(Address(path=agent_socket), limits)
        self._loop = asyncio.get_running_loop()
        self._lines = LineSplitter()
        self._call: Call | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = _FIRST_RETRY_S
        self._status = 0
        self._is_quiet = False
        """The present outage has been reported."""

    def start(self) -> None:
        """Ask for the table."""
        self._retry = None
        self._lines = LineSplitter()
        self._call = self._upstream.send("GET", "/v1/relay-table", (), b"", self)

    async def close(self) -> None:
        """Stop following."""
        if self._retry is not None:
            self._retry.cancel()
        if self._call is not None:
            self._call.cancel()
        await self._upstream.close()

    # The agent answers…

    def on_head(self, status: int, headers: list[Header]) -> None:  # noqa: ARG002 - a sink's shape
        """Note the status: only 200 carries a table."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """Take lines; of several that came together only the newest matters."""
        if self._status != 200:
            return
        try:
            lines = self._lines.feed(data)
            if not lines:
                return
            table = read_table(lines[-1])
        except DynctlError as error:
            self._restart(str(error))
            return
        if self._is_quiet:
            _log.info("the agent is back")
        self._is_quiet = False
        self._retry_s = _FIRST_RETRY_S
        self._take(table)

    def on_end(self) -> None:
        """Open the stream again."""
        self._restart(f"the table stream ended (status {self._status})")

    def on_error(self, error: UpstreamError) -> None:
        """Open the stream again."""
        self._restart(str(error))

    def _restart(self, reason: str) -> None:
        if not self._is_quiet:
            _log.warning("no table from the agent, the last one stays in force: %s", reason)
        self._is_quiet = True
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._retry = self._loop.call_later(self._retry_s, self.start)
        self._retry_s = min(self._retry_s * 2, _LONGEST_RETRY_S)
