"""Undoes what copying does to a tool's output: encodings, colours, markup, log prefixes, line numbers, indentation.

Only what surrounds a capture is taken away; cells that were lost inside of it are for the parsers to miss.
Not here: what any tool prints (`probes/`), matrices (`matrix`).
Pure.
"""

import codecs
import html
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))  # fmt: skip
_ESCAPE = r"(?:\x1b|\^\[|\\u001[bB]|\\x1[bB]|\\033|\\e|\u2190|\u241b|\ufffd)"
_STYLE = re.compile(
    rf"{_ESCAPE}\[[0-9;?]{{0,20}}[A-Za-z]|\x1b\][^\x07\x1b\n]{{0,200}}(?:\x07|\x1b\\)|\x1b[()][0-9A-B]"
    r"|\[\d{0,2}(?:;\d{1,3}){0,4}m|\[K(?=\s|\Z)"
)
"""Escape sequences, also as `^[`, `\\033` and the like, and what is left of them where the escape itself was lost."""
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_NOTHING = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad\x00]")
_BREAKS = re.compile(r"\r+\n|\r+|\x0b|\x0c|\u2028|\u2029")
_FENCE = re.compile(r"(?m)^[ \t>]*(?:```|~~~)[\w -]{0,20}$\n?")
_LINE_TAGS = re.compile(r"<br\s*/?>|</(?:tr|p|div|li)>", re.IGNORECASE)
_CELL_TAGS = re.compile(r"</t[dh]>\s*(?=<t[dh])", re.IGNORECASE)
_TAGS = re.compile(
    r"</?(?:pre|code|samp|span|div|p|b|i|u|em|strong|font|details|summary|table|tbody|thead|tr|td|th)(?:\s[^<>\n]{0,200})?>",
    re.IGNORECASE,
)
_IS_XML = re.compile(r"<nvidia_smi_log>|<gpu id=")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\", "/": "/"}
_LITERAL = re.compile(r"[^\"']{0,60}[\"'](.*?)(?:\\n)?[\"'][\s;,+)]*")
"""What is around a text in the source of a program."""
_MESSAGE_KEYS = ("log", "message", "msg", "stdout", "output", "text", "line")

_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_LOG_PIECES = tuple(
    re.compile(piece)
    for piece in (
        r"[ \t]*(?:>[ \t]?){1,4}",
        r"[ \t]*(?:#|//|\u2502)(?: |$|(?=[\tA-Z]))",
        rf"\[?\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?:\]|:|\b)[ \t]?",
        rf"\[?(?:\d\d[-/]\d\d[ ])?{_CLOCK}\]?(?!\S)[ ]?",
        rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK}(?: |$)",
        rf"[IWEF]\d{{4}} {_CLOCK} +\d+ \S+:\d+\](?: |$)",
        r"(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR)\b:?(?: |$)",
        r"(?:stdout|stderr) [FP](?: |$)",
        r"\[\d+,\d+\]<std(?:out|err)>:",
        r"\([^()\n]{1,80}\)(?: |$)",
        r"\[ *\d{1,9}(?:\.\d{1,9})?\](?: |$)",
    )
)
"""What stands before each line of a quotation, a comment or a log."""
_TAGGED = re.compile(
    r"(?:\[[^\[\]\n]{1,80}\]|[A-Za-z0-9][\w.@/-]{0,60}(?: [\w.@/-]{1,40})?(?:\[\d+\])?[ \t]*[:|])(?: |$|(?=\t))"
)
"""The same name before every line: a host, a container, a program with its pid."""
_NUMBERED = re.compile(
    r"[ \t]*(\d{1,6})(?![:.][0-9a-f]{2}[:.][0-9a-f])(?:[:.)|\u2192]?[ \t]|[:.)|\u2192]|$)"
)
"""A number and its mark; the address of a PCI device is none."""
_OF_TOOLS = re.compile(r"GPU|NIC|mlx|Link|NUMA|CA '|[Pp]ort|hca_id|link")
"""A name that tools begin their own lines with is no prefix."""
_MOST = 0.8
"""A prefix stands before nearly every line; titles and prompts may be without."""
_MIN_LINES = 3


def mend(content: bytes) -> str:
    """Give the text of a capture as the tool printed it, as far as that can be told."""
    text = _plain(_decoded(content))
    text = _plain(_unquoted(text))
    text = _without_markup(text)
    lines = [line.rstrip(" \t") if not line.strip() else line for line in text.split("\n")]
    return "\n".join(_dedented(_without_prefixes(lines)))


def unstyled(line: str) -> str:
    """Take escape sequences, and what is left of them, out of a text; odd spaces become ordinary ones."""
    return _NOTHING.sub("", _SPACES.sub(" ", _STYLE.sub("", line)))


def _decoded(content: bytes) -> str:
    for bom, encoding in _BOMS:
        if content.startswith(bom):
            return content[len(bom) :].decode(encoding, "replace")
    return content.decode("utf-8", "replace")


def _plain(text: str) -> str:
    return unstyled(_BREAKS.sub("\n", text))


def _unquoted(text: str) -> str:
    """Take the text out of JSON documents, JSON log lines, and strings with their escapes still in them."""
    stripped = text.strip()
    if stripped[:1] in {"'", '"'} and stripped[-1:] == stripped[:1] and "\\n" in stripped:
        stripped = stripped[1:-1]
    if stripped[:1] in {"{", "["} and (strings := _strings_of_json(stripped)):
        return "\n".join(strings)
    lines = [line for line in stripped.split("\n") if line.strip()]
    if lines and all(line.lstrip()[:1] == "{" for line in lines):
        found = [_message(line) for line in lines]
        if all(message is not None for message in found):
            return "\n".join(str(message).rstrip("\n") for message in found)
    if stripped.count("\\n") > 2 * stripped.count("\n"):
        return re.sub(r"\\([ntr\"'\\/])", lambda match: _ESCAPED[match[1]], stripped)
    if stripped.count("\\t") > len(lines):
        literals = [_LITERAL.fullmatch(line) for line in lines]
        if sum(1 for found in literals if found) >= _MOST * len(lines):
            lines = [found[1] for found in literals if found]
        return "\n".join(line.replace("\\t", "\t") for line in lines)
    return text


def _strings_of_json(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [string for string in _leaves(value) if string.strip()]


def _leaves(value: object) -> Iterator[str]:
    """Every string of a JSON value, in order, without recursion."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += reversed(list(one.values()))
        elif isinstance(one, list):
            waiting += reversed(one)


def _message(line: str) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return next((value[key] for key in _MESSAGE_KEYS if isinstance(value.get(key), str)), None)


def _without_markup(text: str) -> str:
    """Drop fences of Markdown, tags and entities of HTML; XML of nvidia-smi stays as it is."""
    text = _FENCE.sub("", text)
    if _IS_XML.search(text):
        return _TAGS.sub("", text) if "<pre" in text or "<code" in text else text
    text = _TAGS.sub("", _LINE_TAGS.sub("\n", _CELL_TAGS.sub("\t", text)))
    return (
        _plain(html.unescape(text)) if re.search(r"&(?:nbsp|lt|gt|amp|#\d{1,5});", text) else text
    )


def _without_prefixes(lines: Sequence[str]) -> list[str]:
    """Take away, one after the other, the pieces that nearly every line begins with."""
    kept = list(lines)
    for _ in range(6):
        ends = _prefix_ends(kept)
        if ends is None:
            break
        kept = [line[end:] for line, end in zip(kept, ends, strict=True)]
    return kept


def _prefix_ends(lines: Sequence[str]) -> list[int] | None:
    """Where the first prefix of each line ends; None when there is none."""
    full = [line for line in lines if line.strip()]
    if not full:
        return None
    for finder in (_log_piece, _tag, _number, _bar):
        strip = finder(full)
        if strip is not None:
            return [strip(line) for line in lines]
    return None


Strip = Callable[[str], int]


def _log_piece(full: Sequence[str]) -> Strip | None:
    for piece in _LOG_PIECES:
        count = sum(1 for line in full if piece.match(line))
        if count >= max(1, _MOST * len(full)):
            return lambda line, piece=piece: _end(piece.match(line))  # type: ignore[misc]
    return None


def _end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _tag(full: Sequence[str]) -> Strip | None:
    found = [match[0] for line in full if (match := _TAGGED.match(line))]
    names = Counter(re.sub(r"\d{3,}", "#", name).rstrip() for name in found)
    if not names:
        return None
    name, count = names.most_common(1)[0]
    if count < max(_MIN_LINES, _MOST * len(full)) or _OF_TOOLS.search(name):
        return None

    def strip(line: str) -> int:
        match = _TAGGED.match(line)
        is_it = match is not None and re.sub(r"\d{3,}", "#", match[0]).rstrip() == name
        return _end(match) if is_it else 0

    return strip


def _number(full: Sequence[str]) -> Strip | None:
    """Line numbers grow by one, or by more where blank lines were dropped."""
    numbers = [int(match[1]) for line in full if (match := _NUMBERED.match(line))]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    if len(numbers) < max(_MIN_LINES, _MOST * len(full)):
        return None
    if not steps or sum(1 for step in steps if 1 <= step <= 3) < _MOST * len(steps):
        return None
    return lambda line: _end(_NUMBERED.match(line))


def _bar(full: Sequence[str]) -> Strip | None:
    """A bar or a plus before each line; tables of nvidia-smi begin with both in turn, and end with one as well."""
    for mark in "|+":
        marked = [line for line in full if line.startswith(mark)]
        closed = [line for line in marked if line.rstrip().endswith(mark) and len(line) > 1]
        if len(marked) == len(full) >= _MIN_LINES and len(closed) < len(marked) / 2:
            return lambda line, mark=mark: _end(re.match(rf"{re.escape(mark)} ?", line))  # type: ignore[misc]
    return None


def _dedented(lines: Sequence[str]) -> list[str]:
    """Take away the indentation that all lines share."""
    common: str | None = None
    for line in lines:
        if line.strip():
            indent = line[: len(line) - len(line.lstrip(" \t"))]
            if common is None:
                common = indent
            while not indent.startswith(common):
                common = common[:-1]
    width = len(common or "")
    return [line[width:] if line.strip() else "" for line in lines]
