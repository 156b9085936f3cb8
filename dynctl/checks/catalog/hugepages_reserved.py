"""Much memory is reserved as huge pages, which engines cannot use. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line
from dynctl.core.units import format_bytes

CODE = "hugepages-reserved"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        reserved = audit.kernel.reserved_hugepages_bytes if audit.kernel else None
        if not reserved or not host.memory_bytes or reserved < host.memory_bytes // 10:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            "",
            f"{format_bytes(reserved)} are reserved as huge pages and lost for engines",
            (f"of {format_bytes(host.memory_bytes)}",),
            "give them back unless something else here needs them",
            root_line(host, "sysctl", "-w", "vm.nr_hugepages=0"),
            verify="awk '/^HugePages_Total:/ && $2 > 0 { print; n++ } END { exit !n }' /proc/meminfo",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Memory set aside as huge pages", _judge, (Need.AUDIT,))
