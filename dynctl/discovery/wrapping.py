"""Puts lines of a matrix together that a terminal, a mailer or a page wrapped.

A terminal cuts at one width, in the middle of a word as well; an editor breaks between words and drops the space there.
Which of the two it was is seen by spaces around the breaks, and by words that are none.
Not here: what a line of a matrix says (`matrix`, `header`).
Pure.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynctl.discovery.header import LINK, P2P, header_of, is_header_piece, row_label

_CELL = re.compile(rf"X|{LINK}|{P2P}")
_RUN = re.compile(rf"(?:X|{LINK})+|(?:X|{P2P})+")
_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_MAX_PIECES = 12


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A line with the lines it goes on with."""

    number: int
    pieces: tuple[str, ...]


def unwrap(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Join wrapped headers and rows; every line keeps the number it began on."""
    found = list(_wrapped(lines))
    rest = [piece for line in found for piece in line.pieces[1:]]
    indent = min((len(piece) - len(piece.lstrip()) for piece in rest), default=0)
    width = _width(found, indent)
    return [(line.number, _joined(line.pieces, width, indent)) for line in found]


def _wrapped(lines: Sequence[str]) -> Iterator[_Wrapped]:
    """Each line that begins a header or a row with those that go on with it; other lines alone."""
    columns: Sequence[str] = ()
    num_tails = 0
    at = 0
    while at < len(lines):
        end = at + 1
        label = row_label(lines[at], columns)
        if label is not None:
            while end - at < _MAX_PIECES and _row_goes_on(lines, at, end, columns, num_tails):
                end += 1
        elif header_of(lines[at]) is not None:
            while end < len(lines) and end - at < _MAX_PIECES and is_header_piece(lines[end]):
                end += 1
            header = header_of(" ".join(lines[at:end]))
            columns, num_tails = (header.columns, len(header.tail_names)) if header else ((), 0)
        yield _Wrapped(at + 1, tuple(lines[at:end]))
        at = end


def _row_goes_on(
    lines: Sequence[str], at: int, end: int, columns: Sequence[str], num_tails: int
) -> bool:
    """Whether the next line has no label and holds nothing but cells and affinities, which the row still lacks."""
    if end >= len(lines) or not lines[end].strip() or row_label(lines[end], columns):
        return False
    if not _is_only_cells(lines[end]):
        return False
    words = " ".join(lines[at:end]).split()[1:]
    num_cells = sum(len(_CELL.findall(word)) for word in words if _RUN.fullmatch(word))
    num_others = sum(1 for word in words if not _RUN.fullmatch(word))
    is_gpu = lines[at].split()[0].startswith("GPU")
    is_cut = bool(words) and words[-1][-1] in ",-"
    return not columns or num_cells < len(columns) or (is_gpu and num_others < num_tails) or is_cut


def _is_only_cells(text: str) -> bool:
    """Whether every word is made of cells, numbers and cut ends of cells, which a wrapped row goes on with."""
    words = text.split()
    return all(_is_of_cells(word) for word in words) and any(
        re.search(rf"X|{LINK}|{P2P}|\d", word) or word == "N/A" for word in words
    )


def _is_of_cells(word: str) -> bool:
    if not re.fullmatch(r"[A-Z0-9,/-]{1,4000}", word):
        return False
    return not re.search(r"[A-Z]{4}", re.sub(rf"X|{LINK}|{P2P}|N/A", " ", word))


def _width(found: Sequence[_Wrapped], indent: int) -> int | None:
    """The width of the terminal that cut the lines; None when they were broken between words."""
    cuts = [(a, b[indent:]) for line in found for a, b in pairwise(line.pieces)]
    width = max((len(piece) for piece, _ in cuts), default=0)
    for last, following in cuts:
        has_space = last[-1:].isspace() or following[:1].isspace()
        if len(last) == width and (has_space or _is_cut(last, following)):
            return width
    return None


def _joined(pieces: Sequence[str], width: int | None, indent: int) -> str:
    text = pieces[0]
    for last, piece in pairwise(pieces):
        following = piece[indent:]
        is_apart = text[-1:].isspace() or following[:1].isspace()
        is_cut = _is_cut(last, following) if width is None else len(last) == width
        text += following if is_apart or is_cut else " " + following.lstrip()
    return text


def _is_cut(text: str, following: str) -> bool:
    """Whether a cell, a label or a list stands on both sides of a break: only together they are one."""
    if text[-1:].isspace() or following[:1].isspace() or not text.strip() or not following.strip():
        return False
    last, first = text.rsplit(maxsplit=1)[-1], following.split(maxsplit=1)[0]
    glued = last + first
    is_cut_cell = _RUN.fullmatch(glued) is not None and _RUN.fullmatch(last) is None
    is_cut_count = re.fullmatch(r"NV\d", last) is not None and re.fullmatch(r"\d", first)
    is_cut_list = (last[-1] in ",-" or first[0] in ",-") and _LIST.fullmatch(glued)
    is_cut_label = glued in {"Affinity", "NUMA", "CPU", "ID"} or (
        re.fullmatch(r"(?:NIC|GPU|mlx\d_)\d{1,3}", glued) is not None and first.isdecimal()
    )
    return bool(is_cut_cell or is_cut_count or is_cut_list or is_cut_label)
