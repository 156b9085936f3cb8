"""A GPU has no spare memory rows left for its errors. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpu-remap-failed"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if gpu.health.has_remap_failed:
            yield Finding(
                CODE,
                Severity.RED,
                host.name,
                f"GPU{gpu.index}",
                "replacing a bad memory row failed: no spare rows are left",
                (f"rows remapped: {gpu.health.num_remapped}",),
                "have the card replaced; plan without it",
                verify=f"nvidia-smi -i {gpu.index} -q | grep -E 'Remapping Failure Occurred *: Yes'",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Memory repair failed", _judge, (Need.GPUS,))
