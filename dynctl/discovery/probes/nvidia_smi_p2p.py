"""`nvidia-smi topo -p2p`: between which GPUs the driver lets one read, write or reach by NVLink the other's memory. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import TopoFacts
from dynctl.discovery.matrix import gpu_index, merge, read_matrices
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, text_of

_SCRIPT = """
for what in read:r write:w nvlink:n; do
  echo "== p2p ${what%:*}"
  nvidia-smi topo -p2p "${what#*:}" 2>&1
done
"""
CAPABILITIES = ("read", "write", "nvlink", "pcie", "atomics", "status")
_SECTION = re.compile(rf"(?m)^== p2p ({'|'.join(CAPABILITIES)})$")
Square = tuple[tuple[str | None, ...], ...]


def parse(done: Completed) -> dict[str, TopoFacts]:
    """Read one matrix per capability; a capture without titles is one of unknown capability, `status`.

    Raises:
        ProbeError: when the tool failed.
    """
    if done.exit_status == ABSENT_STATUS:
        return {}
    pieces = _SECTION.split(text_of(done))
    titled = list(zip(pieces[1::2], pieces[2::2], strict=False)) or [("status", pieces[0])]
    found = {}
    for name, text in titled:
        matrices = [m for m in read_matrices(text) if m.is_p2p and m.rows]
        if not matrices:
            continue
        notes: list[str] = []
        pairs = merge(matrices[0], notes)
        gpus = sorted({i for c in matrices[0].columns if (i := gpu_index(c)) is not None})
        found[name] = TopoFacts(tuple(gpus), _square(gpus, pairs), notes=tuple(notes))
    if not found:
        check_smi(done)
    return found


def _square(gpus: list[int], pairs: dict[tuple[str, str], str]) -> Square:
    def cell(a: int, b: int) -> str | None:
        one, other = sorted((f"GPU{a}", f"GPU{b}"))
        return "X" if a == b else pairs.get((one, other))

    return tuple(tuple(cell(a, b) for b in gpus) for a in gpus)


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(r"(?m)^.{0,40}\bGPU\d{1,3}\b.*\s(?:OK|CNS|GNS|TNS|NS|DR)\s*(?:\s|\Z)"),
)
