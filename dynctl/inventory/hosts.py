"""Host items of the file to host entries: ranges expanded, defaults applied, names checked.

IO: files (`from_ssh_config`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynctl.core.inventory import HostEntry, SimulatedGpus
from dynctl.core.text import is_name
from dynctl.inventory.names import (
    expand_range,
    is_address,
    is_pattern,
    is_user,
    matching,
    parse_host,
    ssh_aliases,
)
from dynctl.inventory.problems import NAME_HINT, shown, suggest
from dynctl.inventory.schema import HostDefaultsPart, HostPart, SshPatternPart
from dynctl.inventory.values import Loc, Values

Placed = tuple[Loc, HostEntry]
"""An entry and the path of the item it came from."""


def entries_of(
    items: Sequence[tuple[Loc, str | HostPart | SshPatternPart]],
    defaults: HostDefaultsPart,
    ssh_config: Path | None,
    values: Values,
) -> tuple[list[Placed], bool]:
    """Expand all items; problems are noted in `values`. Also tells whether every item's names are known."""
    placed: list[Placed] = []
    are_all_named = True
    for loc, item in items:
        try:
            entries = _expand(item, defaults, ssh_config)
        except ValueError as error:
            values.report(loc if isinstance(item, str) else (*loc, _named(item)), str(error))
            are_all_named = False
            continue
        for entry in entries:
            _check(entry, loc, values)
            placed.append((loc, entry))
    return _distinct(placed, values), are_all_named


def with_groups(
    placed: Sequence[Placed], groups: dict[str, list[str]], values: Values, *, is_complete: bool
) -> tuple[HostEntry, ...]:
    """Add each host's groups of the `groups:` section; unknown names are noted when all hosts are known."""
    names = [entry.name for _, entry in placed]
    members: dict[str, list[str]] = {name: [] for name in names}
    for group, patterns in groups.items():
        if not is_name(group):
            values.report_key(
                ("groups", group), f"{shown(group)} is no name for a group", NAME_HINT
            )
        if group in members:
            values.report_key(("groups", group), f"the group {group!r} has the name of a host")
        for index, pattern in enumerate(patterns):
            found = _resolve(pattern, names)
            if not found and is_complete:
                text = f"no host is called {shown(pattern)}"
                values.report(("groups", group, index), text, suggest(pattern, names))
            for name in found:
                members[name].append(group)
    return tuple(
        _replace_groups(entry, (*entry.groups, *members[entry.name])) for _, entry in placed
    )


def _resolve(pattern: str, names: list[str]) -> list[str]:
    """Hosts a group's member stands for: a name, a range or a glob."""
    if pattern in names:
        return [pattern]
    try:
        expanded = expand_range(pattern)
    except ValueError:
        expanded = [pattern]
    if len(expanded) > 1 or expanded[0] != pattern:
        return [name for name in expanded if name in names]
    return matching(pattern, names) if is_pattern(pattern) else []


def _named(item: HostPart | SshPatternPart) -> str:
    return "name" if isinstance(item, HostPart) else "from_ssh_config"


def _expand(
    item: str | HostPart | SshPatternPart, defaults: HostDefaultsPart, ssh_config: Path | None
) -> list[HostEntry]:
    if isinstance(item, str):
        parsed = [parse_host(text) for text in expand_range(item)]
        return [_entry(name, name, None, defaults, user, port) for name, user, port in parsed]
    merged = _merge(item, defaults)
    if isinstance(item, SshPatternPart):
        return [_entry(name, name, None, merged) for name in _aliases(item, ssh_config)]
    names = expand_range(item.name)
    addresses = _alongside(item.address, names, "address") or names
    data: list[str | None] = [None] * len(names)
    if (beside := _alongside(item.data_address, names, "data_address")) is not None:
        data = [*beside]
    return [
        _entry(name, address, data_address, merged)
        for name, address, data_address in zip(names, addresses, data, strict=True)
    ]


def _aliases(item: SshPatternPart, ssh_config: Path | None) -> list[str]:
    if ssh_config is None:
        raise ValueError("from_ssh_config needs ssh.config, which is false")
    known = ssh_aliases(ssh_config)
    found = matching(item.from_ssh_config, known)
    if not found:
        some = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        there = f"it has {some}" if known else "it has no Host lines, or cannot be read"
        raise ValueError(f"no host in {ssh_config} fits {item.from_ssh_config!r}; {there}")
    return found


def _alongside(text: str | None, names: list[str], key: str) -> list[str] | None:
    """Expand a second range that runs beside the names."""
    if text is None:
        return None
    made = expand_range(text)
    if len(made) != len(names):
        raise ValueError(f"the name stands for {len(names)} hosts and {key} for {len(made)}")
    return made


def _merge(item: HostDefaultsPart, defaults: HostDefaultsPart) -> HostDefaultsPart:
    """The item's own values over the defaults; labels and groups are joined."""
    own = {name: getattr(item, name) for name in item.model_fields_set}
    both = {name: getattr(defaults, name) for name in HostDefaultsPart.model_fields}
    both |= {name: value for name, value in own.items() if name in both}
    both["labels"] = {**defaults.labels, **item.labels}
    both["groups"] = [*defaults.groups, *item.groups]
    return HostDefaultsPart.model_construct(**both)


def _entry(
    name: str,
    address: str,
    data_address: str | None,
    part: HostDefaultsPart,
    user: str | None = None,
    port: int | None = None,
) -> HostEntry:
    gpus = part.simulated_gpus
    return HostEntry(
        name=name,
        address=address,
        user=user or part.user,
        port=port or part.port,
        key=part.key,
        jump=part.jump,
        labels=tuple(part.labels.items()),
        groups=tuple(part.groups),
        data_address=data_address,
        root=part.root,
        python=part.python,
        cpu_slots=part.cpu_slots,
        simulated_gpus=None if gpus is None else SimulatedGpus(gpus.count, gpus.name, gpus.memory),
    )


def _check(entry: HostEntry, loc: Loc, values: Values) -> None:
    if not is_name(entry.name):
        values.report((*loc, "name"), f"{shown(entry.name)} is no host name", NAME_HINT)
    elif not is_address(entry.address):
        values.report((*loc, "address"), f"{shown(entry.address)} is no host name or IP address")
    if entry.data_address is not None and not is_address(entry.data_address):
        text = f"{shown(entry.data_address)} is no host name or IP address"
        values.report((*loc, "data_address"), text)
    if entry.user is not None and not is_user(entry.user):
        values.report((*loc, "user"), f"{shown(entry.user)} is no login name")
    for index, hop in enumerate((entry.jump or "").split(",") if entry.jump else ()):
        try:
            parse_host(hop.strip())
        except ValueError:
            text = f"jump host {index + 1}, {shown(hop)}, is no [user@]host[:port]"
            values.report((*loc, "jump"), text)
    if entry.root is not None and not entry.is_local and not entry.root.startswith(("/", "~/")):
        text = f"root {shown(entry.root)} must be absolute or begin with ~/"
        values.report((*loc, "root"), text)
    for group in entry.groups:
        if not is_name(group):
            values.report((*loc, "groups"), f"{shown(group)} is no name for a group", NAME_HINT)


def _distinct(placed: Sequence[Placed], values: Values) -> list[Placed]:
    """Refuse a name or an address that is there twice."""
    names: dict[str, Loc] = {}
    places: dict[tuple[str, int | None], tuple[str, Loc]] = {}
    kept = []
    for loc, entry in placed:
        place = (entry.address.lower(), entry.port)
        if entry.name in names:
            line = values.spot(names[entry.name]).line
            values.report(loc, f"the host {entry.name!r} is here twice; first on line {line}")
        elif place in places and not entry.is_local:
            other, first = places[place]
            line = values.spot(first).line
            values.report(
                loc,
                f"{entry.name} and {other} (line {line}) have the same address {entry.address}",
                "list each machine once",
            )
        else:
            kept.append((loc, entry))
        names.setdefault(entry.name, loc)
        places.setdefault(place, (entry.name, loc))
    return kept


def _replace_groups(entry: HostEntry, groups: tuple[str, ...]) -> HostEntry:
    return replace(entry, groups=tuple(dict.fromkeys(groups)))
