"""Starts the agent in the foreground: `python -m dynctl.agents --root DIR`.

SIGTERM ends the agent alone; engines, router and relay go on and are adopted by the next agent.
IO: files, sockets, processes.
"""

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from dynctl.agents.host import processes
from dynctl.agents.root import Root
from dynctl.agents.server import ControlServer
from dynctl.agents.supervisor import Supervisor
from dynctl.errors import DynctlError, ExitCode

_log = logging.getLogger("dynctl.agent")
_SCOPES = ("none", "user", "system")


class _JsonLines(logging.Formatter):
    """One JSON object per line, so that no text from an engine can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def main(argv: list[str] | None = None) -> int:
    """Run the agent until it is told to end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dynctl.agents", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory for everything")
    args = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    os.umask(0o077)
    _set_limits()
    try:
        mode = _scope_mode(os.environ.get("DYNCTL_SCOPE", "none"))
        root = Root(args.root)
        root.prepare()
    except DynctlError as error:
        _log.error("%s; %s", error.message, error.hint)
        return int(error.exit_code)
    # Children inherit it: relative paths and stray files stay inside the root.
    os.chdir(root.run)
    processes.become_subreaper()
    try:
        return asyncio.run(_serve(root, mode))
    finally:
        root.close()


async def _serve(root: Root, mode: str) -> int:
    supervisor = Supervisor(root, mode)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)

    async def body(supervisor: Supervisor) -> None:
        async with asyncio.TaskGroup() as group:
            finish = group.create_task(_finish(supervisor, ending), name="finish")
            await ControlServer(supervisor).run(ending, _tell_ready)
            finish.cancel()

    _log.info("agent starts in %s, pid %d", root.path, os.getpid())
    await supervisor.run(body, reaps=True)
    if supervisor.finished.is_set():
        root.leave()
        _log.info("everything ended; so does the agent")
    else:
        _log.info("agent ends; its units go on")
    return int(ExitCode.OK)


async def _finish(supervisor: Supervisor, ending: asyncio.Event) -> None:
    await supervisor.finished.wait()
    ending.set()


def _scope_mode(text: str) -> str:
    if text not in _SCOPES:
        raise DynctlError(f"DYNCTL_SCOPE is {text!r}", f"use one of {', '.join(_SCOPES)}")
    return text


def _set_limits() -> None:
    """No core dumps, which would hold prompts and keys; as many files as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tell_ready() -> None:
    """Tell systemd that the agent serves. Source: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        try:
            notify.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), address)
        except OSError as error:
            _log.warning("cannot tell systemd that the agent is ready: %s", error)


if __name__ == "__main__":
    sys.exit(main())
