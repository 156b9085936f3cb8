"""The kernel moves pages between NUMA nodes behind the engine's back. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import as_root, root_line

CODE = "numa-balancing-on"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        kernel = audit.kernel
        if (
            kernel is None
            or not kernel.numa_balancing
            or (kernel.num_numa_nodes or 1) < 2
            or not host.gpus
        ):
            continue
        fix = ("sysctl", "-w", "kernel.numa_balancing=0")
        yield Finding(
            CODE,
            Severity.INFO,
            host.name,
            "",
            "automatic NUMA balancing is on: page moves stall copies to and from GPUs",
            (f"kernel.numa_balancing = {kernel.numa_balancing}, {kernel.num_numa_nodes} nodes",),
            "switch it off, also in /etc/sysctl.d",
            root_line(host, *fix),
            as_root(host, *fix),
            verify="grep -v '^0' /proc/sys/kernel/numa_balancing",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Automatic NUMA balancing on", _judge, (Need.AUDIT,))
