"""What several commands do first: load the inventory, choose hosts, ask about keys.

IO: files, terminal.
"""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynctl.cli.options import DEFAULT_INVENTORY
from dynctl.cli.output import ask, is_interactive, say
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import clean
from dynctl.errors import UsageError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.remote.trust import NewHostKey


_NO_INVENTORY = "dynctl init writes one; --local needs none; -i names another"


def load(path: Path, *, local: bool) -> Inventory:
    """Read the inventory, run it when it is a Python file, or make the one of this machine alone.

    Raises:
        InventoryError: with every problem of the file.
    """
    from dynctl.inventory.load import load_inventory, local_inventory

    if local:
        return local_inventory()
    if not is_there(path):
        raise UsageError(f"{path} does not exist", _NO_INVENTORY)
    if path.suffix == ".py":
        from dynctl.cli.planning import load_python

        return load_python(path).inventory
    return load_inventory(path)


def load_if_there(path: Path) -> Inventory | None:
    """Read the inventory where it is the usual one that need not be there; one that somebody named has to be.

    Raises:
        InventoryError: with every problem of the file.
    """
    may_be_absent = path == DEFAULT_INVENTORY and not is_named()
    return None if may_be_absent and not is_there(path) else load(path, local=False)


def is_named() -> bool:
    """Whether the command that runs was given an inventory where it was typed, be it the usual one."""
    # typer re-exports neither; pinned below 0.29.
    from typer._click.core import ParameterSource
    from typer._click.globals import get_current_context

    context = get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source("inventory")
    return source is ParameterSource.COMMANDLINE


def is_there(path: Path) -> bool:
    """Whether a path that somebody named exists.

    Raises:
        UsageError: when the system does not even look, as for names that are too long.
    """
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{clean(str(path))}: {reason(error)}", "name another file") from error


def select(inventory: Inventory, limit: str | None) -> list[str]:
    """Choose hosts by `--limit`: names, globs, groups, `label=value`, comma-separated; `!` excludes.

    Raises:
        UsageError: when a term matches nothing, or nothing is left; names what is near.
    """
    names = [entry.name for entry in inventory.hosts]
    if limit is None:
        return names
    terms = [term.strip() for term in limit.split(",") if term.strip()]
    if not terms:
        # As of a variable that is not set: what is meant for one host must not be done to all.
        raise UsageError(f"--limit {limit!r} names no host", f"hosts are: {', '.join(names)}")
    chosen = names if all(term.startswith("!") for term in terms) else []
    for term in terms:
        matched = {
            entry.name for entry in inventory.hosts if _matches(entry, term.removeprefix("!"))
        }
        if not matched:
            raise UsageError(f"--limit {term!r} matches no host", f"hosts are: {', '.join(names)}")
        if term.startswith("!"):
            chosen = [name for name in chosen if name not in matched]
        else:
            chosen += [name for name in names if name in matched and name not in chosen]
    if not chosen:
        raise UsageError(f"--limit {limit!r} leaves no host", f"hosts are: {', '.join(names)}")
    return chosen


def _matches(entry: HostEntry, term: str) -> bool:
    if fnmatch.fnmatchcase(entry.name, term) or term in entry.groups:
        return True
    key, equals, value = term.partition("=")
    return bool(equals) and (key, value) in entry.labels


async def ask_about_keys(keys: "Sequence[NewHostKey]") -> bool:
    """Show all new host keys at once and ask; without a terminal the answer is no."""
    if not is_interactive():
        return False
    say("hosts that were never seen before:")
    for key in keys:
        say(f"  {clean(key.name)}  {key.key.kind}  {key.key.fingerprint}")
    return await ask("are these right? They will be remembered.")
