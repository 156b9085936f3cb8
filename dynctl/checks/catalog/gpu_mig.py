"""A GPU is cut into MIG slices, which cannot be joined for tensor parallelism and are not planned on. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, smi
from dynctl.core.hardware import GpuState

CODE = "gpu-mig"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if gpu.state is GpuState.MIG:
            yield Finding(
                CODE,
                red_if(evidence.uses_gpu(gpu)),
                host.name,
                f"GPU{gpu.index}",
                "in MIG mode: it is not planned on",
                ("slices: " + (", ".join(gpu.mig_slices) or "none"),),
                "turn MIG off when nobody needs the slices (it stops what runs on them)",
                root_line(host, "nvidia-smi", "-i", str(gpu.index), "-mig", "0"),
                verify=f"{smi(gpu, 'mig.mode.current')} | grep -i enabled",
                verify_on=host.name,
            )


CHECK = Check(CODE, "GPU in MIG mode", _judge, (Need.GPUS,))
