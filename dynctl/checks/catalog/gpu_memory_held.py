"""Memory of a GPU is in use and no process can be seen that holds it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, where
from dynctl.core.hardware import GpuState
from dynctl.core.units import MIB, format_bytes

CODE = "gpu-memory-held"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if gpu.state is not GpuState.BUSY or gpu.processes or not gpu.memory_used_bytes:
            continue
        limit = max(1024, gpu.memory_bytes // 40 // MIB)
        yield Finding(
            CODE,
            red_if(evidence.uses_gpu(gpu)),
            host.name,
            f"GPU{gpu.index}",
            "memory is in use and no process is shown that holds it",
            (f"{format_bytes(gpu.memory_used_bytes)} of {format_bytes(gpu.memory_bytes)} used",),
            "a container, another user's process, or a peer that still maps the memory of a dead one: look as root",
            root_line(host, "fuser", "-v", f"/dev/nvidia{gpu.index}"),
            verify=f"nvidia-smi -i {gpu.index} --query-gpu=memory.used --format=csv,noheader,nounits | {where(f'$1 > {limit}')}",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU memory held by nobody seen", _judge, (Need.GPUS,))
