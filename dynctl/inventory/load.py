"""inventory.yaml to `Inventory`: the one entrance. Every problem of the file is found before one is told.

IO: files, the environment.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynctl import registry
from dynctl.core.inventory import Inventory, SshSettings
from dynctl.core.text import is_name
from dynctl.errors import InventoryError
from dynctl.files import reason
from dynctl.inventory.build import PlugIns, api_keys_of, deployments_of
from dynctl.inventory.document import MAX_BYTES, parse
from dynctl.inventory.explain import problems_of
from dynctl.inventory.hosts import Placed, entries_of, with_groups
from dynctl.inventory.local import local_inventory
from dynctl.inventory.problems import NAME_HINT, Problem, ProblemsError, Spot, shown
from dynctl.inventory.schema import (
    TAGS,
    ApiKeyPart,
    DeploymentPart,
    HostDefaultsPart,
    HostItem,
    InventoryFile,
    PortsPart,
    SshPart,
)
from dynctl.inventory.values import Loc, Values, read_values

__all__ = ["Loaded", "load_inventory", "local_inventory", "read_document", "read_inventory"]


_MAX_REPAIRS = 20
_START = "dynctl init writes one to begin with"


@dataclass(frozen=True, slots=True)
class Loaded:
    """An inventory with the file's own values and where each stands."""

    inventory: Inventory
    file: InventoryFile
    values: Values
    placed: tuple[Placed, ...]
    """Every host entry with the path of the item it came from."""


def load_inventory(path: Path) -> Inventory:
    """Read and check an inventory file.

    Raises:
        InventoryError: with all problems, each with file, line, column and next step.
    """
    return read_inventory(path).inventory


def read_inventory(path: Path, environment: Mapping[str, str] | None = None) -> Loaded:
    """Read and check an inventory file, and keep where each value came from.

    Raises:
        InventoryError: with all problems, each with file, line, column and next step.
    """
    return read_document(_source(path), str(path), path.parent, environment)


def read_document(
    source: str, name: str, base: Path, environment: Mapping[str, str] | None = None
) -> Loaded:
    """Read and check the text of an inventory; `name` is what it is called, `base` where relative paths start.

    Raises:
        InventoryError: with all problems, each with name, line, column and next step.
    """
    root, problems = parse(source)
    # A text that is no YAML has nothing more to say; one with mere traps has.
    if problems and not root.entries:
        raise ProblemsError(name, source, problems, _START)
    values = read_values(root, os.environ if environment is None else environment, base)
    num_unresolved = len(values.problems)
    file, inventory, locs = _checked(values, name)
    # What is wrong with the text of a value is said once, not again as a wrong type.
    told = {problem.spot for problem in problems + values.problems[:num_unresolved]}
    later = [p for p in values.problems[num_unresolved:] if p.spot not in told]
    values.problems[num_unresolved:] = [*problems, *later]
    if values.problems or file is None:
        raise ProblemsError(name, source, values.problems, None if root.entries else _START)
    placed = tuple(zip(locs, inventory.hosts, strict=True))
    return Loaded(inventory, file, values, placed)


def _source(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InventoryError(
            f"cannot read {path}: {reason(error)}",
            "dynctl init writes one; -i names another",
        ) from error
    if len(content) > MAX_BYTES:
        raise InventoryError(f"{path} is larger than {MAX_BYTES} bytes, which no inventory needs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        problem = Problem(Spot(before.count(b"\n") + 1, column), "this is no UTF-8 text")
        raise ProblemsError(
            str(path), content.decode("utf-8", "replace"), [problem], _START
        ) from error


def _checked(values: Values, path: str) -> tuple[InventoryFile | None, Inventory, list[Loc]]:
    """Validate the whole for its errors, then build from the parts that are right, so that all problems show."""
    data = values.data
    file: InventoryFile | None = None
    try:
        file = InventoryFile.model_validate(data)
    except ValidationError as error:
        values.problems += problems_of(error, values)
    ssh = _part(SshPart, data.get("ssh")) or SshPart()
    ports = _part(PortsPart, data.get("ports")) or PortsPart()
    defaults = _part(HostDefaultsPart, data.get("defaults")) or HostDefaultsPart()
    items, has_all_hosts = _host_items(data.get("hosts"))
    config = Path(ssh.config).expanduser() if ssh.config else None
    placed, are_all_named = entries_of(items, defaults, config, values)
    has_all_hosts = has_all_hosts and are_all_named
    groups = _part(dict[str, list[str]], data.get("groups")) or {}
    hosts = with_groups(placed, groups, values, is_complete=has_all_hosts)
    keys, _ = _items(ApiKeyPart, data.get("api_keys"), "api_keys")
    wishes, _ = _items(DeploymentPart, data.get("deployments"), "deployments")
    plugins = PlugIns(
        registry.names("dynctl.agents.engines"), registry.names("dynctl.router.policies")
    )
    cluster = data.get("cluster")
    if isinstance(cluster, str) and not is_name(cluster):
        values.report(("cluster",), f"{shown(cluster)} is no name for a cluster", NAME_HINT)
    if ports.base + ports.count > 65536:
        values.report(
            ("ports",), f"ports {ports.base} to {ports.base + ports.count - 1} end after 65535"
        )
    inventory = Inventory(
        cluster=str(cluster),
        hosts=hosts,
        deployments=deployments_of(
            wishes, hosts if has_all_hosts else None, plugins, bool(keys), values
        ),
        ssh=SshSettings(
            ssh.config,
            ssh.known_hosts,
            ssh.host_keys,
            ssh.connect_timeout_s,
            ssh.keepalive_s,
            ssh.parallel,
        ),
        api_keys=api_keys_of(keys, values),
        port_base=ports.base,
        port_count=ports.count,
        path=path,
    )
    return file, inventory, [loc for loc, _ in placed]


def _part(kind: Any, data: object) -> Any:  # noqa: ANN401 - any type pydantic knows
    """Validate one part without what is wrong in it, which the whole has told already; None when nothing is left.

    So a typo in one key of a host doesn't make the host unknown to everything that names it.
    """
    data = copy.deepcopy(data)
    for _ in range(_MAX_REPAIRS):
        try:
            return TypeAdapter(kind).validate_python(data, strict=True)
        except ValidationError as error:
            wrong = {_place(item["loc"]) for item in error.errors(include_url=False)}
            is_out = [_drop(data, loc) for loc in sorted(wrong)]
            if not all(is_out):
                return None
    return None


def _place(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The nearest key on the way to an error that can be left out: never one item of a list."""
    names = [part for part in loc if part not in TAGS]
    upto = next((i for i, part in enumerate(names) if isinstance(part, int)), len(names))
    return tuple(str(part) for part in names[:upto])


def _drop(data: Any, loc: tuple[str, ...]) -> bool:  # noqa: ANN401 - plain data
    """Take a key out; true when it is out."""
    for part in loc[:-1]:
        if not isinstance(data, dict) or part not in data:
            return True  # its parent is out already
        data = data[part]
    if not loc or not isinstance(data, dict) or loc[-1] not in data:
        return False
    del data[loc[-1]]
    return True


def _items(kind: Any, data: object, name: str) -> tuple[list[tuple[Loc, Any]], bool]:  # noqa: ANN401 - as above
    """The right items of a list with their paths, and whether all were right."""
    if not isinstance(data, list):
        return [], data is None
    made = [((name, index), _part(kind, item)) for index, item in enumerate(data)]
    kept: list[tuple[Loc, Any]] = [(loc, part) for loc, part in made if part is not None]
    return kept, len(kept) == len(made)


def _host_items(data: object) -> tuple[Sequence[tuple[Loc, Any]], bool]:
    if isinstance(data, dict):
        part = _part(HostItem, data)
        return ([(("hosts",), part)], True) if part is not None else ([], False)
    kept, is_complete = _items(HostItem, data, "hosts")
    return kept, is_complete and isinstance(data, list)
