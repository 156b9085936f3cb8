"""A GPU counted uncorrectable memory errors since its driver was loaded. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, smi, where

CODE = "gpu-ecc-errors"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        count = gpu.health.num_uncorrected
        if count:
            yield Finding(
                CODE,
                red_if(evidence.uses_gpu(gpu)),
                host.name,
                f"GPU{gpu.index}",
                "uncorrectable memory errors since the driver was loaded",
                (f"{count} uncorrected errors",),
                "keep engines off it, reset it when nothing runs; if they come again, have the card replaced",
                root_line(host, "nvidia-smi", "-i", str(gpu.index), "--gpu-reset"),
                verify=f"{smi(gpu, 'ecc.errors.uncorrected.volatile.total')} | {where('$1 + 0 > 0')}",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Uncorrectable memory errors", _judge, (Need.GPUS,))
