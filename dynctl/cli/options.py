"""Options that several commands share, so that they are spelled and explained once. Pure."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Output(StrEnum):
    """How a read command prints its data."""

    TABLE = "table"
    JSON = "json"


InventoryPath = Annotated[
    Path,
    typer.Option(
        "--inventory",
        "-i",
        help="The inventory file; a Python file that defines the same is run.",
        envvar="DYNCTL_INVENTORY",
        show_default=True,
    ),
]
Local = Annotated[
    bool,
    typer.Option(
        "--local", help="Use this machine alone, with simulated engines; needs no inventory."
    ),
]
OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="table for people, json for programs.")
]
AdminSocket = Annotated[
    Path | None, typer.Option("--admin-socket", help="Of a router that `dynctl route` runs here.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        "-l",
        help="Hosts: names, globs, groups or label=value, comma-separated; ! excludes.",
    ),
]

DEFAULT_INVENTORY = Path("inventory.yaml")


def finite(value: float | None) -> float | None:
    """Refuse NaN and infinity, which typer's bounds let pass: NaN is neither too small nor too large.

    Raises:
        BadParameter: as typer's own refusals.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number that can be reckoned with")
    return value
