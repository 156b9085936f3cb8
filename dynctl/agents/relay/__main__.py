"""`python -m dynctl.agents.relay`: one process, one TLS port, until SIGTERM.

IO: sockets, files (certificates), signals.
"""

import argparse
import asyncio
import logging
import signal
import ssl
import sys
from pathlib import Path

import uvloop

from dynctl.agents.relay.feed import TableFeed
from dynctl.agents.relay.relay import Relay
from dynctl.http1.server import ServerLimits, raise_file_limit, serve

GRACE_S = 15.0
"""For answers under way after SIGTERM; the agent waits 20 s."""
_LIMITS = ServerLimits(max_body_bytes=20 * 1024 * 1024)
"""Above what a router takes from clients: it may add fields."""


def main() -> int:
    """Run the relay; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="dynctl-relay", description=__doc__)
    parser.add_argument("--root", required=True, type=Path, help="the agent's directory")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--agent-socket", required=True, help="the agent's control socket")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    host, _, port = arguments.listen.rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--listen {arguments.listen!r} is not HOST:PORT")
    raise_file_limit()
    try:
        context = server_context(arguments.root / "tls")
        uvloop.run(run(context, host.strip("[]"), int(port), arguments.agent_socket))
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


async def run(context: ssl.SSLContext, host: str, port: int, agent_socket: str) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    relay = Relay()
    feed = TableFeed(agent_socket, relay.take_table)
    try:
        server = await serve(
            relay.handle, host=host, port=port, ssl=context, admit=relay.admit, limits=_LIMITS
        )
        feed.start()
        await stop.wait()
        relay.end_streams()
        await server.close(GRACE_S)
    finally:
        await feed.close()
        await relay.close()


if __name__ == "__main__":
    sys.exit(main())
