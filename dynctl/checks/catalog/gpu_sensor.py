"""A sensor of a GPU, or its fan, answers with an error. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpu-sensor"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if not gpu.health.bad_readings:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            f"GPU{gpu.index}",
            f"errors instead of readings: {', '.join(gpu.health.bad_readings)}",
            tuple(f"planned for {name}" for name in evidence.uses_gpu(gpu)) or ("not planned on",),
            "look at the card: a dead fan or sensor ends in throttling or a lost GPU; a reboot tells whether it was the driver",
            verify=f"nvidia-smi -i {gpu.index} -q | grep -E ': *(ERR!|Unknown Error)'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU sensor failed", _judge, (Need.GPUS,))
