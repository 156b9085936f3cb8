"""Kernel settings that matter for inference: NUMA balancing, huge pages, swap, IOMMU. Pure."""

import re

from dynctl.core.audit import KernelSettings
from dynctl.core.command import Completed
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
proc=${DYNCTL_PROC:-/proc} sys=${DYNCTL_SYSFS:-/sys}
first() { { read -r line <"$1"; } 2>/dev/null && printf '%s %s\n' "$2" "$line"; }
first "$proc/sys/kernel/numa_balancing" numa_balancing
first "$proc/sys/vm/swappiness" swappiness
nodes=0; for node in "$sys"/devices/system/node/node[0-9]*; do [ -d "$node" ] && nodes=$((nodes + 1)); done
[ $nodes -gt 0 ] && echo "nodes $nodes"
awk '/^(HugePages_Total|Hugepagesize|SwapTotal|SwapFree):/ { print "mem", $1, $2 }' "$proc/meminfo"
cat "$sys"/kernel/iommu_groups/*/type 2>/dev/null | sort -u | sed 's/^/iommu /'
exit 0
"""


def parse(done: Completed) -> KernelSettings:
    """Read the settings.

    Raises:
        ProbeError: when a number is none.
    """
    one: dict[str, str] = {}
    memory: dict[str, int] = {}
    types = set()
    for number, line in enumerate(text_of(done).split("\n"), 1):
        key, _, rest = line.strip()[:400].partition(" ")
        words = rest.split()
        if key == "mem" and len(words) == 2:
            memory[words[0].rstrip(":")] = _number(words[1], number, line)
        elif key == "iommu" and words:
            types.add(words[0])
        elif key in ("numa_balancing", "swappiness", "nodes"):
            one[key] = str(_number(rest, number, line))
    total, free = memory.get("SwapTotal"), memory.get("SwapFree")
    pages, size = memory.get("HugePages_Total"), memory.get("Hugepagesize")
    return KernelSettings(
        numa_balancing=_integer(one.get("numa_balancing")),
        num_numa_nodes=_integer(one.get("nodes")),
        reserved_hugepages_bytes=None if pages is None or size is None else pages * size * 1024,
        swap_total_bytes=None if total is None else total * 1024,
        swap_used_bytes=None if total is None or free is None else (total - free) * 1024,
        swappiness=_integer(one.get("swappiness")),
        iommu_translates=any(t.startswith("DMA") for t in types) if types else None,
    )


def _number(text: str, number: int, line: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text.strip()):
        raise fail("kernel settings", number, line, "not a number")
    return int(text)


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


PROBE = Probe(_SCRIPT, parse)
