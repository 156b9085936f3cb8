"""`${NAME}` and its kin in values. Not here: positions, and secrets being read (`secrets`).

`${NAME}`, `${NAME:-default}`, `${NAME:?message}` and `${env:NAME}` take the operator's environment, `${file:PATH}` a
file's text without its last line end, `$$` is a dollar sign. Unset is an error, never an empty text.
IO: files; the environment is given.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynctl.files import reason

MAX_FILE_BYTES = 64 * 1024

_REFERENCE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|(\{))")
_VARIABLE = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:\?|-|\?)(.*))?$", re.DOTALL)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
SECRET_KINDS = ("env", "file", "cmd")


class UnresolvedError(ValueError):
    """Raised when a reference cannot be resolved; `hint` says what to do."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value after interpolation."""

    text: str
    sources: tuple[str, ...]
    """Where parts of it came from, such as `$PORT` or `file /etc/name`."""


def interpolate(
    text: str, environment: Mapping[str, str], base: Path, *, keep_secrets: bool = False
) -> Resolved:
    """Replace every reference in a text; `base` is what relative file names start from.

    With `keep_secrets`, `${env:…}`, `${file:…}` and `${cmd:…}` stay as they stand.

    Raises:
        UnresolvedError: when a variable is unset, a file unreadable or a reference malformed.
    """
    sources: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return "$$" if keep_secrets else "$"
        if match[3]:
            raise UnresolvedError("${ without a closing }", "write $${ for the text ${")
        kind, colon, rest = match[2].partition(":")
        if colon and kind in SECRET_KINDS:
            if keep_secrets:
                return match[0]
            return _special(kind, rest, environment, base, sources)
        return _variable(match[2], environment, sources)

    return Resolved(_REFERENCE.sub(one, text), tuple(sources))


def is_secret_reference(text: str) -> bool:
    """Tell whether a text is exactly one `${env:NAME}`, `${file:PATH}` or `${cmd:PROGRAM …}`."""
    match = _REFERENCE.fullmatch(text)
    if match is None or match[2] is None:
        return False
    kind, _, rest = match[2].partition(":")
    return kind in SECRET_KINDS and bool(rest.strip())


def replace_secrets(text: str, resolve: Callable[[str, str], str]) -> str:
    """Replace what `keep_secrets` left: `resolve(kind, rest)` gives each one's value."""

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        kind, _, rest = (match[2] or "").partition(":")
        return resolve(kind, rest) if kind in SECRET_KINDS else match[0]

    return _REFERENCE.sub(one, text)


def read_text(path_text: str, base: Path) -> str:
    """Read a small file, without its last line end.

    Raises:
        UnresolvedError: when it is missing, unreadable, too large or no text.
    """
    path = base / Path(path_text).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UnresolvedError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UnresolvedError(f"{path} is no UTF-8 text") from error
    except OSError as error:
        raise UnresolvedError(f"cannot read {path}: {reason(error)}") from error


def _special(
    kind: str, rest: str, environment: Mapping[str, str], base: Path, sources: list[str]
) -> str:
    if kind == "env":
        if not _NAME.match(rest):
            raise UnresolvedError(f"{rest!r} is no name for an environment variable")
        return _variable(rest, environment, sources)
    if kind == "file":
        sources.append(f"file {rest}")
        return read_text(rest, base)
    raise UnresolvedError(
        "${cmd:…} is only for secrets: api_keys and engine env",
        "checking a file runs no programs; put the value in a variable and write ${NAME}",
    )


def _variable(reference: str, environment: Mapping[str, str], sources: list[str]) -> str:
    match = _VARIABLE.match(reference)
    if match is None:
        raise UnresolvedError(
            f"${{{reference}}} is no reference",
            "write ${NAME}, ${NAME:-default}, ${NAME:?message}, ${env:NAME} or ${file:PATH}; $${ for the text ${",
        )
    name, operator, word = match.groups()
    value = environment.get(name)
    has_value = bool(value) if operator in (":-", ":?") else value is not None
    if has_value:
        sources.append(f"${name}")
        return value or ""
    if operator in (":-", "-"):
        sources.append(f"default of ${name}")
        return word or ""
    if operator in (":?", "?"):
        raise UnresolvedError(word or f"the environment variable {name} is not set")
    hint = f"export {name}=…, or write ${{{name}:-default}}"
    raise UnresolvedError(f"the environment variable {name} is not set", hint)
