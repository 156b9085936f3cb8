"""The peer memory module is loaded and not registered with the RDMA stack. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "peer-memory-unregistered"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        software = host.software
        loaded = {"nvidia_peermem", "nv_peer_mem"} & set(software.modules)
        others = {p for h in evidence.topology.hosts for p in h.software.memory_peers}
        # Only kernels with the vendor's RDMA stack list their clients: where no host lists any, nothing is told.
        if not loaded or software.memory_peers or software.has_dmabuf or not others:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            "",
            f"{min(loaded)} is loaded but not registered with the RDMA stack",
            (
                "no entry in /sys/kernel/mm/memory_peers",
                f"other hosts have: {', '.join(sorted(others))}",
            ),
            "load it after the RDMA drivers, or install the driver built for this RDMA stack",
            root_line(host, "sh", "-c", "rmmod nvidia_peermem; modprobe nvidia_peermem"),
            verify='n=$(ls /sys/kernel/mm/memory_peers 2>/dev/null | wc -l); echo "$n registered"; [ "$n" -eq 0 ]',
            verify_on=host.name,
        )


CHECK = Check(CODE, "Peer memory module without effect", _judge, (Need.GPUS, Need.RDMA))
