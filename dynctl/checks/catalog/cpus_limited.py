"""A control group or affinity mask gives dynctl fewer CPUs than the machine has. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.core.hardware import Host

CODE = "cpus-limited"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        nominal = host.num_cpus_nominal
        if not nominal or host.num_cpus >= nominal:
            continue
        yield Finding(
            CODE,
            _severity(host),
            host.name,
            "",
            f"{host.num_cpus} of {nominal} CPUs may be used",
            ("control group quota or CPU affinity of the session",),
            "an engine needs two cores and more for each GPU: raise CPUQuota= or the job's CPU count",
            verify=(
                "echo \"$(nproc) of $(getconf _NPROCESSORS_ONLN) CPUs\"; p=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup); "
                '[ "$(nproc)" -lt "$(getconf _NPROCESSORS_ONLN)" ] || '
                'while [ "$p" != /sys/fs ] && [ -n "$p" ]; do cat "$p/cpu.max" 2>/dev/null; p=${p%/*}; done | grep -E \'^[0-9]\''
            ),
            verify_on=host.name,
        )


def _severity(host: Host) -> Severity:
    per_gpu = host.num_cpus / len(host.gpus) if host.gpus else 4
    return Severity.RED if per_gpu < 2 else Severity.WARNING if per_gpu < 4 else Severity.INFO


CHECK = Check(CODE, "Fewer CPUs than the machine has", _judge)
