"""NUMA nodes with their CPUs, memory and distances, from sysfs; also out of a capture of `lscpu`.

Nodes without CPUs are real: memory of GPUs (Grace) and of MIG devices.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import NumaNode
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


PROBE = Probe(
    _SCRIPT,
    parse,
    marks=re.compile(
        r"(?m)^\s*NUMA node\d+ CPU\(s\):|/system/node/node\d+/(?:cpulist|distance|meminfo):"
    ),
)
