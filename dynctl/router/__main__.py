"""`python -m dynctl.router --config FILE [--admin-socket PATH]`: one router in the foreground. IO: files, sockets."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from dynctl.errors import DynctlError, ExitCode, RouterError
from dynctl.files import reason
from dynctl.router.config import RouterConfig, parse_config
from dynctl.router.processes import parse_place
from dynctl.router.run import Sockets, run_router, run_sibling

log = logging.getLogger("dynctl.router")


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dynctl.router", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="router configuration, JSON")
    parser.add_argument("--admin-socket", help="Unix socket for /health, /metrics, /decisions")
    parser.add_argument("--offer", help="Unix socket where a successor can take the port over")
    parser.add_argument("--take-over", help="the predecessor's --offer: take its port over")
    # What a process is told by the first one of its port.
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--books", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        config = _load(args.config)

        def started(port: int) -> None:
            log.info("listening on %s:%d, policy %s", config.host_port[0], port, config.policy)

        if args.process:
            place = parse_place(args.process, args.books, args.folder)
            uvloop.run(run_sibling(config, place, args.lifeline))
        else:
            sockets = Sockets(args.admin_socket, args.offer, args.take_over)
            uvloop.run(run_router(config, sockets, started))
    except DynctlError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return int(error.exit_code)
    return int(ExitCode.OK)


def _load(path: Path) -> RouterConfig:
    try:
        return parse_config(path.read_bytes())
    except OSError as error:
        raise RouterError(f"cannot read {path}: {reason(error)}") from error


if __name__ == "__main__":
    sys.exit(main())
