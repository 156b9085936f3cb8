"""The compute mode of a GPU lets no process, or one only, use it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, smi

CODE = "gpu-compute-mode"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        mode = (gpu.health.compute_mode or "").lower()
        if mode not in ("prohibited", "exclusive_process"):
            continue
        yield Finding(
            CODE,
            red_if(evidence.uses_gpu(gpu) and mode == "prohibited"),
            host.name,
            f"GPU{gpu.index}",
            "no process may use it" if mode == "prohibited" else "one process only may use it",
            (f"compute mode: {gpu.health.compute_mode}",),
            "set the default mode: transfers and NCCL open the GPU from more than one process",
            root_line(host, "nvidia-smi", "-i", str(gpu.index), "-c", "DEFAULT"),
            verify=f"{smi(gpu, 'compute_mode')} | grep -iE 'prohibited|exclusive'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Compute mode refuses engines", _judge, (Need.GPUS,))
