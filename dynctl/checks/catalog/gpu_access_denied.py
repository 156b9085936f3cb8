"""The user dynctl logs in as may not open the GPU devices. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpu-access-denied"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for warning in host.warnings:
            if warning.code == "gpu-no-permission":
                yield Finding(
                    CODE,
                    Severity.RED,
                    host.name,
                    "",
                    "this user may not open the GPU devices",
                    (warning.text,),
                    "add the user to the group that owns /dev/nvidia*, and log in again",
                    "stat -c '%n %U:%G %a' /dev/nvidia*",
                    verify="nvidia-smi 2>&1 | grep -i 'insufficient permissions'",
                    verify_on=host.name,
                )


CHECK = Check(CODE, "GPU devices may not be opened", _judge, (Need.GPUS,))
