"""`nvidia-smi topo -p2p`: between which GPUs the driver lets one read, write or reach by NVLink the other's memory. Pure."""

import re
from collections.abc import Iterator, Sequence

from dynctl.core.command import Completed
from dynctl.discovery.facts import TopoFacts
from dynctl.discovery.matrix import Matrix, gpu_index, gpu_labels, merge, read_matrices, square
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, text_of

_SCRIPT = """
for what in read:r write:w nvlink:n; do
  echo "== p2p ${what%:*}"
  nvidia-smi topo -p2p "${what#*:}" 2>&1
done
"""
CAPABILITIES = ("read", "write", "nvlink", "pcie", "atomics", "status")
_SECTION = re.compile(rf"(?m)^.*?(?:== p2p ({'|'.join(CAPABILITIES)})|topo -p2p +([rwnapc]+)\b).*$")
_LETTERS = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pcie"}


def parse(done: Completed) -> dict[str, TopoFacts]:
    """Read one matrix per capability; a capture without titles is one of unknown capability, `status`.

    Raises:
        ProbeError: when the tool failed.
    """
    if done.exit_status == ABSENT_STATUS:
        return {}
    found: dict[str, TopoFacts] = {}
    for name, text in _titled(text_of(done)):
        matrices = [m for m in read_matrices(text) if m.is_p2p and m.rows]
        if matrices and name not in found:
            found[name] = _facts(matrices)
    if not found:
        check_smi(done)
    return found


def _titled(text: str) -> Iterator[tuple[str, str]]:
    """Each piece of a stream with the capability its title names."""
    titles = list(_SECTION.finditer(text))
    starts = [*(title.start() for title in titles), len(text)]
    yield "status", text[: starts[0]]
    for title, end in zip(titles, starts[1:], strict=True):
        yield title[1] or _LETTERS.get(title[2], "status"), text[title.end() : end]


def _facts(matrices: Sequence[Matrix]) -> TopoFacts:
    """Merge matrices of one title; where two of unknown capability differ, the cell is unknown."""
    notes: list[str] = []
    pairs: dict[tuple[str, str], str] = {}
    differ: set[tuple[str, str]] = set()
    for folded in (merge(matrix, notes) for matrix in matrices):
        differ |= {pair for pair, cell in folded.items() if pairs.setdefault(pair, cell) != cell}
    gpus = gpu_labels(matrices)
    told = {pair: cell for pair, cell in pairs.items() if pair not in differ}
    return TopoFacts(tuple(map(gpu_index, gpus)), square(gpus, told), notes=tuple(notes))


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(r"(?m)^.{0,40}\bGPU\d{1,3}\b.*\s(?:OK|CNS|GNS|TNS|NS|DR)\s*(?:\s|\Z)"),
)
