"""A control group gives dynctl less memory than the machine has. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.core.units import format_bytes

CODE = "memory-limited"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        nominal = host.memory_nominal_bytes
        if not nominal or host.memory_bytes >= nominal:
            continue
        yield Finding(
            CODE,
            Severity.WARNING if host.memory_bytes < nominal // 2 and host.gpus else Severity.INFO,
            host.name,
            "",
            f"{format_bytes(host.memory_bytes)} of {format_bytes(nominal)} memory may be used",
            ("memory.max of a control group",),
            "raise MemoryMax= of the unit or slice; loading a model needs host memory of its size",
            verify=(
                "p=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup); "
                'while [ "$p" != /sys/fs ] && [ -n "$p" ]; do cat "$p/memory.max" 2>/dev/null; p=${p%/*}; done | grep -E \'^[0-9]\''
            ),
            verify_on=host.name,
        )


CHECK = Check(CODE, "Less memory than the machine has", _judge)
