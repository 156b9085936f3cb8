"""The tree as plain values, with references resolved and every place remembered. IO: files named by `${file:…}`."""

import json
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynctl.inventory.document import Listing, Mapping, Node, Scalar
from dynctl.inventory.interpolate import UnresolvedError, interpolate
from dynctl.inventory.problems import Problem, Spot

Loc = tuple[int | str, ...]

_FREE_TEXT = frozenset({"labels", "env"})
"""Mappings of which every value is text, so that `8` needs no quotes."""
_FLAGS = "args"
"""Likewise, and lists and mappings become JSON, as engine flags take them."""


@dataclass(slots=True)
class Values:
    """Plain data and, by path, where each value and key stands and what it was made from."""

    data: dict[str, Any] = field(default_factory=dict)
    spots: dict[Loc, Spot] = field(default_factory=dict)
    key_spots: dict[Loc, Spot] = field(default_factory=dict)
    sources: dict[Loc, tuple[str, ...]] = field(default_factory=dict)
    texts: dict[Loc, str] = field(default_factory=dict)
    """What stands in the file, for messages about values that were read as numbers."""
    problems: list[Problem] = field(default_factory=list)

    def spot(self, loc: Loc) -> Spot:
        """Where a value stands; for one that is not there, where its mapping does."""
        while loc and loc not in self.spots:
            loc = loc[:-1]
        return self.spots.get(loc, Spot(1, 1))

    def key_spot(self, loc: Loc) -> Spot:
        """Where a key stands; for list items, where the item does."""
        return self.key_spots.get(loc, self.spot(loc))

    def at(self, loc: Loc) -> object:
        """The plain value at a path; KeyError or IndexError when there is none."""
        found: Any = self.data
        for part in loc:
            found = found[part]
        return found

    def report(self, loc: Loc, text: str, hint: str = "") -> None:
        """Note a problem with the value at a path."""
        self.problems.append(Problem(self.spot(loc), text, hint))

    def report_secret(self, loc: Loc, text: str, hint: str = "") -> None:
        """Note a problem with a value that must not be shown."""
        self.problems.append(Problem(self.spot(loc), text, hint, hides_line=True))

    def report_key(self, loc: Loc, text: str, hint: str = "") -> None:
        """Note a problem with the key at a path, or with all that stands under it."""
        self.problems.append(Problem(self.key_spot(loc), text, hint))


def read_values(root: Mapping, environment: AbstractMapping[str, str], base: Path) -> Values:
    """Turn a tree into plain data; `base` is what relative `${file:…}` names start from."""
    values = Values()
    values.data = _Walk(values, environment, base).value(root, ())
    return values


class _Walk:
    def __init__(self, values: Values, environment: AbstractMapping[str, str], base: Path) -> None:
        self._values = values
        self._environment = environment
        self._base = base

    def value(self, node: Node, loc: Loc) -> Any:  # noqa: ANN401 - plain data
        self._values.spots[loc] = node.spot
        if isinstance(node, Scalar):
            return self._scalar(node, loc)
        made: Any
        if isinstance(node, Listing):
            made = [self.value(item, (*loc, index)) for index, item in enumerate(node.items)]
        else:
            made = {}
            for key, (spot, item) in node.entries.items():
                self._values.key_spots[(*loc, key)] = spot
                made[key] = self.value(item, (*loc, key))
        if _FLAGS in loc[-2:-1]:
            return json.dumps(made, separators=(",", ":"))
        return made

    def _scalar(self, node: Scalar, loc: Loc) -> object:
        self._values.texts[loc] = node.text
        value = node.value()
        if isinstance(value, str):
            return self._text(value, loc)
        parent = loc[-2] if len(loc) > 1 else None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (parent == _FLAGS or (parent in _FREE_TEXT and isinstance(value, int))):
            return node.text
        return value

    def _text(self, text: str, loc: Loc) -> str:
        keep_secrets = loc[:1] == ("api_keys",) or loc[-2:-1] == ("env",)
        try:
            resolved = interpolate(text, self._environment, self._base, keep_secrets=keep_secrets)
        except UnresolvedError as error:
            self._values.report(loc, str(error), error.hint)
            return text
        if resolved.sources:
            self._values.sources[loc] = resolved.sources
        return resolved.text
