"""The header of a matrix and its legend: which devices its columns are, and the vocabulary of cells and labels.

Not here: rows (`matrix`).
Pure.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynctl.discovery.affinity import NAMES, UNSURE

LINK = r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC"
"""Cells of `topo -m`."""
P2P = r"OK|CNS|GNS|TNS|NS|DR|U"
"""Cells of `topo -p2p`."""
MAX_DEVICES = 160
_LABEL = r"GPU\d{1,3}|NIC\d{1,3}|(?:mlx\d|hfi1|bnxt_re|irdma|qedr|efa|rxe|siw|ib|roce|rdma)\w*"
_NUMBERED = re.compile(r"(?:GPU|NIC)\d{1,3}")
_BEFORE = r"(?:^|[\s#>:\]\"'])"
_CELLS = rf"(?:X|{LINK}|{P2P})(?:\s|X|{LINK}|{P2P}|\d|\Z)"
_ROW = re.compile(rf"{_BEFORE}((?:GPU|NIC)\d{{1,3}}(?=\s*{_CELLS})|(?:{_LABEL})(?=\s+{_CELLS}))")
_ANY_ROW = re.compile(rf"{_BEFORE}([A-Za-z][\w.:-]{{0,40}})(?=\s+{_CELLS})")
_TAIL_START = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA|\bCPU\b|\bNUMA\b")


@dataclass(slots=True)
class Header:
    """One header line."""

    columns: list[str]
    tail_names: list[str]
    tail_at: int
    """Column of the text where the first tail label starts; -1 when there is none."""
    last_at: int
    """Column of the text where the last device label starts."""


def row_label(line: str, columns: Sequence[str] = ()) -> re.Match[str] | None:
    """Find the label a line of cells begins with: one of the header's, else one that devices are known to have."""
    for match in _ANY_ROW.finditer(line):
        if match[1] in columns:
            return match
    return _ROW.search(line)


def header_of(line: str) -> Header | None:
    """Read a header; None when the line is none."""
    match = re.search(r"(?:^|[\s#>:\]])(GPU\d{1,3})(?=\s|GPU|NIC|CPU|\Z)", line)
    if match is None or row_label(line):
        return None
    text, start = line[match.start(1) :], match.start(1)
    tail = _TAIL_START.search(text)
    devices = text[: tail.start()] if tail else text
    columns = _labels(devices)
    if not columns or len(columns) > MAX_DEVICES:
        return None
    return Header(
        columns,
        _tail_names(text[tail.start() :]) if tail else [],
        start + tail.start() if tail else -1,
        start + devices.rstrip().rfind(columns[-1]),
    )


def is_header_piece(line: str) -> bool:
    """Whether a wrapped header may go on with a line: labels only, the first and the last perhaps cut."""
    words = line.split()
    if not words or words[0] == "GPU0" or row_label(line):
        return False
    known = re.compile(rf"(?:{_LABEL}|CPU|NUMA|Affinity|GPU|ID)\Z")
    unknown = [i for i, word in enumerate(words) if not known.match(word)]
    if len(unknown) == len(words):
        return len(words) == 1 and re.fullmatch(r"\w{1,8}", words[0]) is not None
    return all(i in {0, len(words) - 1} and re.fullmatch(r"\w{1,16}", words[i]) for i in unknown)


def _labels(text: str) -> list[str]:
    columns: list[str] = []
    for word in text.split():
        run = re.match(r"(?:(?:GPU|NIC)\d{1,3})+", word)
        if run:
            columns += re.findall(r"(?:GPU|NIC)\d{1,3}", run[0])
            rest = word[run.end() :]
            if rest.startswith(("CPU", "NUMA")):
                return columns  # an affinity label ran into the last device
            if rest:
                columns.append(rest)
        elif re.match(r"[A-Za-z][\w.:-]{1,40}\Z", word):
            columns.append(word)
        else:
            return columns
    return columns


_TAIL = re.compile(r"(CPU\s*Affinity)?\s*(NUMA\s*(?:Affinity)?)?\s*(GPU\s*NUMA\s*(?:ID)?)?\s*\W*\Z")


def _tail_names(text: str) -> list[str]:
    """Which of the three affinity columns a header names, in order; where their names are cut, it depends on the rows."""
    match = _TAIL.match(text)
    found = match.groups() if match else (None, None, None)
    names = [name for name, label in zip(NAMES, found, strict=True) if label]
    return names or [*UNSURE]


def mend_header(
    columns: Sequence[str],
    diagonal: Mapping[str, int],
    labels: Sequence[str],
    width: int,
    *,
    is_cut: bool,
) -> tuple[list[str], int]:
    """Complete a header that lost labels by those of the rows: the matrix is square.

    A header without its affinity columns was cut, perhaps in the middle of its last label. `width` is the number of
    cells of the longest row. Returns the columns and how many of them, from the left, are sure.
    """
    known = list(columns)
    # The last label of a cut header may itself be cut: GPU1 of GPU10, NI of NIC0, CP of CPU Affinity.
    is_doubtful = is_cut and known and known[-1] not in labels
    if is_doubtful and (not _NUMBERED.fullmatch(known[-1]) or known[-1] in known[:-1]):
        known = known[:-1]
    if set(labels) <= set(known) and width <= len(known):
        return known, len(known)
    mended, num_sure = columns_of_rows(
        [*known, *(x for x in labels if x not in known)], diagonal, width
    )
    if num_sure == len(mended):
        return mended, num_sure
    common = 0
    while common < min(len(known), len(mended)) and known[common] == mended[common]:
        common += 1
    return mended, max(0, common - 1) if is_cut else 0


def columns_of_rows(
    labels: Sequence[str], diagonal: Mapping[str, int], width: int
) -> tuple[list[str], int]:
    """Make columns from rows alone: a row's own cell, the diagonal mark, stands in its own column.

    Rows may be missing, in any order, or have lost cells. Returns the columns and how many of them, from the left,
    are sure.
    """
    known = [label for label in dict.fromkeys(labels) if label in diagonal]
    at = {diagonal[label]: label for label in known}
    if len(at) < len(known):
        return list(dict.fromkeys(labels)), 0
    columns = [at[place] for place in sorted(at)]
    columns += [label for label in dict.fromkeys(labels) if label not in diagonal]
    if filled := _filled(columns):
        # Numbered labels have one order; a mark elsewhere means that its row lost cells before it.
        num_right = 0
        while num_right < len(filled) and at.get(num_right, filled[num_right]) == filled[num_right]:
            num_right += 1
        num_gpus = sum(label.startswith("GPU") for label in filled)
        # With more cells than labels a GPU may be missing, and every NIC stands further right.
        return filled, num_right if len(filled) == width else min(num_right, num_gpus)
    if sorted(at) == list(range(len(columns))) and len(columns) == width:
        return columns, width
    num_sure = 0
    while at.get(num_sure) == f"GPU{num_sure}":
        num_sure += 1
    return columns, num_sure


def _filled(columns: Sequence[str]) -> list[str]:
    """Numbered labels without their gaps: GPU0 and GPU2 mean that there is a GPU1."""
    if not all(_NUMBERED.fullmatch(label) for label in columns):
        return []
    if max(int(label[3:]) for label in columns) >= MAX_DEVICES:
        return []
    return [
        f"{kind}{i}"
        for kind in ("GPU", "NIC")
        for i in range(1 + max((int(c[3:]) for c in columns if c[:3] == kind), default=-1))
    ]


def nic_legend(text: str) -> dict[str, str]:
    """Read `NIC0: mlx5_0` lines; a label with two names is left out, and so is a name of two labels: it was cut."""
    names: dict[str, set[str]] = {}
    for label, name in _legend_entries(text):
        names.setdefault(label, set()).add(name)
    single = {label: next(iter(found)) for label, found in names.items() if len(found) == 1}
    taken = Counter(single.values())
    return {label: name for label, name in single.items() if taken[name] == 1}


def _legend_entries(text: str) -> Iterator[tuple[str, str]]:
    """What stands alone behind a label and has a number, as devices do: a header that ran into a legend is no name."""
    for match in re.finditer(r"\b(NIC\d{1,3})[ \t]*:[ \t]*([A-Za-z][\w.-]{1,60})[ \t]*(?=\Z|\n|NIC\d{1,3}[ \t]*:)", text):  # fmt: skip
        if re.search(r"\d", match[2]) and not _NUMBERED.fullmatch(match[2]):
            yield match[1], match[2]
