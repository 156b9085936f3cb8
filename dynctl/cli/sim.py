"""`dynctl sim engine`: one simulated engine in the foreground, with the options of `python -m dynctl.sim`.

Not here: what the options mean (`sim.options`). IO: terminal.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import typer

from dynctl.sim.options import HELP, SimOptions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Simulated engines: an OpenAI server with a real prefix cache and no model."""


def _engine(**values: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
    """Run one simulated engine until Ctrl-C.

    It has OpenAI's routes, vLLM's metrics, KV events and the KV hand-off.
    """
    from dynctl.cli.output import say
    from dynctl.sim.run import run_engine

    options = SimOptions(**{**values, "fault": tuple(values["fault"] or ())})
    options.check()
    run_engine(options, lambda address: say(f"serving {options.model} on {address}"))


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of SimOptions, so that flags and defaults are written once."""
    parameters = []
    for field in fields(SimOptions):
        is_list = field.name == "fault"
        option = typer.Option(None if is_list else field.default, help=HELP[field.name])
        kind = list[str] | None if is_list else field.type
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


app.command("engine")(_with_options(_engine))
