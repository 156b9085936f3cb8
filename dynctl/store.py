"""The operator's cache in `.dynctl/`: stage values as JSON, written atomically. Not: decisions.

IO: files.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from dynctl.errors import DynctlError
from dynctl.files import write_atomic

T = TypeVar("T")


def to_json(value: object) -> bytes:
    """Encode a stage value (dataclasses, enums, tuples) as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2) + b"\n"


def save(path: Path, value: object) -> None:
    """Keep a stage value as JSON."""
    write_atomic(path, to_json(value))


def load(path: Path, kind: type[T]) -> T:
    """Read a stage value back.

    Raises:
        DynctlError: when the file is missing, damaged or of another version.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise DynctlError(f"{path} does not exist") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DynctlError(
            f"{path} is damaged or from another version: {error}", f"remove it: rm {path}"
        ) from error
