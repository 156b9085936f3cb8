"""The columns behind the cells of a matrix row: CPU affinity, NUMA affinity, NUMA node of the GPU's own memory.

Cells here look alike and may be empty, so that a value is taken only when its place is beyond doubt; else the whole
row's affinities are unknown.
Not here: the cells themselves (`matrix`).
Pure.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

NAMES = ("cpu", "numa", "gpu_numa")
UNSURE = (*NAMES, "")
"""Columns that no row has values for: all of them stay unknown."""
EMPTY = ""
"""A cell that is there and holds nothing: the CPU set has no core near the GPU."""
_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*\Z")
_SHAPES = {
    "cpu": re.compile(rf"(?:{_LIST.pattern}|N/A\Z|\Z)"),
    "numa": re.compile(rf"(?:{_LIST.pattern}|N/A\Z|\Z)"),
    "gpu_numa": re.compile(r"(?:\d{1,5}|N/A|)\Z"),
    "": re.compile(r"(?!)"),
}
_NEAR_CHARS = 1
"""Cells stand under their label, the mark of the diagonal one further right."""
_TAB_CHARS = 8
"""An empty cell is one tab wide."""

Tail = tuple[str | None, ...]


def whole_names(names: Sequence[str], tails: Sequence[str]) -> list[str]:
    """Name the columns of a header that was cut by its rows; rows with more values than it has names belong to another."""
    counts = Counter(map(len, _values(tails)))
    num_values = min(len(NAMES), counts.most_common(1)[0][0]) if counts else 0
    if tuple(names) == UNSURE:
        return [*NAMES] if num_values == len(NAMES) else [*UNSURE]
    return [*UNSURE] if names and num_values > len(names) else [*names]


def names_of(tails: Sequence[str]) -> list[str]:
    """Name the columns without a header, when every row has the same number of values and no other reading fits."""
    values = _values(tails)
    counts = {len(row) for row in values}
    is_even = len(values) > 1  # one row alone may be cut
    if is_even and counts == {2} and all(is_list(row[1]) for row in values):
        return [*NAMES[:2]]
    if is_even and counts == {1} and all(re.search("[-,]", row[0]) for row in values):
        return [*NAMES[:1]]
    return [*NAMES] if len(NAMES) in counts else [*UNSURE]


def _values(tails: Sequence[str]) -> list[list[str]]:
    """The values of rows that end in nothing else."""
    found = [_words(tail) for tail in tails]
    return [words for words in found if all(map(_SHAPES["numa"].match, words))]


def by_tabs(parts: Sequence[str], names: Sequence[str]) -> Tail:
    """Read what is behind the cells of a row whose tabs are whole. The tool prints two tabs before the last column."""
    cells = list(parts)
    while cells and not cells[-1]:
        cells.pop()
    count = len(names)
    if len(cells) == count + 1 and count > 1 and not cells[-2]:
        del cells[-2]
    elif len(cells) == count == 3 and not cells[1]:
        cells = _taken_apart([cells[0], cells[2]])  # two ran together: 0-31 and 0 to 0-310
    return _checked(cells, names)


def by_words(text: str, names: Sequence[str], *, is_late: bool) -> Tail:
    """Read words; `is_late`: the first one stands too far right to be of the first column, which is empty then."""
    words = _words(text)
    if any(_SHAPES["numa"].match(word) for word in words[len(names) :]):
        return _unknown(names)  # a list was cut in two
    words = words[: len(names)]
    if words and len(words) == len(names) - 1:
        words = [EMPTY, *words] if is_late else _taken_apart(words)
    return _checked(words, names)


def _words(text: str) -> list[str]:
    """The values of a text; `N/A` is seen where it ran into a number, and a list with spaces in it is one value."""
    return re.sub(r"(?<=\d)N/A", " N/A", re.sub(r",\s+(?=\d)", ",", text)).split()


def _taken_apart(words: Sequence[str]) -> list[str]:
    """CPUs and a node that ran together, when only one place leaves ranges that rise: `56-111,168-2231` before `N/A`."""
    if list(words[1:]) != ["N/A"] or len(pairs := _pairs(words[0])) != 1:
        return [*words]
    return [*pairs[0], "N/A"]


def _pairs(word: str) -> list[tuple[str, str]]:
    """Every way to read a word as a list of CPUs and a node behind it."""
    match = re.match(r"(.*?)(\d{1,5})-(\d{2,9})\Z", word)
    if match is None:
        return []
    before, first, digits = match.groups()
    return [
        (f"{before}{first}-{digits[:i]}", digits[i:])
        for i in range(1, len(digits))
        if int(digits[:i]) > int(first) and str(int(digits[i:])) == digits[i:]
    ]


def is_late(at: int, last_cell_at: int, tail_at: int, last_label_at: int) -> bool:
    """Whether a row's first word behind its cells stands under the second label, where cells stand under theirs."""
    is_aligned = abs(last_cell_at - last_label_at) <= _NEAR_CHARS and last_label_at >= 0
    return is_aligned and tail_at >= 0 and at == tail_at + _TAB_CHARS


def cut_ones(tails: Mapping[str, Tail]) -> set[str]:
    """Rows of which another has more: `0-19` at the end where there is `0-19,40-59` was cut, or may have been."""
    firsts = {tail[0] for tail in tails.values() if tail and tail[0]}
    lasts = {tail[-1] for tail in tails.values() if tail and tail[-1]}
    return {
        row
        for row, tail in tails.items()
        if tail
        and (
            any(_is_more(whole, tail[-1]) and whole.startswith(str(tail[-1])) for whole in lasts)
            or any(_is_more(whole, tail[0]) and whole.endswith(str(tail[0])) for whole in firsts)
        )
    }


def _is_more(whole: str, part: str | None) -> bool:
    return bool(part) and whole != part and re.search("[-,]", whole) is not None


def is_list(text: str) -> bool:
    """Whether a text is a list of CPUs or nodes: `0-23,48-71`."""
    return _LIST.match(text) is not None


def _checked(cells: Sequence[str], names: Sequence[str]) -> Tail:
    if len(cells) != len(names):
        return _unknown(names)
    if not all(_SHAPES[name].match(cell) for name, cell in zip(names, cells, strict=True)):
        return _unknown(names)
    if not all(_rises(cell) for cell in cells):
        return _unknown(names)
    return tuple(cells)


def _rises(cell: str) -> bool:
    """Whether every range of a list goes upwards; one that does not has lost digits."""
    return all(int(a) <= int(b) for a, b in re.findall(r"(\d+)-(\d+)", cell))


def _unknown(names: Sequence[str]) -> Tail:
    return (None,) * len(names)
