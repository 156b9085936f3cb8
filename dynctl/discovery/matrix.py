"""Reads square matrices of labelled cells out of damaged text: `nvidia-smi topo -m` and `topo -p2p`.

What survives copying, wrapping and cutting is known by three things: the vocabulary of the legend, the labels that
rows begin with, and the `X` of the diagonal. A cell that these do not place is unknown, never guessed.
Not here: what a matrix means (`probes/nvidia_smi_topo`).
Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynctl.discovery import affinity
from dynctl.discovery.header import (
    LINK,
    MAX_DEVICES,
    P2P,
    Header,
    columns_of_rows,
    header_of,
    mend_header,
    row_label,
)
from dynctl.discovery.linkage import Square
from dynctl.discovery.mend import unstyled
from dynctl.discovery.wrapping import unwrap

_CELL = re.compile(rf"X|{LINK}|{P2P}")
_LINK_RUN = re.compile(rf"(?:X|{LINK})+")
_P2P_RUN = re.compile(rf"(?:X|{P2P})+")
_GPU = re.compile(r"GPU\d{1,3}")
_BARS = str.maketrans("\u2502\u2503\u2551", "|||")
_MAX_LINE_CHARS = 20_000
_MAX_LINES = 5_000
_MAX_NVLINKS = 36


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that begins with a label, its continuations joined."""

    number: int
    label: str
    text: str
    """What is behind the label."""
    start: int
    """Where that begins in the line."""


@dataclass(slots=True)
class Row:
    """One labelled line (or a line and its continuations): cells in column order, and what follows them."""

    label: str
    cells: list[str | None]
    tail: affinity.Tail = ()
    """CPU affinity, NUMA affinity, GPU NUMA id, as far as there are; None where it cannot be told."""
    is_whole: bool = False
    """Every cell was there and in its place: it may stand alone, others need a witness."""
    is_mended: bool = False
    """Cells that ran together were taken apart."""
    has_gaps: bool = False
    """A cell is empty: a tab lost elsewhere would have moved the others."""


@dataclass(slots=True)
class Matrix:
    """One block: a header and its rows."""

    columns: list[str]
    is_p2p: bool
    tail_names: list[str] = field(default_factory=list)
    is_cut: bool = False
    """The header ends before its affinity columns, as the tool never does."""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def clean_lines(text: str) -> list[str]:
    """Split a stream into lines without colour codes, quote marks and table borders."""
    lines = []
    for raw in text.split("\n", _MAX_LINES)[:_MAX_LINES]:
        line = unstyled(raw[:_MAX_LINE_CHARS]).translate(_BARS)
        if line.count("|") >= 3:
            line = re.sub(r"[ ]*\|[ ]*", "\t", line.strip().strip("|"))
        lines.append(re.sub(r"^[#>]+ ?", "", line))
    return lines


def read_matrices(text: str) -> list[Matrix]:
    """Find every matrix of a stream, in order; blocks without a header are read by their row labels."""
    found: list[Matrix] = []
    header: Header | None = None
    block: list[_Line] = []
    for number, line in unwrap(clean_lines(text)):
        new_header = header_of(line)
        if new_header is not None:
            found += _close(header, block)
            header, block = new_header, []
            continue
        match = row_label(line, header.columns if header else ())
        if match is not None and (header is None or not _is_foreign(match[1], header)):
            block.append(_Line(number, match[1], line[match.end(1) :], match.end(1)))
        elif block and line.strip() and _ends_block(line):
            # A blank line ends nothing: a wrapped block may hold some.
            found += _close(header, block)
            header, block = None, []
    return found + _close(header, block)


def _is_foreign(label: str, header: Header) -> bool:
    return label not in header.columns and not label.startswith(("GPU", "NIC"))


def _ends_block(line: str) -> bool:
    return bool(re.match(r"\s*(?:NIC )?Legend\s*:|\s*[-=]{5,}.*\w", line))


def _run(word: str) -> re.Match[str] | None:
    return _LINK_RUN.fullmatch(word) or _P2P_RUN.fullmatch(word)


def _close(header: Header | None, block: Sequence[_Line]) -> list[Matrix]:
    """Make the matrix of one block of rows."""
    # A lost header lets the rows of a second matrix follow those of the first: their vocabulary tells them apart.
    peers = [row for row in block if _is_of_peers(row.text)]
    if peers and len(peers) < len(block):
        return _close(header, [row for row in block if row not in peers]) + _close(None, peers)
    if not block:
        return []
    is_p2p = bool(peers)
    labels = list(dict.fromkeys(row.label for row in block))
    rows = [(row.label, *_split_cells(row.text, 2 * MAX_DEVICES)) for row in block]
    width = max(len(cells) for _, cells, _ in rows)
    diagonal = {label: cells.index("X") for label, cells, _ in rows if cells.count("X") == 1}
    tails = [tail for label, _, tail in rows if label.startswith("GPU")]
    if header is not None:
        columns, num_sure = mend_header(
            header.columns, diagonal, labels, width, is_cut=not header.tail_names and not is_p2p
        )
        tail_names = affinity.whole_names(header.tail_names, tails)
    else:
        columns, num_sure = columns_of_rows(labels, diagonal, width)
        tail_names = affinity.names_of(tails)
    matrix = Matrix(columns, is_p2p, tail_names, not tail_names and not is_p2p)
    if matrix.is_cut:
        matrix.notes.append("there are no affinities: cut on the right, where NICs may be missing")
    if header is None:
        matrix.notes.append("the header is missing; columns were taken from the row labels")
    if len(set(columns)) != len(columns):
        matrix.notes.append("the header names a device twice")
        return [matrix]
    for each in block:
        if each.label not in columns:
            matrix.notes.append(f"line {each.number}: row {each.label} is not in the header")
            continue
        row = _read_row(each, matrix, header)
        row.cells[num_sure:] = [None] * (len(columns) - num_sure)
        row.is_whole = row.is_whole and num_sure == len(columns)
        matrix.rows.append(row)
    if lost := [row.label for row in matrix.rows if row.tail and set(row.tail) == {None} and row.label.startswith("GPU")]:  # fmt: skip
        matrix.notes.append(f"the affinities of {', '.join(lost[:8])} are cut or out of place")
    if num_sure < len(columns):
        matrix.notes.append("the header is cut: which device a column is cannot be told for all")
    if mended := [row.label for row in matrix.rows if row.is_mended]:
        matrix.notes.append(
            f"cells ran together in {len(mended)} rows ({mended[0]} …): taken apart"
            if len(mended) > 1
            else f"cells ran together in row {mended[0]}: taken apart"
        )
    return [matrix]


def _is_of_peers(text: str) -> bool:
    """Whether a row is of `topo -p2p`; one that holds nothing but its diagonal may be of either."""
    return not re.search(LINK, text) and re.search(rf"\b(?:{P2P})\b", text) is not None


def _read_row(line: _Line, matrix: Matrix, header: Header | None) -> Row:
    """Place the cells of one row: by its tabs when they hold, else by the diagonal."""
    count, own = len(matrix.columns), matrix.columns.index(line.label)
    if "\t" in line.text:
        row = _by_tabs(line, count, own, matrix)
        if row is not None:
            return row
    words, tail = _split_cells(line.text, MAX_DEVICES)
    if words and words[-1] is None and tail[:1].isdecimal():
        tail = (
            "?" + tail
        )  # `NV424-47`: where the count of links ends is not known, nor where the list begins
    is_mended = any(len(_CELL.findall(word)) > 1 for word in line.text.split() if _run(word))
    cells: list[str | None] = [None] * count
    where = [i for i, word in enumerate(words) if word == "X"]
    if len(where) != 1:
        matrix.notes.append(f"line {line.number}: row {line.label} has {len(where)} diagonal marks")
    else:
        before, after = words[: where[0]], words[where[0] + 1 :]
        cells[own] = "X"
        if len(before) == own:
            cells[:own] = before
        if len(after) == count - own - 1:
            cells[own + 1 :] = after
            if _may_be_cut(line.label, after[-1] if after else None, bool(tail), matrix):
                cells[-1] = None
        if None in cells:
            matrix.notes.append(
                f"line {line.number}: row {line.label} has {len(words)} cells for {count} columns"
            )
    is_whole = None not in cells and _has_its_tail(line.label, tail, matrix)
    return Row(
        line.label,
        cells,
        affinity.by_words(tail, matrix.tail_names, is_late=_is_late(line, tail, header)),
        is_whole,
        is_mended and None not in cells,
    )


def _is_late(line: _Line, tail: str, header: Header | None) -> bool:
    if header is None:
        return False
    cells = line.text[: len(line.text) - len(tail)].rstrip()
    last_cell_at = line.start + max(cells.rfind(" "), cells.rfind("\t")) + 1
    at = line.start + len(line.text) - len(tail.lstrip())
    return affinity.is_late(at, last_cell_at, header.tail_at, header.last_at)


def _has_its_tail(label: str, tail: str, matrix: Matrix) -> bool:
    """A GPU row ends in its affinities; without them the row may be cut, and what stands there shifted."""
    return not label.startswith("GPU") or not matrix.tail_names or bool(tail.strip())


def _by_tabs(line: _Line, count: int, own: int, matrix: Matrix) -> Row | None:
    """Read a row whose tabs are whole; None when cells were glued, lost or doubled."""
    parts = [part.strip() for part in line.text.split("\t")[1:]]
    cells, tail = parts[:count], parts[count:]
    is_whole = len(cells) == count and "" not in cells
    has_gaps = "" in cells
    if len(cells) <= own or cells[own] != "X" or _run("".join(tail[:1])):
        return None
    if not all(_CELL.fullmatch(cell) for cell in cells if cell):
        return None
    if "X" in cells[:own] + cells[own + 1 :]:
        return None
    if len(cells) < count:
        # The last cell of a cut row may itself be cut: NV1 of NV18.
        cells = [*cells[:-1], *[""] * (count - len(cells) + 1)] if own < len(cells) - 1 else cells
        cells += [""] * (count - len(cells))
        matrix.notes.append(f"line {line.number}: row {line.label} is cut")
    elif "" in cells:
        matrix.notes.append(f"line {line.number}: row {line.label} has an empty cell")
    elif _may_be_cut(line.label, cells[-1], bool(tail), matrix):
        cells[-1] = ""
    is_whole = is_whole and "" not in cells and _has_its_tail(line.label, "".join(tail), matrix)
    return Row(
        line.label,
        [cell or None for cell in cells],
        affinity.by_tabs(tail, matrix.tail_names),
        is_whole,
        has_gaps=has_gaps,
    )


def _may_be_cut(label: str, last: str | None, has_tail: bool, matrix: Matrix) -> bool:
    """A GPU row that ends in its last cell, without its affinities, may end in the middle of it: NV1 of NV18."""
    is_gpu = label.startswith("GPU") and bool(matrix.tail_names) and not has_tail
    return is_gpu and bool(last) and str(last).startswith("NV")


def _split_cells(text: str, count: int) -> tuple[list[str | None], str]:
    """Take up to `count` cells from the left, also out of words that ran together; return them and the rest."""
    words: list[str | None] = []
    end = 0
    for match in re.finditer(r"\S+", text):
        if len(words) >= count:
            break
        run = re.match(rf"(?:X|{LINK}|{P2P})+", match[0])
        if run is None:
            break
        words += _CELL.findall(run[0])
        end = match.start() + run.end()
        if run.end() < len(match[0]):
            # `NV40-23` is NV4 and 0-23, or NV40 and a rest: where the digits part cannot be told.
            words[-1] = None if str(words[-1]).startswith("NV") else words[-1]
            break
    return [None if word and _is_no_count(word) else word for word in words], text[end:]


def _is_no_count(word: str) -> bool:
    """No GPU has that many NVLinks: a digit of the next column ran into the cell."""
    return word.startswith("NV") and int(word[2:]) > _MAX_NVLINKS


def merge(matrix: Matrix, notes: list[str]) -> dict[tuple[str, str], str]:
    """Fold a matrix over its diagonal: each pair is told by two rows, its own and its mirror's.

    1. Both say the same: told. 2. They differ and one row is whole: that one is right, the other has shifted.
    3. They differ otherwise: unknown, and neither row is believed alone any more. 4. Only one says anything:
    believed while its row has no gaps and has not been seen to shift.
    """
    claims: dict[tuple[str, str], dict[str, set[str]]] = {}
    whole = _whole_rows(matrix)
    for row in matrix.rows:
        for column, cell in zip(matrix.columns, row.cells, strict=True):
            if cell is not None and column != row.label:
                a, b = sorted((row.label, column))
                claims.setdefault((a, b), {}).setdefault(row.label, set()).add(cell)
    folded, shifted = {}, {row.label for row in matrix.rows if row.has_gaps}
    for pair, said in sorted(claims.items()):
        values = set().union(*said.values())
        trusted = set().union(*(cells for label, cells in said.items() if label in whole))
        if len(values) > 1:
            shifted |= said.keys() - whole
            if len(trusted) == 1:
                folded[pair] = next(iter(trusted))
            else:
                notes.append(
                    f"{pair[0]} and {pair[1]}: contradictory {' and '.join(sorted(values))}"
                )
    for pair, said in claims.items():
        values = set().union(*said.values())
        if len(values) == 1 and (said.keys() & whole or said.keys() - shifted):
            folded[pair] = next(iter(values))
    return folded


def _whole_rows(matrix: Matrix) -> set[str]:
    """Labels of rows that are whole, and the same wherever they stand twice."""
    seen: dict[str, list[Row]] = {}
    for row in matrix.rows:
        seen.setdefault(row.label, []).append(row)
    return {
        label
        for label, rows in seen.items()
        if all(row.is_whole and row.cells == rows[0].cells for row in rows)
    }


def gpu_labels(matrices: Sequence[Matrix]) -> list[str]:
    """Every GPU that has a column, by its number."""
    columns = {column for matrix in matrices for column in matrix.columns}
    return sorted(filter(is_gpu, columns), key=gpu_index)


def is_gpu(label: str) -> bool:
    """Whether a label is that of a GPU."""
    return _GPU.fullmatch(label) is not None


def gpu_index(label: str) -> int:
    """The number in a GPU's label."""
    return int(label.removeprefix("GPU"))


def cell_of(pairs: Mapping[tuple[str, str], str], one: str, other: str) -> str | None:
    """What a folded matrix tells of two devices."""
    a, b = sorted((one, other))
    return pairs.get((a, b))


def square(labels: Sequence[str], pairs: Mapping[tuple[str, str], str]) -> Square:
    """A folded matrix with both halves again."""
    return tuple(tuple("X" if a == b else cell_of(pairs, a, b) for b in labels) for a in labels)
