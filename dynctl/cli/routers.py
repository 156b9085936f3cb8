"""Asks running routers by their admin sockets: of one that `dynctl route` runs here, or of all of a cluster. IO: ssh, sockets."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynctl.core.inventory import Inventory


async def ask_socket(path: str, targets: Sequence[str], method: str = "GET") -> list[Any]:
    """Ask one router's admin socket; what it answers, decoded.

    Raises:
        ConnectError: when no router answers there as one should.
    """
    from dynctl.errors import ConnectError
    from dynctl.http1.upstream import Address, Upstream, UpstreamError

    upstream = Upstream(Address(path=path))
    found = []
    try:
        for target in targets:
            answer = await upstream.fetch(method, target)
            if answer.status != 200:
                raise ConnectError(f"the router on {path} answered {answer.status}")
            found.append(_decoded(answer.body))
    except UpstreamError as error:
        raise ConnectError(f"no router answers on {path}: {error.message}") from error
    finally:
        await upstream.close()
    return found


async def ask_deployments(
    wanted: "Inventory", targets: Sequence[str], method: str = "GET", deployment: str | None = None
) -> dict[str, list[Any]]:
    """Ask every router of a cluster, or of one deployment; what each answers, decoded, by its id.

    Raises:
        DynctlError: when there is none.
    """
    from dynctl.deploy.reach import reach_agents
    from dynctl.errors import DynctlError, ExitCode
    from dynctl.remote.fleet import open_fleet

    found: dict[str, list[Any]] = {}
    async with (
        open_fleet(wanted.hosts, wanted.ssh) as fleet,
        reach_agents(wanted, fleet) as clients,
    ):
        for client in clients.values():
            if isinstance(client, DynctlError):
                continue
            for unit in (await client.status()).units:
                if unit.kind == "router" and deployment in {None, unit.deployment}:
                    found[unit.id] = [
                        _decoded(await client.ask_router(unit.id, target, method))
                        for target in targets
                    ]
    if not found:
        of = f"deployment {deployment}" if deployment else f"cluster {wanted.cluster}"
        raise DynctlError(
            f"no router of {of} runs on any host that answers",
            "dynctl status shows what runs",
            code=ExitCode.REFUSED,
        )
    return found


def _decoded(body: bytes) -> Any:  # noqa: ANN401 - a router's JSON
    from dynctl.errors import DynctlError

    try:
        return json.loads(body)
    except ValueError as error:
        raise DynctlError("the router's answer is no JSON") from error
