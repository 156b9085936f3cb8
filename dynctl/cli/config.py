"""`dynctl config`: check the inventory, show what it comes to, print its schema.

Not here: what the keys mean. IO: files.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath
from dynctl.cli.output import emit, emit_json, table
from dynctl.cli.session import load
from dynctl.errors import ExitCode

if TYPE_CHECKING:
    from dynctl.core.inventory import Inventory

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


_SCHEMA = "dynctl.config/1"


class Format(StrEnum):
    """How `config` prints."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


FormatOption = Annotated[
    Format, typer.Option("-o", "--output", help="table for people; json or yaml for programs.")
]


@app.command()
def validate(
    inventory: InventoryPath = DEFAULT_INVENTORY, output: FormatOption = Format.TABLE
) -> None:
    """Check the inventory: every problem with its line.

    Exit 2 when there is one.

    Examples:  dynctl config validate        dynctl config validate -i prod.yaml -o json
    """
    from dynctl.inventory.problems import ProblemsError

    try:
        loaded = load(inventory, local=False)
    except ProblemsError as error:
        if output is Format.TABLE:
            raise
        found = [
            {
                "line": p.spot.line,
                "column": p.spot.column,
                "text": p.text,
                "hint": p.hint,
            }
            for p in error.problems
        ]
        _emit(
            {"schema": _SCHEMA, "path": str(inventory), "is_valid": False, "problems": found},
            output,
        )
        raise typer.Exit(ExitCode.USAGE) from error
    if output is Format.TABLE:
        emit(_summary(loaded))
    else:
        _emit({"schema": _SCHEMA, "path": str(inventory), "is_valid": True, "problems": []}, output)


@app.command()
def show(inventory: InventoryPath = DEFAULT_INVENTORY, output: FormatOption = Format.TABLE) -> None:
    """Print every value and where it came from.

    After ranges, defaults and references are worked out; secrets stay references.

    Examples:  dynctl config show        dynctl config show -o yaml > resolved.yaml
    """
    from dynctl.cli.planning import load_python
    from dynctl.inventory.load import read_inventory
    from dynctl.inventory.show import rows, to_yaml

    loaded = load_python(inventory) if inventory.suffix == ".py" else read_inventory(inventory)
    if output is Format.YAML:
        emit(to_yaml(loaded))
        return
    found = rows(loaded)
    if output is Format.JSON:
        emit_json({"schema": _SCHEMA, "path": str(inventory), "values": found})
        return
    table(
        ("KEY", "VALUE", "FROM"),
        [(row.path, "–" if row.value is None else _text(row.value), row.source) for row in found],
    )


@app.command()
def schema() -> None:
    """Print the JSON Schema (draft-07) of inventory.yaml, for editors.

    Example:  dynctl config schema > inventory.schema.json
    """
    from dynctl.inventory.schema import json_schema

    emit_json(json_schema())


def _summary(inventory: "Inventory") -> str:
    counts = (
        _count(len(inventory.hosts), "host"),
        _count(len(inventory.deployments), "deployment"),
        _count(len(inventory.api_keys), "API key"),
    )
    return f"{inventory.path} is valid: {', '.join(counts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _emit(value: object, output: Format) -> None:
    if output is Format.JSON:
        emit_json(value)
    else:
        import yaml

        emit(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
