"""What `dynctl bench run` and `replay` do alike: find the server, get ready, stop when told to, write and show.

IO: HTTP, ssh, files, terminal.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dynctl.cli.bench_options import Asked
from dynctl.cli.bench_results import show_report
from dynctl.cli.options import Output
from dynctl.cli.output import INSIST_S, confirm, emit_json, say
from dynctl.core.inventory import Inventory
from dynctl.errors import DynctlError, ExitCode, UsageError

if TYPE_CHECKING:
    from dynctl.bench.client import Target
    from dynctl.bench.record import Record
    from dynctl.bench.report import Report
    from dynctl.bench.run import Wish
    from dynctl.bench.words import TokenCount
    from dynctl.bench.workload import Source

REQUEST_TIMEOUT_S = 600.0
TOLD_AFTER_S = 3.0
"""Who waits longer than that for a server is told for what."""


@dataclass(frozen=True, slots=True)
class Router:
    """The server to drive."""

    url: str
    plan_digest: str | None = None
    """Of the plan its host runs; None where the address was given, so that nobody was asked."""
    deployment: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answered, whose counting of tokens is known."""

    router: Router
    target: "Target"
    count: "TokenCount"

    async def play(self, wish: "Wish", stop: asyncio.Event) -> "tuple[Report, tuple[Record, ...]]":
        """Drive one run, and work out its report."""
        from dynctl.bench.report import make_report
        from dynctl.bench.run import Drive

        facts = {"started_unix_s": time.time(), "plan_digest": self.router.plan_digest}
        measured = await Drive(self.target, wish, self.count, stop).run(say)
        report = make_report(wish.setting(self.target, self.count), measured)
        report.facts.update(facts, **versions(), server_version=await self.target.version())
        return report, measured.records


@asynccontextmanager
async def get_ready(router: Router, asked: Asked, source: "Source") -> AsyncIterator[Ready]:
    """Ask a server for its model and traffic, and how it counts tokens; ask the operator where others use it.

    Raises:
        DynctlError: when it does not answer, or the workload does not fit it.
    """
    from dynctl.bench.client import CONTROL_TIMEOUT_S, open_target
    from dynctl.bench.run import learn_counting, other_traffic

    async with open_target(router.url, asked.api, asked.key, REQUEST_TIMEOUT_S) as target:
        with told("its list of models", CONTROL_TIMEOUT_S):
            await target.find_model(asked.model)
        with told("its metrics", CONTROL_TIMEOUT_S):
            others = await other_traffic(target)
        if others:
            question = f"{target.url} serves others: {others}; load may hurt them. Go on?"
            await confirm(question, yes=asked.yes)
        with told("its first answers, to learn how it counts tokens", REQUEST_TIMEOUT_S):
            count = await learn_counting(target, source)
        yield Ready(router, target, count)


@contextmanager
def interrupts() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set; a second one cancels what is done here, one `INSIST_S` later ends the process.

    Cancelled, and not ended, so that routers get their policy back.
    """
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = (signal.SIGINT, signal.SIGTERM)
    since_s: float | None = None

    def interrupt(number: int) -> None:
        nonlocal since_s
        if not stop.is_set():
            say("interrupted: writing what was measured so far")
            stop.set()
        elif since_s is None:
            since_s = loop.time()
            assert task is not None
            task.cancel()
        elif loop.time() - since_s > INSIST_S:
            loop.remove_signal_handler(number)
            signal.raise_signal(number)

    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def finish(report: "Report", records: "Sequence[Record]", out: Path | None, output: Output) -> None:
    """Write a run's directory, show the run, and end the command with its exit code."""
    from dynctl.bench.results import REQUESTS, RESULT, write

    try:
        if out is not None:
            write(out, report, records)
            say(f"written: {out / RESULT}, {out / REQUESTS}")
    finally:
        if output is Output.JSON:
            emit_json(report)
        else:
            show_report(report)
    if report.exit_code is not ExitCode.OK:
        raise typer.Exit(int(report.exit_code))


@contextmanager
def told(what: str, limit_s: float) -> Iterator[None]:
    """Say what is waited for, and for how long at most, once that takes long enough to wonder."""
    text = f"bench waits for the server: {what}; each at most {limit_s:g} s"
    telling = asyncio.get_running_loop().call_later(TOLD_AFTER_S, say, text)
    try:
        yield
    finally:
        telling.cancel()


def versions() -> dict[str, Any]:
    """What made the figures here."""
    import platform

    import aiohttp

    from dynctl import __version__

    return {
        "dynctl_version": __version__,
        "python_version": platform.python_version(),
        "aiohttp_version": aiohttp.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


async def find_router(path: Path, deployment: str | None, *, local: bool) -> Router:
    """Ask the agents where the deployment's router listens."""
    from dynctl.cli.session import load
    from dynctl.deploy.reach import NotHereError, reach_agents
    from dynctl.remote.fleet import open_fleet
    from dynctl.remote.outcomes import failures_of, raise_any_failure

    wanted = load(path, local=local)
    found: dict[str, Router] = {}
    async with open_fleet(wanted.hosts, wanted.ssh) as fleet, reach_agents(wanted, fleet) as agents:
        silent = {
            name: error
            for name, error in failures_of(agents).items()
            if not isinstance(error, NotHereError)
        }
        for host_name, agent in agents.items():
            if isinstance(agent, DynctlError):
                continue
            status = await agent.status()
            for unit in status.units:
                if unit.kind == "router" and unit.url:
                    url = reachable_url(wanted, host_name, unit.url)
                    found[unit.deployment] = Router(url, status.plan_digest, unit.deployment)
    if not found:
        raise_any_failure(silent)
        raise DynctlError(
            f"no router of cluster {wanted.cluster} runs on any host",
            "dynctl up starts it; or name a server: --url http://HOST:PORT",
            code=ExitCode.REFUSED,
        )
    if deployment is None and len(found) == 1:
        return next(iter(found.values()))
    if deployment not in found:
        for error in silent.values():
            say(f"note: {error.message}")
        raise UsageError(
            "which deployment?"
            if deployment is None
            else f"no deployment {deployment!r} has a router",
            f"--deployment is one of: {', '.join(sorted(found))}",
        )
    return found[deployment]


def reachable_url(inventory: Inventory, host_name: str, url: str) -> str:
    """Turn where a router listens into where this machine reaches it.

    Raises:
        DynctlError: when it listens on the loopback of another host.
    """
    from urllib.parse import urlsplit

    parts = urlsplit(url if "://" in url else f"http://{url}")
    entry = inventory.host(host_name)
    address = parts.hostname or ""
    if entry.is_local:
        address = "127.0.0.1" if address in {"0.0.0.0", "::"} else address  # noqa: S104 - compared, not bound
    elif address in {"127.0.0.1", "::1", "localhost"}:
        raise DynctlError(
            f"the router on {host_name} listens on {address}:{parts.port} there, which this machine cannot reach",
            f"ssh -N -L {parts.port}:{address}:{parts.port} {entry.address} in another terminal, "
            f"then --url http://127.0.0.1:{parts.port}",
            code=ExitCode.REFUSED,
        )
    elif address in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        address = entry.data_address or entry.address
    host = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{host}:{parts.port}"
