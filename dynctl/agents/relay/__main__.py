"""`python -m dynctl.agents.relay`: one process, one TLS port, until SIGTERM.

IO: sockets, files (certificates), signals.
"""

import argparse
import asyncio
import logging
import signal
import ssl
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.feed import TableFeed
from dynctl.agents.relay.relay import Relay
from dynctl.core.units import whole
from dynctl.http1.handover import Offer, take_over
from dynctl.http1.server import Server, ServerLimits, raise_file_limit, serve

GRACE_S = 15.0
"""For answers under way after SIGTERM; the agent waits 20 s."""
RETIRE_S = 120.0
"""For answers under way after a hand-over: nobody waits for the port."""
_IDLE_S = 5.0
_TABLE_S = 10.0
_LIMITS = ServerLimits(max_body_bytes=20 * 1024 * 1024)
"""Above what a router takes from clients: it may add fields."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Unix sockets of one relay, by path; None: it has none of that kind."""

    agent: str
    admin: Path | None = None
    offer: str | None = None
    """Where it offers its port to a successor."""
    predecessor: str | None = None
    """Where the relay whose port it takes over offers it."""


def main() -> int:
    """Run the relay; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="dynctl-relay", description=__doc__)
    parser.add_argument("--root", required=True, type=Path, help="the agent's directory")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--agent-socket", required=True, help="the agent's control socket")
    parser.add_argument("--admin-socket", type=Path, help="answers /health and /metrics here")
    parser.add_argument("--offer", help="Unix socket where a successor can take the port over")
    parser.add_argument("--take-over", help="the predecessor's --offer: take its port over")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    host, _, text = arguments.listen.rpartition(":")
    port = whole(text)
    if not host or port is None or port > 65535:
        parser.error(f"--listen {arguments.listen!r} is not HOST:PORT")
    raise_file_limit()
    try:
        context = server_context(arguments.root / "tls")
        sockets = Sockets(
            arguments.agent_socket, arguments.admin_socket, arguments.offer, arguments.take_over
        )
        uvloop.run(run(context, (host.strip("[]"), port), sockets))
    except OSError as error:
        sys.stderr.write(f"dynctl-relay: cannot start on {arguments.listen}: {error}\n")
        return 1
    return 0


def server_context(folder: Path) -> ssl.SSLContext:
    """Load the host's certificate; clients must show one of the cluster's authority.

    Raises: OSError when a file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "host.crt", folder / "host.key")
    context.load_verify_locations(folder / "ca.crt")
    return context


async def run(context: ssl.SSLContext, address: tuple[str, int], sockets: Sockets) -> None:
    """Serve until SIGTERM or SIGINT, then drain; with a successor at the port routers go over to it."""
    stop, has_table = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    relay = Relay()

    def take_table(table: dict[str, RelayEntry]) -> None:
        relay.take_table(table)
        has_table.set()

    feed = TableFeed(sockets.agent, take_table)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(relay.close)
        stack.push_async_callback(feed.close)
        places: list[dict[str, Any]] = [{"host": address[0], "port": address[1]}]
        if sockets.predecessor is not None:
            feed.start()
            # Without its engines it would turn away what its predecessor still answers.
            async with asyncio.timeout(_TABLE_S):
                await has_table.wait()
            places = [{"sock": one} for one in await take_over(sockets.predecessor)]
        servers = [
            await serve(relay.handle, **place, ssl=context, admit=relay.admit, limits=_LIMITS)
            for place in places
        ]
        offer = None
        if sockets.offer is not None:
            offer = Offer(sockets.offer, lambda: [fd for one in servers for fd in one.descriptors])
            stack.callback(offer.close)
        if sockets.admin is not None:
            admin = await serve(relay.handle_admin, path=sockets.admin)
            stack.push_async_callback(admin.close, 0.0)
        if sockets.predecessor is None:
            feed.start()
        await stop.wait()
        is_followed = offer is not None and offer.is_taken
        for server in servers:
            await server.stop_listening()
        # Only now: who followed a stream connects anew at once, and must reach the successor.
        relay.end_streams()
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(_end(server, is_followed=is_followed))


async def _end(server: Server, *, is_followed: bool) -> None:
    if is_followed:
        await server.retire(_IDLE_S, RETIRE_S)
    await server.close(0.0 if is_followed else GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
