"""What hosts say is cut to what a host can have, and cleaned to what a terminal may show, wherever it came from. Pure."""

from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from dynctl.core.text import clean

T = TypeVar("T")

MAX_GPUS = 128
MAX_ITEMS = 1024
"""Of NICs, processes, routes and everything else that a host has several of."""
_MAX_CHARS = 2000


def cleaned(value: T) -> T:
    """The same with every text in it cleaned and every list bounded, at any depth."""
    made: Any = value
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        made = value if _is_plain(value) else clean(value, _MAX_CHARS)
    elif isinstance(value, tuple):
        items = tuple(cleaned(item) for item in value[:MAX_ITEMS])
        same = len(items) == len(value) and all(a is b for a, b in zip(items, value, strict=True))
        made = value if same else items
    elif is_dataclass(value) and not isinstance(value, type):
        now = [(each.name, getattr(value, each.name)) for each in fields(value)]
        changed = {name: new for name, old in now if (new := cleaned(old)) is not old}
        made = replace(value, **changed) if changed else value
    return made  # type: ignore[no-any-return]


def _is_plain(text: str) -> bool:
    return len(text) <= _MAX_CHARS and text.isprintable()
