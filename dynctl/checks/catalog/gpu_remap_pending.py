"""Rows of GPU memory wait for a reset to be taken out of use, or the GPU asks for one. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line

CODE = "gpu-remap-pending"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        health = gpu.health
        if not (health.is_remap_pending or health.is_reset_required):
            continue
        yield Finding(
            CODE,
            red_if(evidence.uses_gpu(gpu)),
            host.name,
            f"GPU{gpu.index}",
            "memory rows wait for a reset to be replaced"
            if health.is_remap_pending
            else "the driver asks for a reset",
            (
                f"remap pending: {health.is_remap_pending}, reset required: {health.is_reset_required}",
                f"rows remapped: {health.num_remapped}",
            ),
            "reset the GPU while nothing runs on it",
            root_line(host, "nvidia-smi", "-i", str(gpu.index), "--gpu-reset"),
            verify=f"nvidia-smi -i {gpu.index} -q | grep -E '(Pending|Reset Required|Pending Page Blacklist) *: Yes|Recovery Action *: [A-Z].*Reset'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Memory repair waits for a reset", _judge, (Need.GPUS,))
