"""There is little room where dynctl keeps bundles, logs and state. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote, where
from dynctl.core.units import GIB, MIB, format_bytes

CODE = "disk-low"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        free = host.disk_free_bytes
        if free is None or free >= 2 * GIB:
            continue
        root = evidence.roots.get(host.name, "")
        path = (
            f'"$(d={quote(root)}; while [ ! -d "$d" ]; do d=$(dirname "$d"); done; echo "$d")"'
            if root
            else '"$HOME"'
        )
        yield Finding(
            CODE,
            red_if(free < 256 * MIB),
            host.name,
            "",
            f"{format_bytes(free)} free where dynctl keeps its files",
            (f"root: {root or 'the home directory'}",),
            "free some space, or set root: to a directory on another disk",
            f"du -xsh {quote(root)}/* | sort -h" if root else None,
            verify=f"df -Pk {path} | {where(f'NR == 2 && $4 < {2 * GIB // 1024}')}",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Disk nearly full", _judge)
