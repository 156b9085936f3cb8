"""Asks running routers by their admin sockets: of one that `dynctl route` runs here, or of all of a cluster. IO: ssh, sockets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynctl.core.text import clean
from dynctl.errors import DeployError, DynctlError, ExitCode, UsageError

_OLDER = "a router of an older version may not know this: dynctl up brings it up to date"

if TYPE_CHECKING:
    from dynctl.agents.client import AgentClient
    from dynctl.core.inventory import Inventory


class NothingDecidedError(DynctlError):
    """Raised when routers answer and none of them has placed a request since it was started."""

    def __init__(self) -> None:
        super().__init__(
            "no router has decided anything yet", "send it requests, or run dynctl bench run"
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """What routers said, and which hosts could not be asked."""

    by_router: dict[str, list[Any]]
    """By the router's id, or its socket's path; one answer per target."""
    by_host: Mapping[str, DynctlError | None] = field(default_factory=dict)
    """None: its routers answered."""

    def raise_failures(self, what: str) -> None:
        """End a command that asked several hosts: nothing when all that have a router answered.

        Raises:
            DynctlError: names each host that failed with its cause; exit 3 when others `what`.
        """
        from dynctl.remote.outcomes import raise_host_failures

        raise_host_failures(self.by_host, what)


def ask_routers(
    admin_socket: Path | None, inventory: Path, targets: Sequence[str], *, local: bool
) -> Answers:
    """Ask the router of an admin socket, or without one every router of a cluster.

    Raises:
        DynctlError: when none answers.
    """
    from dynctl.cli.output import wait_for
    from dynctl.cli.session import load

    if admin_socket is not None:
        path = str(admin_socket)
        return Answers({path: wait_for(ask_socket(path, targets))})
    return wait_for(ask_deployments(load(inventory, local=local), targets))


async def ask_socket(path: str, targets: Sequence[str], changes: Sequence[str] = ()) -> list[Any]:
    """Post `changes` to one router's admin socket, then ask it; what it answers to `targets`, decoded.

    Raises:
        ConnectError: when no router answers there as one should.
    """
    from dynctl.agents.ask import complaint
    from dynctl.errors import ConnectError
    from dynctl.http1.upstream import Address, Upstream, UpstreamError

    upstream = Upstream(Address(path=path))
    found = []
    try:
        for method, target in _calls(targets, changes):
            answer = await upstream.fetch(method, target)
            if answer.status != 200:
                said = complaint(answer) or "without saying why"
                raise ConnectError(
                    f"the router on {path} answered {answer.status}: {said}",
                    _OLDER if method == "POST" else None,
                )
            if method == "GET":
                found.append(_decoded(answer.body))
    except UpstreamError as error:
        why = error.message.removeprefix(f"{path}: ")
        raise ConnectError(
            f"no router answers on {path}: {why}",
            "it is the path that dynctl route was given as --admin-socket",
        ) from error
    finally:
        await upstream.close()
    return found


async def ask_deployments(
    wanted: "Inventory",
    targets: Sequence[str],
    changes: Sequence[str] = (),
    deployment: str | None = None,
) -> Answers:
    """Ask every router of a cluster, or of one deployment, each after posting `changes` to it.

    A router or host that fails does not keep the others from being asked; `Answers.raise_failures` names it.

    Raises:
        DynctlError: when none answers.
    """
    from dynctl.deploy.reach import NotHereError, reach_agents
    from dynctl.inventory.problems import suggest
    from dynctl.remote.fleet import open_fleet

    found: dict[str, list[Any]] = {}
    hosts: dict[str, DynctlError | None] = {}
    async with (
        open_fleet(wanted.hosts, wanted.ssh) as fleet,
        reach_agents(wanted, fleet) as clients,
    ):
        for host_name, client in clients.items():
            if isinstance(client, DynctlError):
                if not isinstance(client, NotHereError):
                    hosts[host_name] = client
                continue
            await _ask_host(host_name, client, deployment, _calls(targets, changes), found, hosts)
    answers = Answers(found, hosts)
    if not found:
        answers.raise_failures("answered")
        known = [wish.name for wish in wanted.deployments]
        if deployment is not None and deployment not in known:
            raise UsageError(
                f"no deployment is called {clean(deployment)}", suggest(deployment, known)
            )
        of = f"deployment {deployment}" if deployment else f"cluster {wanted.cluster}"
        raise DynctlError(
            f"no router of {of} runs on any host that answers",
            "dynctl status shows what runs",
            code=ExitCode.REFUSED,
        )
    return answers


def _calls(targets: Sequence[str], changes: Sequence[str]) -> list[tuple[str, str]]:
    return [*(("POST", each) for each in changes), *(("GET", each) for each in targets)]


async def _ask_host(
    name: str,
    client: "AgentClient",
    deployment: str | None,
    calls: Sequence[tuple[str, str]],
    found: dict[str, list[Any]],
    hosts: dict[str, DynctlError | None],
) -> None:
    """Enter what each of a host's routers answers in `found`, and in `hosts` how the host did, if it has one."""
    try:
        units = (await client.status()).units
    except DynctlError as error:
        hosts[name] = _named(name, error)
        return
    for unit in units:
        if unit.kind != "router" or deployment not in {None, unit.deployment}:
            continue
        hosts.setdefault(name, None)
        try:
            bodies = [(m, await client.ask_router(unit.id, target, m)) for m, target in calls]
            found[unit.id] = [_decoded(body) for method, body in bodies if method == "GET"]
        except DynctlError as error:
            is_change = calls[0][0] == "POST" and isinstance(error, DeployError)
            hosts[name] = _named(f"{name}: {unit.id}", error, _OLDER if is_change else None)


def _named(where: str, error: DynctlError, hint: str | None = None) -> DynctlError:
    return DynctlError(f"{where}: {error.message}", error.hint or hint, code=error.exit_code)


def _decoded(body: bytes) -> Any:  # noqa: ANN401 - a router's JSON
    try:
        return json.loads(body)
    except ValueError as error:
        raise DynctlError("the router's answer is no JSON") from error
