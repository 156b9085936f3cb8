"""A process that is not ours holds memory of a GPU. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.core.units import format_bytes

CODE = "gpu-foreign-process"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        for process in gpu.processes:
            if process.is_ours:
                continue
            memory = format_bytes(process.memory_bytes) if process.memory_bytes else "some memory"
            yield Finding(
                CODE,
                red_if(evidence.uses_gpu(gpu)),
                host.name,
                f"GPU{gpu.index}",
                f"held by pid {process.pid} ({process.name}), which dynctl did not start",
                (f"{memory}, user {process.user or 'unknown'}",),
                "end that process if it is yours, or plan again without this GPU; dynctl never ends it",
                verify=f"nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader | grep -E ', *{process.pid}$'",
                verify_on=host.name,
            )


CHECK = Check(CODE, "GPU held by a stranger", _judge, (Need.GPUS,))
