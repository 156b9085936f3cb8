"""`dynctl init`: write a first inventory and the schema beside it. Not here: what the examples say. IO: files."""

from pathlib import Path
from typing import Annotated

import typer

from dynctl.cli.output import say
from dynctl.errors import UsageError
from dynctl.files import reason

SCHEMA_PATH = ".dynctl/inventory.schema.json"


def command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.")] = Path(),
    example: Annotated[
        str,
        typer.Option(help="Which: local, one-host, prefill-decode, adopt or several."),
    ] = "local",
) -> None:
    """Write a first inventory.yaml, and its schema so that editors complete and check keys.

    Examples:  dynctl init        dynctl init prod --example prefill-decode
    """
    from dynctl.files import write_atomic
    from dynctl.inventory.examples.catalog import example_names, example_text
    from dynctl.inventory.problems import suggest
    from dynctl.inventory.schema import json_schema
    from dynctl.store import save

    names = example_names()
    if example not in names:
        raise UsageError(f"there is no example {example!r}", suggest(example, names))
    target = directory / "inventory.yaml"
    if target.exists():
        raise UsageError(
            f"{target} exists already; nothing was written",
            f"write elsewhere: dynctl init DIR --example {example}",
        )
    text = f"# yaml-language-server: $schema={SCHEMA_PATH}\n{example_text(example)}"
    try:
        save(directory / SCHEMA_PATH, json_schema())
        write_atomic(target, text.encode(), 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {reason(error)}", "name another directory: dynctl init DIR"
        ) from error
    where = "" if directory == Path() else f" -i {target}"
    say(f"wrote {target} (example {example})")
    say(f"next: edit it, then dynctl config validate{where}; dynctl plan{where}; dynctl up{where}")
