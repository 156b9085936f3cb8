"""`nvidia-smi topo -m`: how every pair of GPUs and NICs is joined, and which NUMA node each GPU is near.

Written from captures of drivers 384 to 580: tabs, tabs expanded, glued and cut rows, old and new headers.
Pure.
"""

import re
from collections.abc import Sequence

from dynctl.core.command import Completed
from dynctl.discovery import affinity
from dynctl.discovery.facts import TopoFacts
from dynctl.discovery.header import nic_legend
from dynctl.discovery.matrix import (
    Matrix,
    cell_of,
    gpu_index,
    gpu_labels,
    is_gpu,
    merge,
    read_matrices,
    square,
)
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, fail, text_of

_SCRIPT = """
exec nvidia-smi topo -m
"""


def parse_topo(text: str) -> TopoFacts:
    """Read the matrix out of any text that holds one.

    Raises:
        ProbeError: when no row of a topology matrix can be found.
    """
    matrices = read_matrices(text)
    topologies = [m for m in matrices if not m.is_p2p and m.rows]
    if not topologies:
        first = next((line for line in text.split("\n") if line.strip()), "")
        raise fail("nvidia-smi topo -m", 1, first, "no matrix with GPU rows found")
    notes = [note for matrix in topologies for note in matrix.notes]
    pairs = _agree(topologies, notes)
    gpus = gpu_labels(topologies)
    nics = list(dict.fromkeys(c for m in topologies for c in m.columns if not is_gpu(c)))
    legend = nic_legend(text)
    cut = {label for m in topologies for label in affinity.cut_ones({r.label: r.tail for r in m.rows})}  # fmt: skip
    if cut:
        notes.append(
            f"the affinities of {', '.join(sorted(cut))} may be cut: others go on with them"
        )
    rows = {label: {} if label in cut else _first_tail(topologies, label) for label in gpus}
    if missing := [
        label for label in gpus if label not in {r.label for m in topologies for r in m.rows}
    ]:
        notes.append(f"no row for {', '.join(missing)}")
    if bare := [c for c in nics if c not in {r.label for m in topologies for r in m.rows}]:
        notes.append(
            f"no rows for {len(bare)} of {len(nics)} NICs ({bare[0]} …): the output is cut, run it again"
        )
    if nameless := [c for c in nics if re.fullmatch(r"NIC\d+", c) and c not in legend]:
        notes.append(f"no legend for {len(nameless)} of {len(nics)} NICs: device names are unknown")
    p2p = _agree([m for m in matrices if m.is_p2p], [])
    return TopoFacts(
        gpu_indexes=tuple(gpu_index(label) for label in gpus),
        links=square(gpus, pairs),
        nic_names=tuple(legend.get(label, label) for label in nics),
        nic_links=tuple(tuple(cell_of(pairs, gpu, nic) for nic in nics) for gpu in gpus),
        cpu_affinity=tuple(_known(rows[label].get("cpu")) for label in gpus),
        numa_affinity=tuple(_known(rows[label].get("numa")) or None for label in gpus),
        gpu_numa_id=tuple(_integer(rows[label].get("gpu_numa")) for label in gpus),
        p2p=square(gpus, p2p) if p2p else (),
        may_lack_nics=any(matrix.is_cut for matrix in topologies),
        notes=tuple(dict.fromkeys(notes)),
    )


def _agree(matrices: Sequence[Matrix], notes: list[str]) -> dict[tuple[str, str], str]:
    """Merge several matrices of one host. `topo -mp` leaves NVLink out, so a matrix with NVLink stands over one without."""
    agreed: dict[tuple[str, str], str] = {}
    doubtful: set[tuple[str, str]] = set()
    folded = [merge(matrix, notes) for matrix in matrices]
    has_nvlink = [any(cell.startswith("NV") for cell in pairs.values()) for pairs in folded]
    is_one_host = not _differ(matrices)
    for pairs, nvlink in sorted(zip(folded, has_nvlink, strict=True), key=lambda both: not both[1]):
        for pair, cell in pairs.items():
            known = agreed.setdefault(pair, cell)
            hides_nvlink = known.startswith("NV") and not nvlink and is_one_host
            if known != cell and not hides_nvlink:
                doubtful.add(pair)
    for pair in sorted(doubtful):
        notes.append(f"{pair[0]} and {pair[1]}: two matrices disagree")
        del agreed[pair]
    return agreed


def _differ(matrices: Sequence[Matrix]) -> bool:
    """Whether matrices tell a GPU to be near different CPUs: they are of different hosts, or of different jobs."""
    cpus: dict[str, str] = {}
    for matrix in matrices:
        for row in matrix.rows:
            cell = row.tail[0] if row.tail and matrix.tail_names[:1] == ["cpu"] else None
            if cell and cpus.setdefault(row.label, cell) != cell:
                return True
    return False


def _first_tail(matrices: Sequence[Matrix], label: str) -> dict[str, str | None]:
    """The affinity cells of a GPU; rows that say different things leave the cell unknown."""
    found: dict[str, set[str]] = {}
    for matrix in matrices:
        for row in matrix.rows:
            if row.label == label:
                for name, cell in zip(matrix.tail_names, row.tail, strict=False):
                    if cell is not None:
                        found.setdefault(name, set()).add(cell)
    return {name: cells.pop() for name, cells in found.items() if len(cells) == 1}


def _known(cell: str | None) -> str | None:
    return None if cell == "N/A" else cell


def _integer(cell: str | None) -> int | None:
    return (
        int(cell)
        if cell is not None and cell.isascii() and cell.isdecimal() and len(cell) < 6
        else None
    )


def parse(done: Completed) -> TopoFacts:
    """Read the probe's output; no tool and no GPUs is an empty answer, not an error.

    Raises:
        ProbeError: when the tool failed or its matrix cannot be found.
    """
    if done.exit_status == ABSENT_STATUS:
        return TopoFacts((), ())
    text = text_of(done)
    if not read_matrices(text):
        check_smi(done)
    return parse_topo(text)


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(
        r"(?m)^.{0,120}\bGPU\d{1,3}(?:\b.*(?:\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)|\sX)(?:\s|NV\d|PIX|PXB|PHB|NODE|SYS|SOC|\Z)"
        r"|(?:X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC))"
    ),
)
