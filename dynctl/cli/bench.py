"""`dynctl bench run`: drive load against a deployment and report what it did. IO: HTTP, files, terminal."""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.cli.bench_results import compare, show, show_report
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Output, OutputOption, Yes
from dynctl.cli.output import confirm, emit_json, say, wait_for
from dynctl.core.inventory import Inventory
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode, UsageError

if TYPE_CHECKING:
    from dynctl.bench.record import Record
    from dynctl.bench.report import Report
    from dynctl.bench.run import Wish

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

SLO_KEYS = {
    "ttft": "ttft_ms",
    "ttft_ms": "ttft_ms",
    "itl": "itl_ms",
    "itl_ms": "itl_ms",
    "tpot_ms": "itl_ms",
}


Url = Annotated[
    str | None, typer.Option("--url", help="Server to drive; default: the deployment's router.")
]
DeploymentName = Annotated[
    str | None, typer.Option("--deployment", help="Which deployment, when there are several.")
]
WorkloadText = Annotated[
    str,
    typer.Option(
        "--workload",
        help="synthetic:isl=…,osl=… | prefix:groups=…,len=…,suffix=…,osl=… | multiturn:chats=…,turns=…,…",
    ),
]
LoadText = Annotated[
    str, typer.Option("--load", help="poisson:R or constant:R (requests/s), or concurrency:N.")
]
Duration = Annotated[str, typer.Option("--duration", help="How long is measured.")]
Warmup = Annotated[str, typer.Option("--warmup", help="Same load before that, not measured.")]
SloText = Annotated[
    str | None,
    typer.Option("--slo", help="Goals at p99 in ms, e.g. ttft=500,itl=40; missed: exit 6."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Same seed, same requests, which the server may then have cached; default: a new one.",
    ),
]
OutDirectory = Annotated[
    Path | None, typer.Option("--out", help="Directory for result.json and requests.jsonl.")
]
ModelName = Annotated[str, typer.Option("--model", help="Model to ask for; auto: the only one.")]
Api = Annotated[str, typer.Option("--api", help="chat or completions.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
]
BlockSize = Annotated[
    int,
    typer.Option("--block-size", min=1, help="KV block size in tokens, for the ideal hit rate."),
]


@app.callback()
def group() -> None:
    """Drive load against a deployment, report what it did, and compare what was stored."""


@app.command("run")
def run(  # noqa: PLR0917 - one parameter per option
    url: Url = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    deployment: DeploymentName = None,
    workload: WorkloadText = "synthetic:isl=1024,osl=128",
    load: LoadText = "poisson:4",
    duration: Duration = "30s",
    warmup: Warmup = "2s",
    slo: SloText = None,
    seed: Seed = None,
    out: OutDirectory = None,
    output: OutputOption = Output.TABLE,
    model: ModelName = "auto",
    api: Api = "chat",
    api_key_env: ApiKeyEnv = None,
    block_size: BlockSize = 16,
    yes: Yes = False,
) -> None:
    """Drive load against a deployment and report what it did.

    Latency, throughput, goodput, KV hit rate, and advice.

    Every figure's definition is in result.json. Exit 4 when fewer than two requests succeeded, 6 when a goal was
    missed or the load generator was the limit, 130 when interrupted (the partial result is still written).

    Example: dynctl bench run --workload prefix:groups=8,len=1024 --load poisson:8 --duration 60s --slo ttft=500,itl=40
    """
    from dynctl.bench.arrivals import parse_duration, parse_load
    from dynctl.bench.results import REQUESTS, RESULT, write
    from dynctl.bench.run import Wish
    from dynctl.bench.workload import parse_workload

    wish = Wish(
        workload=parse_workload(workload),
        load=parse_load(load),
        duration_s=_positive(parse_duration(duration, "--duration"), "--duration"),
        warmup_s=parse_duration(warmup, "--warmup"),
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        slo=parse_slo(slo),
        block_size_tokens=block_size,
    )
    asked = Asked(_known_api(api), _api_key(api_key_env), None if model == "auto" else model, yes)
    _check_url(url)
    _make_directory(out)
    started_unix_s = time.time()

    async def main() -> "tuple[Report, tuple[Record, ...]]":
        found = Router(url) if url else await _find_router(inventory, deployment, local=local)
        return await _drive(found, asked, wish)

    report, records = wait_for(main())
    report.facts["started_unix_s"] = started_unix_s
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


app.command("show")(show)
app.command("compare")(compare)


@dataclass(frozen=True, slots=True)
class Asked:
    """How the server is spoken to."""

    api: str
    key: str | None
    model: str | None
    yes: bool

    def __repr__(self) -> str:
        return f"Asked({self.api}, {self.model})"


def _check_url(url: str | None) -> None:
    from urllib.parse import urlsplit

    if url is None:
        return
    has_user = False
    try:
        parts = urlsplit(url)
        has_user = "@" in parts.netloc
        is_right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if has_user or ("@" in url and not is_right):
        # Said without the address: it would show the password.
        raise UsageError(
            "--url holds a user or password before its @, which would be shown and written down",
            "leave that out; a key is read from an environment variable: --api-key-env NAME",
        )
    if not is_right:
        raise UsageError(f"--url {url!r} is no address of a server", "write http://HOST:PORT")


def _make_directory(out: Path | None) -> None:
    """Nobody shall drive load for an hour and find then that its result cannot be written."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot write there: {error.strerror}", "name another directory"
        ) from error


def _known_api(api: str) -> str:
    if api not in {"chat", "completions"}:
        raise UsageError(f"--api {api!r} is unknown", "use chat or completions")
    return api


def parse_slo(text: str | None) -> Slo:
    """Read `ttft=500,itl=40`, in milliseconds.

    Raises:
        UsageError: for an unknown key or a value that is no positive number.
    """
    goals: dict[str, float] = {}
    for item in text.split(",") if text else ():
        key, _, value = item.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if key not in SLO_KEYS or not 0 < number < 1e9:
            raise UsageError(f"--slo {text!r}: cannot read {item!r}", "write ttft=500,itl=40 (ms)")
        goals[SLO_KEYS[key]] = number
    return Slo(**goals)


def _positive(value: float, flag: str) -> float:
    if value <= 0:
        raise UsageError(f"{flag} must be more than nothing")
    return value


def _api_key(env: str | None) -> str | None:
    if env is None:
        return None
    key = os.environ.get(env)
    if not key:
        raise UsageError(f"--api-key-env {env}: no such environment variable, or empty")
    return key


@dataclass(frozen=True, slots=True)
class Router:
    """The server to drive."""

    url: str
    plan_digest: str | None = None
    """Of the plan its host runs; None where the address was given, so that nobody was asked."""


async def _drive(router: Router, asked: Asked, wish: "Wish") -> "tuple[Report, tuple[Record, ...]]":
    import asyncio
    import signal

    from dynctl.bench.client import CONTROL_TIMEOUT_S, open_target
    from dynctl.bench.report import make_report
    from dynctl.bench.run import Drive, learn_counting, other_traffic

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with open_target(router.url, asked.api, asked.key, REQUEST_TIMEOUT_S) as target:
        with _told("its list of models", CONTROL_TIMEOUT_S):
            await target.find_model(asked.model)
        with _told("its metrics", CONTROL_TIMEOUT_S):
            others = await other_traffic(target)
        if others:
            question = f"{target.url} serves others: {others}; load may hurt them. Go on?"
            await confirm(question, yes=asked.yes)
        with _told("its first answers, to learn how it counts tokens", REQUEST_TIMEOUT_S):
            count = await learn_counting(target, wish.workload)
        say(
            f"bench {target.url} {target.model}: {wish.workload.text}, {wish.load}, {wish.duration_s:g} s"
        )

        def interrupt() -> None:
            # A second one ends the process the usual way.
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)
            say("interrupted: writing what was measured so far")
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            measured = await Drive(target, wish, count, stop).run(say)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)
        report = make_report(wish.setting(target, count), measured)
        report.facts.update(
            _versions(),
            server_version=await target.version(),
            plan_digest=router.plan_digest,
        )
    return report, measured.records


REQUEST_TIMEOUT_S = 600.0
TOLD_AFTER_S = 3.0
"""Who waits longer than that for a server is told for what."""


@contextmanager
def _told(what: str, limit_s: float) -> Iterator[None]:
    """Say what is waited for, and for how long at most, once that takes long enough to wonder."""
    import asyncio

    text = f"bench waits for the server: {what}; each at most {limit_s:g} s"
    telling = asyncio.get_running_loop().call_later(TOLD_AFTER_S, say, text)
    try:
        yield
    finally:
        telling.cancel()


def _versions() -> dict[str, Any]:
    import platform

    import aiohttp

    from dynctl import __version__

    return {
        "dynctl_version": __version__,
        "python_version": platform.python_version(),
        "aiohttp_version": aiohttp.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


async def _find_router(path: Path, deployment: str | None, *, local: bool) -> Router:
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
                    url = _reachable_url(wanted, host_name, unit.url)
                    found[unit.deployment] = Router(url, status.plan_digest)
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


def _reachable_url(inventory: Inventory, host_name: str, url: str) -> str:
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
