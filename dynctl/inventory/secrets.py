"""Secrets by reference, read where they are used and nowhere else. Not here: keeping them.

IO: the environment, files, programs (`${cmd:…}`).
"""

import os
import shlex
import subprocess
from pathlib import Path

from dynctl.core.command import Secret
from dynctl.core.inventory import Inventory
from dynctl.core.text import clean
from dynctl.errors import DynctlError
from dynctl.files import reason
from dynctl.inventory.interpolate import UnresolvedError, read_text, replace_secrets

COMMAND_TIMEOUT_S = 30.0


class SecretError(DynctlError):
    """Raised when a secret cannot be read; names the reference, never what came out."""


def reveal(reference: str, inventory: Inventory, what: str) -> Secret:
    """Resolve the `${env:…}`, `${file:…}` and `${cmd:…}` of a text from the inventory.

    `what` says for whom, such as `API key team-a`. Relative files start from the inventory's directory.

    Raises:
        SecretError: when a variable is unset, a file unreadable, a program fails, or the result is empty.
    """
    base = Path(inventory.path).parent

    def resolve(kind: str, rest: str) -> str:
        if kind == "env":
            return _from_environment(rest)
        return read_text(rest, base) if kind == "file" else _from_program(rest, base)

    try:
        text = replace_secrets(reference, resolve)
    except UnresolvedError as error:
        raise SecretError(f"{what}: {error}", error.hint or None) from error
    if not text and reference:
        raise SecretError(f"{what}: {reference} is empty")
    return Secret(text)


def _from_environment(name: str) -> str:
    if name not in os.environ:
        raise UnresolvedError(f"the environment variable {name} is not set", f"export {name}=…")
    return os.environ[name]


def _from_program(line: str, base: Path) -> str:
    """Run a program without a shell and take its first output, without the last line end."""
    try:
        argv = shlex.split(line)
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            cwd=base,
        )
    except (ValueError, IndexError) as error:
        raise UnresolvedError(f"{clean(line)} is no command: {error}") from error
    except OSError as error:
        raise UnresolvedError(f"{argv[0]}: {reason(error)}") from error
    except subprocess.TimeoutExpired as error:
        raise UnresolvedError(f"{argv[0]}: not done after {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = clean(done.stderr.decode("utf-8", "replace"))
        raise UnresolvedError(f"{argv[0]} ended with status {done.returncode}: {said}")
    return done.stdout.decode("utf-8", "replace").removesuffix("\n")
