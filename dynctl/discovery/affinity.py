"""The columns behind the cells of a matrix row: CPU affinity, NUMA affinity, NUMA node of the GPU's own memory.

Cells here look alike and may be empty, so that a value is taken only when its place is beyond doubt; else the whole
row's affinities are unknown.
Not here: the cells themselves (`matrix`).
Pure.
"""

import re
from collections.abc import Sequence

EMPTY = ""
"""A cell that is there and holds nothing: the CPU set has no core near the GPU."""
_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*\Z")
_SHAPES = {
    "cpu": re.compile(rf"(?:{_LIST.pattern}|N/A\Z|\Z)"),
    "numa": re.compile(rf"(?:{_LIST.pattern}|N/A\Z|\Z)"),
    "gpu_numa": re.compile(r"(?:\d{1,5}|N/A|)\Z"),
}
_NEAR_CHARS = 1
"""Cells stand under their label, the mark of the diagonal one further right."""
_FAR_CHARS = 4

Tail = tuple[str | None, ...]


def by_tabs(parts: Sequence[str], names: Sequence[str]) -> Tail:
    """Read what is behind the cells of a row whose tabs are whole. The tool prints two tabs before the last column."""
    cells = list(parts)
    while cells and not cells[-1]:
        cells.pop()
    count = len(names)
    if len(cells) == count + 1 and count > 1 and not cells[-2]:
        del cells[-2]
    elif len(cells) == count == 3 and not cells[1]:
        return _unknown(names)  # two cells may have run together: 0-31 and 0 to 0-310
    return _checked(cells, names)


def by_words(text: str, names: Sequence[str], *, is_late: bool) -> Tail:
    """Read words; `is_late`: the first one stands too far right to be of the first column, which is empty then."""
    words = re.sub(r",\s+(?=\d)", ",", text).split()[: len(names)]
    is_short = is_late and len(words) == len(names) - 1
    return _checked([EMPTY, *words] if is_short else words, names)


def is_late(at: int, last_cell_at: int, tail_at: int, last_label_at: int) -> bool:
    """Whether a row's first word behind its cells stands well right of its label, where cells stand under theirs."""
    is_aligned = abs(last_cell_at - last_label_at) <= _NEAR_CHARS and last_label_at >= 0
    return is_aligned and tail_at >= 0 and at >= tail_at + _FAR_CHARS


def is_list(text: str) -> bool:
    """Whether a text is a list of CPUs or nodes: `0-23,48-71`."""
    return _LIST.match(text) is not None


def _checked(cells: Sequence[str], names: Sequence[str]) -> Tail:
    if len(cells) != len(names):
        return _unknown(names)
    if not all(_SHAPES[name].match(cell) for name, cell in zip(names, cells, strict=True)):
        return _unknown(names)
    return tuple(cells)


def _unknown(names: Sequence[str]) -> Tail:
    return (None,) * len(names)
