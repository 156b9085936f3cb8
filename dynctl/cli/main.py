"""The `dynctl` command: finds the subcommand's module, runs it, turns errors into text and exit codes.

Not here: what any command does. Only the module of the command typed is imported, so `--help` stays cheap.
IO: terminal.
"""

import errno
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import typer

# typer carries click inside and re-exports no base class of its usage errors; pinned below 0.29.
from typer._click.exceptions import ClickException

from dynctl import __version__
from dynctl.cli.output import ReaderGoneError, mend_streams, report
from dynctl.core.text import clean
from dynctl.errors import DynctlError, ExitCode

COMMANDS = {
    "init": "Write a first inventory.yaml.",
    "config": "Check, show or describe the inventory.",
    "discover": "Describe the hosts: GPUs, NVLink, PCIe, NUMA, NICs.",
    "linktest": "Measure throughput and latency between every pair of hosts.",
    "doctor": "Look for what is wrong: each with its fix and a proof.",
    "plan": "Lay out pools on the hosts, with predicted latency and rate.",
    "estimate": "Price one layout without hosts: latency, rate and memory.",
    "calibrate": "Fit the estimates to bench results of an engine and GPU.",
    "up": "Bring the cluster to the plan: agents, engines, router.",
    "status": "Show what runs, and where.",
    "top": "Watch TTFT, ITL, KV hit rate, queues and GPUs live.",
    "bench": "Drive load against a deployment and report what it did.",
    "explain": "Say why a request went where it went, or missed the cache.",
    "policy": "Show or change how running routers choose engines.",
    "logs": "Read the logs of engines, router and agents.",
    "drain": "Take engines out of service, or bring them back.",
    "down": "Drain and stop everything dynctl started.",
    "route": "Run a router alone, in front of engines that already run.",
    "sim": "Run a simulated engine in the foreground.",
    "demo": "Plan, up, bench, top and down on this machine; no GPU needed.",
}

_OF_THIS_MACHINE: dict[int | None, str] = {
    errno.ENOSPC: "free some space on this machine's disk, then run it again",
    errno.EDQUOT: "free some space on this machine's disk, then run it again",
    errno.EACCES: "run it where you may write, or name another file",
    errno.EROFS: "run it where you may write, or name another file",
    errno.EISDIR: "it has to be a file",
    errno.ENOTDIR: "name another file",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or lower ssh.parallel",
}
"""The next step for what the operator's own machine refuses."""

EPILOG = (
    "Exit codes: 0 ok, 1 error, 2 usage or config, 3 partial failure, 4 nothing reachable, infeasible or refused "
    "(nothing changed), 5 lock held, 6 health or SLO gate failed, 7 trust, 8 outcome unknown, "
    "10 changes present (plan --detailed-exitcode), 130 interrupted."
)


def _version(value: bool) -> None:
    if value:
        found = find_spec("dynctl.http1.connection")
        is_compiled = found is not None and not str(found.origin).endswith(".py")
        typer.echo(f"dynctl {__version__}{', compiled' if is_compiled else ''}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Disaggregated LLM serving on bare-metal GPU hosts over SSH."""


def _elsewhere() -> None:
    raise AssertionError("only the command that was typed is loaded")


def build_app(wanted: str | None) -> typer.Typer:
    """Make the app with the wanted command loaded and the others as names with their one line of help."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    for name, text in COMMANDS.items():
        if name != wanted:
            app.command(name, help=text)(_elsewhere)
            continue
        module = importlib.import_module(f"dynctl.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, help=text)
        else:
            command: Callable[..., None] = module.command
            app.command(name)(command)
    return app


def _fault(error: Exception) -> DynctlError:
    """What is said of a fault of this program itself; it holds the traceback for whoever asks for it."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no place"
    said = clean(str(error), 300)
    made = DynctlError(
        f"a fault of dynctl itself: {type(error).__name__}{f': {said}' if said else ''} ({place})",
        "run it again with DYNCTL_TRACEBACK=1 and report what that shows, with the command",
    )
    made.__cause__ = error
    return made


def main() -> None:
    """Run the command line and exit with its code."""
    mend_streams()
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run the command line; return the exit code. Never raises for what an operator can meet."""
    wanted = next((arg for arg in args if not arg.startswith("-")), None)
    if "_DYNCTL_COMPLETE" in os.environ:
        words = os.environ.get("COMP_WORDS", "").split()
        wanted = words[1] if len(words) > 1 else None
    try:
        result = build_app(wanted if wanted in COMMANDS else None)(
            args, prog_name="dynctl", standalone_mode=False
        )
    except DynctlError as error:
        report(error)
        return int(error.exit_code)
    except ClickException as error:
        error.show()
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return int(ExitCode.INTERRUPTED)
    except ReaderGoneError:
        return int(ExitCode.OK)
    except OSError as error:
        from dynctl.files import reason

        # What a command expects to fail it explains itself; this is a full disk, a directory of somebody else.
        where = f"{error.filename}: " if error.filename else ""
        report(DynctlError(f"{where}{reason(error)}", _OF_THIS_MACHINE.get(error.errno)))
        return int(ExitCode.ERROR)
    except Exception as error:  # noqa: BLE001 - the last resort: whoever operates a cluster cannot use a traceback
        report(_fault(error))
        return int(ExitCode.ERROR)
    return result if isinstance(result, int) else int(ExitCode.OK)
