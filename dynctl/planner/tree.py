"""Strict reading of a positioned YAML tree: wrong kinds, unknown and missing keys become problems with their spot.

Not here: what the keys mean (`text`).
Pure.
"""

import math
from collections.abc import Sequence

from dynctl.inventory.document import Listing, Mapping, Node, Scalar
from dynctl.inventory.problems import Problem, Spot, shown, suggest


class Reader:
    """Collects problems while values are read; wrong values are replaced so that reading goes on."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def mapping(self, node: object, required: str, optional: str = "") -> "Keys":
        """Open a mapping with these keys, blank-separated; None reads as one without any."""
        needs, may = required.split(), optional.split()
        if node is None and not needs:
            return Keys(self, Mapping(Spot(1, 1)))
        if not isinstance(node, Mapping):
            spot = node.spot if isinstance(node, Scalar | Listing) else Spot(1, 1)
            self.problems.append(Problem(spot, f"keys and values belong here: {', '.join(needs)}"))
            return Keys(self, Mapping(spot))
        for key, (spot, _) in node.entries.items():
            if key not in needs and key not in may:
                self.problems.append(
                    Problem(spot, f"the key {shown(key)} is unknown", suggest(key, needs + may))
                )
        for key in needs:
            if key not in node.entries:
                self.problems.append(Problem(node.spot, f"the key {key!r} is missing"))
        return Keys(self, node)


class Keys:
    """One mapping being read."""

    def __init__(self, reader: Reader, mapping: Mapping) -> None:
        self._reader = reader
        self._mapping = mapping

    def node(self, key: str) -> Node | None:
        """What stands under a key; None when it is absent."""
        entry = self._mapping.entries.get(key)
        return None if entry is None else entry[1]

    def say(self, key: str, text: str, hint: str = "") -> None:
        """Note a problem with the value of a key."""
        node = self.node(key)
        self._reader.problems.append(Problem(node.spot if node else self._mapping.spot, text, hint))

    def _value(self, key: str) -> object:
        node = self.node(key)
        return node.value() if isinstance(node, Scalar) else node

    def text(self, key: str, default: str = "") -> str:
        """A text."""
        if self.node(key) is None:
            return default
        value = self._value(key)
        if isinstance(value, str):
            return value
        self.say(key, f"{key} has to be text", "put it in quotes" if value is not None else "")
        return default

    def one_of(self, key: str, known: Sequence[str]) -> str:
        """A text out of a few."""
        value = self.text(key, known[0])
        if value in known:
            return value
        self.say(key, f"{key} {shown(value)} is unknown", suggest(value, known))
        return known[0]

    def integer(
        self, key: str, low: int = -(2**62), high: int = 2**62, default: int | None = None
    ) -> int:
        """A whole number within bounds."""
        if self.node(key) is None:
            return max(low, 1) if default is None else default
        value = self._value(key)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        bounds = f" from {low} to {high}" if high < 2**62 else ""
        self.say(key, f"{key} has to be a whole number{bounds}")
        return max(low, 1)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._value(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        if self.node(key) is not None:
            self.say(key, f"{key} has to be a number")
        return 0.0

    def items(self, key: str) -> list[Node]:
        """The items of a list; none when the key is absent."""
        node = self.node(key)
        if node is None:
            return []
        if isinstance(node, Listing):
            return node.items
        self.say(key, f"{key} has to be a list")
        return []

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        found = []
        for item in self.items(key):
            value = item.value() if isinstance(item, Scalar) else None
            if isinstance(value, str):
                found.append(value)
            else:
                self._reader.problems.append(Problem(item.spot, f"{key} has to be a list of texts"))
        return found
