"""Engines with several GPUs exchange messages through /dev/shm, which is small here. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, where
from dynctl.core.units import GIB, format_bytes

CODE = "shm-small"
SHM = "/dev/shm"  # noqa: S108 - named, not written to


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        size = host.shm_bytes
        if size is None or size >= GIB or not host.gpus:
            continue
        wide = any(len(r.gpus) > 1 for r in evidence.replicas_on(host.name))
        yield Finding(
            CODE,
            red_if(wide),
            host.name,
            SHM,
            f"{format_bytes(size)} of shared memory: engines with several GPUs need 1 GiB and more",
            (f"size {size} bytes, free {host.shm_free_bytes}",),
            "mount it larger, also in /etc/fstab; in a container: --shm-size",
            root_line(host, "mount", "-o", "remount,size=50%", SHM),
            verify=f"df -Pk {SHM} | {where(f'NR == 2 && $2 < {GIB // 1024}')}",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Shared memory small", _judge)
