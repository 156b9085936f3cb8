"""YAML text to a tree that knows where everything stands. Not here: what the keys mean.

Only what an inventory needs: plain data, YAML 1.2 scalars, bounded anchors. What YAML 1.1 and 1.2 read differently is
refused with an explanation, so that no reader and no tool gets another value than the one that was meant.
Pure: yaml reads text only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from dynctl.core.text import clean
from dynctl.inventory.problems import Problem, Spot, shown

MAX_BYTES = 1024**2
MAX_ALIASES = 1000
MAX_NODES = 200_000
MAX_DEPTH = 32

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq")
}

# Source: YAML 1.2.2, section 10.3.2 (core schema), and YAML 1.1 types bool, int, float.
_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(0|[1-9][0-9]*)$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_WORD_BOOL = re.compile(r"^(yes|no|on|off)$", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+(\.[0-9]*)?$")
_BASE_60 = re.compile(r"^[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_UNDERSCORE = re.compile(r"^[-+]?[0-9][0-9]*_[0-9_]*(\.[0-9_]*)?$")
_NOT_FINITE = re.compile(r"^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


@dataclass(slots=True)
class Scalar:
    """One value; `text` is what stands in the file, without quotes."""

    spot: Spot
    text: str
    is_plain: bool

    def value(self) -> object:
        """The value by YAML 1.2's core schema."""
        if not self.is_plain:
            return self.text
        if _NULL.match(self.text):
            return None
        if _BOOL.match(self.text):
            return self.text.lower() == "true"
        if _INT.match(self.text) and len(self.text) < 40:
            return int(self.text, 0)
        return float(self.text) if _FLOAT.match(self.text) else self.text


@dataclass(slots=True)
class Listing:
    """A list."""

    spot: Spot
    items: list["Node"] = field(default_factory=list)


@dataclass(slots=True)
class Mapping:
    """Keys and values in file order; the key's own spot is kept."""

    spot: Spot
    entries: dict[str, tuple[Spot, "Node"]] = field(default_factory=dict)


Node = Scalar | Listing | Mapping


def parse(source: str) -> tuple[Mapping, list[Problem]]:
    """Read a whole document; a tree comes back also when there are problems."""
    reader = _Reader()
    try:
        reader.events = yaml.parse(source, Loader=_LOADER)
        root = reader.document()
    except yaml.MarkedYAMLError as error:
        reader.problems.append(_syntax(error, source))
        return Mapping(Spot(1, 1)), reader.problems
    except yaml.reader.ReaderError as error:
        reader.problems.append(_character(error, source))
        return Mapping(Spot(1, 1)), reader.problems
    except _TooMuchError as error:
        reader.problems.append(error.problem)
        return Mapping(Spot(1, 1)), reader.problems
    if not isinstance(root, Mapping):
        text = "the file has to be keys and values"
        reader.problems.append(Problem(root.spot, text))
        return Mapping(Spot(1, 1)), reader.problems
    return root, reader.problems


class _TooMuchError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class _Reader:
    """Turns parser events into nodes; aliases stand for the node itself, counted as often as they are used."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.events: Iterator[yaml.Event] = iter(())
        self._anchors: dict[str, Node] = {}
        self._sizes: dict[int, int] = {}
        self._num_aliases = 0
        self._num_nodes = 0

    def document(self) -> Node:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    spot = _spot(event)
                    self.problems.append(Problem(spot, "a second document starts here", "keep one"))
                    break
                root = self._node(next(self.events), 0)
        return root if root is not None else Mapping(Spot(1, 1))

    def _node(self, event: yaml.Event, depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        self._count(1, event)
        if depth > MAX_DEPTH:
            raise _TooMuchError(Problem(_spot(event), f"nested deeper than {MAX_DEPTH} levels"))
        before = self._num_nodes
        node: Node
        self._check_tag(event)
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Listing(_spot(event))
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                node.items.append(self._node(item, depth + 1))
        else:
            node = self._mapping(event, depth)
        if anchor := getattr(event, "anchor", None):
            # Known only once complete, so that no node can contain itself.
            self._anchors[anchor] = node
            self._sizes[id(node)] = self._num_nodes - before + 1
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        self._num_aliases += 1
        if self._num_aliases > MAX_ALIASES:
            raise _TooMuchError(Problem(_spot(event), f"more than {MAX_ALIASES} aliases"))
        if event.anchor not in self._anchors:
            text = f"there is no anchor &{clean(str(event.anchor))} before this"
            self.problems.append(Problem(_spot(event), text))
            return Scalar(_spot(event), "", is_plain=True)
        node = self._anchors[str(event.anchor)]
        self._count(self._sizes[id(node)], event)
        return node

    def _count(self, num_nodes: int, event: yaml.Event) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            text = f"more than {MAX_NODES} values, aliases counted as what they stand for"
            raise _TooMuchError(Problem(_spot(event), text))

    def _check_tag(self, event: yaml.Event) -> None:
        tag = getattr(event, "tag", None)
        if tag and tag != "!" and tag not in _TAGS:
            text = f"the tag {shown(tag)} is not allowed"
            self.problems.append(
                Problem(_spot(event), text, "an inventory is plain data; leave it out")
            )

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        is_plain = event.style in (None, "") and not event.tag
        scalar = Scalar(_spot(event), event.value, is_plain)
        if is_plain and (trap := _trap(event.value)):
            self.problems.append(Problem(scalar.spot, *trap))
            scalar.is_plain = False  # said once; taken as text from here on
        return scalar

    def _mapping(self, event: yaml.Event, depth: int) -> Mapping:
        node = Mapping(_spot(event))
        merged: list[Node] = []
        while not isinstance(start := next(self.events), yaml.MappingEndEvent):
            key = self._node(start, depth + 1)
            value = self._node(next(self.events), depth + 1)
            if not isinstance(key, Scalar) or not isinstance(key.value(), str):
                text = "a key has to be text"
                hint = f'write "{clean(key.text)}" in quotes' if isinstance(key, Scalar) else ""
                self.problems.append(Problem(key.spot, text, hint))
            elif key.text == "<<" and key.is_plain:
                merged += value.items if isinstance(value, Listing) else [value]
            elif key.text in node.entries:
                first = node.entries[key.text][0].line
                text = f"the key {shown(key.text)} is here twice; it stands on line {first} already"
                self.problems.append(Problem(key.spot, text, "keep one of them"))
            else:
                node.entries[key.text] = (key.spot, value)
        for source in merged:
            if isinstance(source, Mapping):
                node.entries = {**source.entries, **node.entries}
            else:
                self.problems.append(Problem(source.spot, "only a mapping can be merged by <<"))
        return node


def _trap(text: str) -> tuple[str, str] | None:
    """Say why a plain scalar is ambiguous, and how to write it."""
    if _WORD_BOOL.match(text):
        value = "true" if text.lower() in ("yes", "on") else "false"
        return (
            f"{text} is {value} for YAML 1.1 and text for YAML 1.2",
            f'write {value}, or "{text}" in quotes for the text',
        )
    if _LEADING_ZERO.match(text):
        return (
            f"{text} starts with 0: YAML 1.1 reads it as octal, 1.2 as decimal",
            f'write {text.lstrip("+-0_") or "0"}, or "{text}" in quotes for the text',
        )
    if _BASE_60.match(text):
        return (f"{text} is a number to the base 60 for YAML 1.1", f'write "{text}" in quotes')
    if _UNDERSCORE.match(text):
        plain = text.replace("_", "")
        return (
            f"{text} is a number for YAML 1.1 and text for YAML 1.2",
            f'write {plain}, or "{text}" in quotes for the text',
        )
    if _NOT_FINITE.match(text):
        return (f"{text} is no number anything here can use", "leave the key out for no limit")
    return None


def _spot(event: yaml.Event) -> Spot:
    start, end = event.start_mark, event.end_mark
    if start is None or end is None:
        return Spot(1, 1)
    width = end.column - start.column if end.line == start.line else 1
    return Spot(start.line + 1, start.column + 1, max(1, width))


_SYNTAX_HINTS = (
    (
        "mapping values are not allowed",
        "put text that holds ': ' in quotes, and check the indentation",
    ),
    ("expected key", "this line is indented differently from the ones it belongs to"),
    ("block end", "this line is indented differently from the ones it belongs to"),
    (
        "expected ',' or ']'",
        'a list opened by [ is not closed, or holds a range without quotes: write ["gpu-[01-04]"]',
    ),
    ("expected ',' or '}'", "a mapping opened by { is not closed"),
    ("unexpected end of stream", "a quote is not closed"),
)


def _syntax(error: yaml.MarkedYAMLError, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    spot = Spot(1, 1) if mark is None else Spot(mark.line + 1, mark.column + 1)
    lines = source.splitlines()
    line = lines[spot.line - 1] if spot.line <= len(lines) else ""
    if "\t" in line[: spot.column]:
        spot = Spot(spot.line, line.index("\t") + 1)
        return Problem(spot, "a tab is used for indentation", "indent with spaces")
    text = clean(error.problem or str(error))
    hint = next((hint for part, hint in _SYNTAX_HINTS if part in text), clean(error.context or ""))
    return Problem(spot, text, hint)


def _character(error: yaml.reader.ReaderError, source: str) -> Problem:
    position = error.position if isinstance(error.position, int) else 0
    before = source[:position]
    spot = Spot(before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)
    return Problem(spot, f"a character that YAML does not allow: {clean(str(error.reason))}")
