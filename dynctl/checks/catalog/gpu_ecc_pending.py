"""The ECC mode was changed and the change waits for the next reset of the GPU. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line, smi

CODE = "gpu-ecc-pending"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        now, then = gpu.health.has_ecc, gpu.health.has_ecc_pending
        if now is None or then is None or now == then:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            f"GPU{gpu.index}",
            f"ECC is {'on' if now else 'off'} and will be {'on' if then else 'off'} after the next reset",
            (f"current {now}, pending {then}: memory size and speed will change",),
            "reset the GPU while nothing runs on it, then plan again",
            root_line(host, "nvidia-smi", "-i", str(gpu.index), "--gpu-reset"),
            verify=f"{smi(gpu, 'ecc.mode.current,ecc.mode.pending')} | awk -F', *' '$1 != $2 {{ print; n++ }} END {{ exit !n }}'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "ECC change waits for a reset", _judge, (Need.GPUS,))
