"""NUMA nodes with their CPUs, memory and distances, from sysfs; also out of captures of `lscpu` and `numactl -H`.

Nodes without CPUs are real: memory of GPUs (Grace) and of MIG devices.
Pure.
"""

import re
from collections.abc import Sequence

from dynctl.core.command import Completed
from dynctl.core.machine import NumaNode
from dynctl.core.units import MIB
from dynctl.discovery.facts import NumaFacts
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
base=${DYNCTL_SYSFS:-/sys}/devices/system/node
[ -d "$base" ] || exit 0
grep -Hs -E '^[0-9]|MemTotal' "$base"/node[0-9]*/cpulist "$base"/node[0-9]*/distance "$base"/node[0-9]*/meminfo
exit 0
"""
_SYSFS = re.compile(r"\S*/node(\d{1,4})/(cpulist|distance|meminfo):(.{0,4000})\Z")
_LSCPU = re.compile(r"\s*NUMA node(\d{1,4}) CPU\(s\):\s*([\d,\-]*)\s*\Z")
_NUMACTL = re.compile(r"\s*node (\d{1,4}) (cpus|size):\s*([\d ]{0,20000}?)(?: MB)?\s*\Z")
_MAX_NODES = 1024


def parse(done: Completed) -> NumaFacts:
    """Read the nodes in their order.

    Raises:
        ProbeError: when there is output and no line of it tells of a node.
    """
    text = text_of(done)
    cpus: dict[int, str] = {}
    memory: dict[int, int] = {}
    distances: dict[int, tuple[int, ...]] = {}
    for line in text.split("\n"):
        if match := _LSCPU.match(line[:4096]):
            cpus.setdefault(int(match[1]), match[2])
        elif match := _NUMACTL.match(line[:20000]):
            node, value = int(match[1]), match[3]
            if match[2] == "cpus":
                cpus.setdefault(node, _ranges([int(w) for w in value.split() if len(w) < 6]))
            elif value.isdecimal() and len(value) < 12:
                memory.setdefault(node, int(value) * MIB)
        elif match := _SYSFS.match(line[:5000]):
            node, value = int(match[1]), match[3].strip()
            if match[2] == "cpulist" and re.fullmatch(r"[\d,\-]{1,4000}", value):
                cpus[node] = value
            elif match[2] == "distance" and re.fullmatch(r"[\d ]{1,4000}", value):
                distances[node] = tuple(int(word) for word in value.split() if len(word) < 6)
            elif size := re.search(r"MemTotal:\s*(\d{1,14}) kB", value):
                memory[node] = int(size[1]) * 1024
    nodes = sorted({*cpus, *memory, *distances})[:_MAX_NODES]
    if text.strip() and not nodes:
        raise fail("/sys/devices/system/node", 1, text[:200], "no NUMA node in the output")
    return NumaFacts(
        tuple(NumaNode(n, cpus.get(n, ""), memory.get(n), distances.get(n, ())) for n in nodes)
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0 1 2 3 8` as `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


PROBE = Probe(
    _SCRIPT,
    parse,
    marks=re.compile(
        r"(?m)^\s*NUMA node\d+ CPU\(s\):|^node \d+ cpus:|/system/node/node\d+/(?:cpulist|distance|meminfo):"
    ),
)
