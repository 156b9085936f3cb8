"""Reads the `config.json` of every model from the hosts that may run it. IO: hosts, through a Fleet.

Not here: what the numbers in it mean (`planner.model`).
"""

import json
from collections.abc import Mapping
from typing import Any

from dynctl.core.engine_flags import kv_value_bytes_of
from dynctl.core.hardware import Host, Topology
from dynctl.core.inventory import DeploymentWish, HostEntry, Inventory
from dynctl.core.model import Model
from dynctl.core.text import clean
from dynctl.discovery.discover import Fan
from dynctl.errors import CommandError, DynctlError, PlanError
from dynctl.planner.engines import Need, need_of
from dynctl.planner.model import read_model
from dynctl.planner.placement import matches
from dynctl.remote.port import Remote

MAX_CONFIG_BYTES = 4 * 1024**2
READ_LIMIT_S = 20.0


async def read_models(
    inventory: Inventory,
    topology: Topology,
    fleet: Fan,
    configs: dict[str, bytes] | None = None,
) -> dict[str, Model | None]:
    """Give the shape of each deployment's model by deployment name; `configs` takes in the files as they are.

    None where no shape is needed (simulated and external engines), or where it cannot be told and the inventory
    fixes the pools itself.

    Raises:
        PlanError: when the file is missing on a host that may run it, differs between hosts, or cannot be read;
            exit 4, naming host and path.
    """
    models: dict[str, Model | None] = {}
    for wish in inventory.deployments:
        hosts = candidates(wish, inventory, topology)
        models[wish.name] = None
        if hosts:
            content, where = await _fetch(wish, hosts, fleet)
            models[wish.name] = _understand(wish, content, where)
            if configs is not None:
                configs[wish.name] = content
    return models


def candidates(wish: DeploymentWish, inventory: Inventory, topology: Topology) -> list[Host]:
    """Hosts that may run a deployment's engines, as far as these need a model's files."""
    need = need_of(wish)
    if need not in {Need.GPUS, Need.CPU_SLOTS}:
        return []
    entries = {entry.name: entry for entry in inventory.hosts}
    wanted = [pool.hosts for pool in wish.pools] or [()]
    return [
        host
        for host in topology.hosts
        if (host.cpu_slots if need is Need.CPU_SLOTS else host.gpus)
        and any(matches(entries.get(host.name), host.name, patterns) for patterns in wanted)
    ]


async def _fetch(wish: DeploymentWish, hosts: list[Host], fleet: Fan) -> tuple[bytes, str]:
    """The file and where it was read; all hosts have the same."""
    path = f"{wish.model.rstrip('/')}/config.json"

    async def get(_: HostEntry, remote: Remote) -> bytes:
        return await remote.get(path, MAX_CONFIG_BYTES)

    answers = await fleet.map(get, [host.name for host in hosts], timeout_s=READ_LIMIT_S)
    _raise_failures(wish, path, answers)
    contents = {name: answer for name, answer in answers.items() if isinstance(answer, bytes)}
    first = min(contents)
    odd = sorted(name for name, content in contents.items() if content != contents[first])
    if odd:
        raise PlanError(
            f"deployment {wish.name}: {path} differs between {first} and {', '.join(odd)}",
            "copy the same model revision to all of them, or limit the hosts of the pools",
        )
    return contents[first], f"{first}:{path}"


def _understand(wish: DeploymentWish, content: bytes, where: str) -> Model | None:
    config = _parse(wish, where, content)
    try:
        kv_bytes = kv_value_bytes_of(wish.engine)
        return read_model(config, wish.model, kv_bytes, dict(wish.shape) or None)
    except PlanError:
        if wish.pools:
            return None
        raise


def _raise_failures(
    wish: DeploymentWish, path: str, answers: Mapping[str, bytes | DynctlError]
) -> None:
    failed = {name: a for name, a in answers.items() if isinstance(a, DynctlError)}
    if not failed:
        return
    missing = sorted(name for name, error in failed.items() if isinstance(error, CommandError))
    if missing:
        raise PlanError(
            f"deployment {wish.name}: {path} cannot be read on {', '.join(missing)}: "
            f"{clean(failed[missing[0]].message, 300)}",
            f"copy the model to {missing[0]}:{wish.model}, correct model:, or limit the hosts of the pools",
        )
    name, error = min(failed.items(), key=lambda item: item[0])
    raise PlanError(
        f"deployment {wish.name}: {path} on {name}: {error.message}",
        error.hint,
        code=error.exit_code,
    )


def _parse(wish: DeploymentWish, where: str, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"deployment {wish.name}: {where} is no JSON: {clean(str(error))}",
            "is the model's download complete?",
        ) from error
    if not isinstance(config, dict):
        raise PlanError(f"deployment {wish.name}: {where} is no JSON object")
    return config
