"""Host memory of engines may be swapped out, which stalls transfers through it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line
from dynctl.core.units import GIB, format_bytes

CODE = "swap-on"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        kernel = audit.kernel
        if kernel is None or not kernel.swap_total_bytes or not host.gpus:
            continue
        used = kernel.swap_used_bytes or 0
        yield Finding(
            CODE,
            Severity.WARNING if used > GIB else Severity.INFO,
            host.name,
            "",
            f"swap is on ({format_bytes(kernel.swap_total_bytes)})"
            + (f" and {format_bytes(used)} of it are used" if used > GIB else ""),
            (f"swappiness {kernel.swappiness}",),
            "switch it off on hosts that serve models, or set vm.swappiness to 1",
            root_line(host, "swapoff", "-a"),
            verify="tail -n +2 /proc/swaps | grep .",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Swap in use", _judge, (Need.AUDIT,))
