"""`rocm-smi --showtopo`: AMD GPUs, how each pair is joined, and their NUMA nodes.

Recognised and described; no engine that dynctl starts supports them yet. Source: captures of ROCm 5 to 7.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import AmdFacts
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, integer, text_of

_SCRIPT = "rocm-smi --showtopo --showproductname 2>&1"
_TITLE = re.compile(r"=+\s*([A-Za-z][\w ]{3,60}?)\s*=+\s*\Z")
_ROW = re.compile(r"\s*GPU(\d{1,3})\s+(\S.{0,4000})\Z")
_NODE = re.compile(r"\s*GPU\[(\d{1,3})\]\s*:\s*\(Topology\) Numa Node:\s*(-?\d{1,4})")
_NAME = re.compile(r"\s*GPU\[(\d{1,3})\]\s*:\s*Card [Ss]eries:\s*(\S.{0,200})")
_LINK = re.compile(r"XGMI|PCIE|0|X|N/A", re.IGNORECASE)
_MAX_GPUS = 64
_Grid = dict[int, list[str]]


def parse(done: Completed) -> AmdFacts:
    """Read the matrix of links; a row with another number of cells than there are GPUs is unknown.

    Raises:
        ProbeError: when there is output without any GPU.
    """
    if done.exit_status == ABSENT_STATUS:
        return AmdFacts(())
    text = text_of(done)
    grids: dict[str, _Grid] = {}
    nodes: dict[int, int | None] = {}
    names: dict[int, str] = {}
    into: _Grid | None = None
    for line in (raw[:5000] for raw in text.split("\n")):
        if title := _TITLE.search(line):
            into = grids.setdefault(title[1].split(" between")[0].lower(), {})
        elif node := _NODE.match(line):
            nodes[int(node[1])] = integer(node[2], 4)
        elif name := _NAME.match(line):
            names[int(name[1])] = name[2].strip()
        elif (row := _ROW.match(line)) and into is not None and not row[2].startswith("GPU"):
            into.setdefault(int(row[1]), row[2].split())
    indexes = sorted({i for grid in grids.values() for i in grid} | nodes.keys() | names.keys())[
        :_MAX_GPUS
    ]
    if not indexes:
        raise fail("rocm-smi --showtopo", 1, text[:200], "no GPU in the output")
    kinds = _square(grids.get("link type", {}), indexes)
    return AmdFacts(
        links=tuple(
            tuple("X" if a == b else _kind(cell) for b, cell in enumerate(row))
            for a, row in enumerate(kinds)
        ),
        numa_nodes=tuple(nodes.get(i) for i in indexes),
        names=tuple(names.get(i) for i in indexes),
        is_low_power="low-power state" in text,
    )


def _square(grid: _Grid, indexes: list[int]) -> list[list[str]]:
    empty = [""] * len(indexes)
    rows = [grid.get(index, empty) for index in indexes]
    rows = [cells if len(cells) == len(indexes) else empty for cells in rows]
    # A pair is told by two cells; when they differ neither is.
    return [
        [
            cell if not rows[b][a] or not cell or rows[b][a] == cell else ""
            for b, cell in enumerate(row)
        ]
        for a, row in enumerate(rows)
    ]


def _kind(cell: str) -> str | None:
    return cell.upper() if _LINK.fullmatch(cell) and cell.upper() in {"XGMI", "PCIE"} else None


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v rocm-smi",
    marks=re.compile(
        r"ROCm System Management Interface|(?m:^=+ *(?:Weight|Hops|Link Type) between two GPUs)"
    ),
)
