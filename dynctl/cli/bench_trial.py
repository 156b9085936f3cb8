"""`dynctl bench replay --ab`: two arms play one trace in turn, by the routers' policy or by address. IO: HTTP, ssh, sockets."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from dynctl.cli.bench_driving import Ready, Router, find_router, get_ready, interrupts
from dynctl.cli.bench_options import Asked
from dynctl.cli.bench_results import show_verdict
from dynctl.cli.options import Output
from dynctl.cli.output import emit_json, say
from dynctl.cli.routers import Answers, ask_deployments, ask_socket
from dynctl.cli.session import is_named
from dynctl.errors import DynctlError, ExitCode, UsageError

if TYPE_CHECKING:
    from dynctl.bench.run import Wish
    from dynctl.bench.trial import Trial, Turn
    from dynctl.core.inventory import Inventory

_GET = ("/policy",)


class Routers(Protocol):
    """Where the policy is changed."""

    @property
    def flags(self) -> Sequence[str]:
        """What `dynctl policy` is given to mean these."""
        ...

    async def ask(self, changes: Sequence[str] = ()) -> Answers:
        """Post changes to each, and ask each for its policy."""
        ...


@dataclass(frozen=True, slots=True)
class OneRouter:
    """A router that `dynctl route` runs here."""

    socket: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Its admin socket."""
        return ("--admin-socket", str(self.socket))

    async def ask(self, changes: Sequence[str] = ()) -> Answers:
        """Ask its admin socket."""
        return Answers({str(self.socket): await ask_socket(str(self.socket), _GET, changes)})


@dataclass(frozen=True, slots=True)
class ClusterRouters:
    """All routers of a deployment."""

    cluster: "Inventory"
    deployment: str | None
    flags: tuple[str, ...]

    async def ask(self, changes: Sequence[str] = ()) -> Answers:
        """Ask the agents; all have to answer, else arms would be mixed.

        Raises:
            DynctlError: naming each host that did not.
        """
        answers = await ask_deployments(self.cluster, _GET, changes, self.deployment)
        answers.raise_failures("changed" if changes else "answered")
        return answers


@asynccontextmanager
async def policy_kept(routers: Routers) -> AsyncIterator[None]:
    """Give routers back the policy they have now, whatever happens.

    Raises:
        UsageError: when they differ, since one cannot be given back to all.
    """
    before = sorted({told[0]["policy"] for told in (await routers.ask()).by_router.values()})
    if len(before) != 1:
        raise UsageError(
            f"the routers use different policies: {', '.join(before)}",
            "make them alike first: dynctl policy NAME",
        )
    try:
        yield
    finally:
        try:
            await use_policy(routers, before[0])
        except DynctlError as error:
            say(f"the policy was {before[0]} before and could not be given back: {error.message}")
            say(f"  {shlex.join(['dynctl', 'policy', before[0], *routers.flags])}")


async def use_policy(routers: Routers, name: str) -> None:
    """Let routers decide by a policy from now on."""
    answers = await routers.ask([f"/policy?name={quote(name)}"])
    say(f"policy {name} on {', '.join(answers.by_router)}")


@dataclass(frozen=True, slots=True)
class Arms:
    """Two arms: policies of the same routers, or two addresses."""

    names: tuple[str, str]
    urls: tuple[Router, ...]
    routers: Routers | None
    """None: the arms differ in their address."""


def parse_arms(text: str) -> tuple[str, str]:
    """Read `least_loaded,kv`.

    Raises:
        UsageError: when these are not two names.
        DynctlError: when there is no such policy; lists the ones there are.
    """
    from dynctl import registry

    names = [name.strip() for name in text.split(",")]
    if len(names) != 2:
        raise UsageError(f"--ab {text!r} is not two policies", "write --ab least_loaded,kv")
    for name in names:
        registry.load("dynctl.router.policies", name, "POLICY")
    return names[0], names[1]


def check_arms(
    ab: str | None, urls: Sequence[str], admin_socket: Path | None, *, local: bool
) -> bool:
    """Whether there are two arms; refuse what does not go together, before anything is asked.

    Raises:
        UsageError: saying what to leave out or add.
    """
    if ab is not None:
        parse_arms(ab)
    if len(urls) > 2:
        raise UsageError(f"{len(urls)} times --url: there are two arms", "leave some out")
    if ab is not None and len(urls) == 2:
        raise UsageError("--ab and two --url exclude each other: arms differ in policy or address")
    if ab is not None and urls and admin_socket is None and not (local or is_named()):
        # The inventory that happens to lie here may be of another cluster, whose policy would be changed.
        raise UsageError(
            f"--ab changes the policy of the router at {urls[0]}, and nothing says how to reach it",
            "add --admin-socket PATH (of dynctl route), or -i INVENTORY or --local (of its cluster)",
        )
    if admin_socket is not None and ab is None:
        raise UsageError("--admin-socket says where --ab changes the policy", "add --ab A,B")
    if admin_socket is not None and not urls:
        raise UsageError("--admin-socket does not say where the router serves", "add --url URL")
    return ab is not None or len(urls) == 2


async def find_arms(
    ab: str | None,
    urls: Sequence[str],
    admin_socket: Path | None,
    inventory: Path,
    deployment: str | None,
    *,
    local: bool,
) -> Arms:
    """Find the routers to play against, and where their policy is changed."""
    from dynctl.cli.session import load

    if ab is None:
        one, other = urls
        return Arms((one, other), (Router(one), Router(other)), None)
    names = parse_arms(ab)
    url = urls[0] if urls else None
    router = Router(url) if url else await find_router(inventory, deployment, local=local)
    if admin_socket is not None:
        return Arms(names, (router,), OneRouter(admin_socket))
    cluster = load(inventory, local=local)
    of = () if deployment is None else ("--deployment", deployment)
    flags = (*(("--local",) if local else ("-i", str(inventory))), *of)
    return Arms(names, (router,), ClusterRouters(cluster, deployment, flags))


async def play(arms: Arms, asked: Asked, wish: "Wish", rounds: int, out: Path | None) -> "Trial":
    """Let the arms take turns, and judge them.

    Raises:
        DynctlError: when no round came to its end.
    """
    from dynctl.bench.trial import judge_trial

    turns: list[Turn] = []
    async with AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(get_ready(router, asked, wish.workload))
            for router in arms.urls
        ]
        stop = stack.enter_context(interrupts())
        if arms.routers is not None:
            await stack.enter_async_context(policy_kept(arms.routers))
        await _take_turns(arms, served, wish, rounds, stop, out, turns)
    trial = judge_trial(arms.names, turns, is_partial=stop.is_set())
    if trial is None:
        raise DynctlError(
            "no round came to its end, so nothing can be compared",
            "a shorter --duration, or a higher --speed, ends sooner",
            code=ExitCode.INTERRUPTED if stop.is_set() else ExitCode.REFUSED,
        )
    return trial


async def _take_turns(
    arms: Arms,
    served: Sequence[Ready],
    wish: "Wish",
    rounds: int,
    stop: asyncio.Event,
    out: Path | None,
    turns: "list[Turn]",
) -> None:
    from dynctl.bench.results import forget, write
    from dynctl.bench.trial import Turn, order_of

    if out is not None:
        forget(out)
    order = order_of(rounds)
    for number, arm in enumerate(order):
        if stop.is_set():
            return
        if arms.routers is not None:
            await use_policy(arms.routers, arms.names[arm])
        say(f"turn {number + 1} of {len(order)}: {arms.names[arm]}")
        # No turn finds in a cache what another one left there.
        turn_wish = replace(wish, seed=wish.seed * 1000 + number)
        report, records = await served[arm if len(served) > 1 else 0].play(turn_wish, stop)
        report.facts["arm"] = arms.names[arm]
        turns.append(Turn(arm, report, records))
        if out is not None:
            write(out / f"turn-{number + 1}", report, records)
        if report.requests.ok < 2 and not report.is_partial:
            kinds = ", ".join(report.requests.failed_by_kind)
            raise DynctlError(
                f"{arms.names[arm]}: {report.requests.ok} of {report.requests.sent} requests were answered ({kinds})",
                "dynctl status and dynctl logs say why",
                code=ExitCode.REFUSED,
            )


def show_trial(trial: "Trial", out: Path | None, output: Output) -> int:
    """Write the trial, show it, and return the command's exit code."""
    from dynctl.bench.results import write_summary

    try:
        if out is not None:
            say(
                f"written: {write_summary(out, trial)}, and {out}/turn-N, each as of bench run --out"
            )
    finally:
        if output is Output.JSON:
            emit_json(trial)
        else:
            show_verdict(trial)
    return int(trial.exit_code)
