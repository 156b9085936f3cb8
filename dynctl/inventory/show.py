"""What an inventory comes to: every value with where it came from, and the whole as YAML again. Secrets stay out.

IO: none of its own; it reads what `load` read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from dynctl.core.inventory import HostEntry
from dynctl.inventory.load import Loaded
from dynctl.inventory.names import expand_range, parse_host
from dynctl.inventory.values import Loc

HIDDEN = "(hidden)"

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_REFERENCE = re.compile(r"^\$\{(env|file|cmd):")


@dataclass(frozen=True, slots=True)
class Row:
    """One value of the inventory."""

    path: str
    value: str | int | float | bool | None
    source: str
    """`inventory.yaml:12`, with the variable or file it was read from, or `default`."""


def rows(loaded: Loaded) -> list[Row]:
    """List every value after defaults, ranges and references."""
    file = loaded.file
    made: list[Row] = []
    for name in ("cluster", "ssh", "ports"):
        made += _walk(loaded, getattr(file, name), (name,), name)
    for loc, entry in loaded.placed:
        made += _host(loaded, loc, entry)
    for name in ("deployments", "api_keys"):
        for index, part in enumerate(getattr(file, name)):
            made += _walk(loaded, part, (name, index), f"{name}.{part.name}")
    return made


def to_yaml(loaded: Loaded) -> str:
    """Write the inventory with everything resolved; it can be loaded again where nothing was hidden."""
    file = loaded.file
    document: dict[str, Any] = {
        "cluster": file.cluster,
        "ssh": file.ssh.model_dump() | {"config": file.ssh.config or False},
        "ports": file.ports.model_dump(),
        "hosts": [_host_mapping(entry) for entry in loaded.inventory.hosts],
        "deployments": [
            _plain(loaded, part, ("deployments", index))
            for index, part in enumerate(file.deployments)
        ],
        "api_keys": [part.model_dump() for part in file.api_keys],
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def _walk(loaded: Loaded, value: Any, loc: Loc, path: str) -> Iterator[Row]:  # noqa: ANN401 - any field
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _walk(loaded, getattr(value, name), (*loc, name), f"{path}.{name}")
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _walk(loaded, item, (*loc, name), f"{path}.{name}")
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _walk(loaded, item, (*loc, index), f"{path}[{index}]")
    else:
        shown = None if value in ([], {}) else _visible(loaded, value, loc)
        yield Row(path, shown, _source(loaded, loc))


def _host(loaded: Loaded, loc: Loc, entry: HostEntry) -> Iterator[Row]:
    for key, value in _host_mapping(entry).items():
        source = _host_source(loaded, loc, key)
        if isinstance(value, dict):
            for name, item in value.items():
                yield Row(f"hosts.{entry.name}.{key}.{name}", item, source)
        else:
            shown = ", ".join(value) if isinstance(value, list) else value
            yield Row(f"hosts.{entry.name}.{key}", shown, source)


def _host_source(loaded: Loaded, loc: Loc, key: str) -> str:
    """A host's value stands in its own item, in its short form, in `groups`, in `defaults`, or nowhere."""
    spots, item = loaded.values.spots, loaded.values.at(loc)
    if (*loc, key) in spots:
        return _source(loaded, (*loc, key))
    if isinstance(item, str):
        _, user, port = parse_host(expand_range(item)[0])
        if key in ("name", "address") or (key == "user" and user) or (key == "port" and port):
            return _source(loaded, loc)
    elif key in ("name", "address"):
        return _source(loaded, loc)
    for place in (("groups",), ("defaults", key)) if key == "groups" else (("defaults", key),):
        if place in spots:
            return _source(loaded, place)
    return "default"


def _host_mapping(entry: HostEntry) -> dict[str, Any]:
    """An entry in the file's long form, without what is not set."""
    made = {field.name: getattr(entry, field.name) for field in fields(entry)}
    made["labels"] = dict(entry.labels)
    made["groups"] = list(entry.groups)
    gpus = made.pop("simulated_gpus")
    if gpus is not None:
        made["simulated_gpus"] = {
            "count": gpus.count,
            "name": gpus.name,
            "memory": gpus.memory_bytes,
        }
    return {key: value for key, value in made.items() if value not in (None, {}, [], 0)}


def _plain(loaded: Loaded, value: Any, loc: Loc) -> Any:  # noqa: ANN401 - any field
    """A part as plain data, without what is not set, secrets hidden."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        made = {name: _plain(loaded, item, (*loc, name)) for name, item in value.items()}
        return {name: item for name, item in made.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_plain(loaded, item, (*loc, index)) for index, item in enumerate(value)]
    shown = _visible(loaded, value, loc)
    is_kept = loc[-2:-1] == ("env",)  # there, references and $$ stand as they were written
    return shown.replace("$", "$$") if isinstance(shown, str) and not is_kept else shown


def _visible(loaded: Loaded, value: Any, loc: Loc) -> Any:  # noqa: ANN401 - any scalar
    """Hide what may be a secret: flags and variables with such a name, and variables taken from the environment."""
    place = loc[-2] if len(loc) > 1 else None
    if place not in ("env", "args") or (isinstance(value, str) and _REFERENCE.match(value)):
        return value
    is_secret = _SECRET_NAME.search(str(loc[-1])) is not None
    return HIDDEN if is_secret or (place == "env" and loc in loaded.values.sources) else value


def _source(loaded: Loaded, loc: Loc) -> str:
    if loc not in loaded.values.spots:
        return "default"
    spot = loaded.values.spots[loc]
    made_from = ", ".join(loaded.values.sources.get(loc, ()))
    path = Path(loaded.inventory.path)
    # What a program defines has no line in it.
    line = path.name if path.suffix == ".py" else f"{path.name}:{spot.line}"
    return f"{line} from {made_from}" if made_from else line
