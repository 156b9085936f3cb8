"""A GPU's power limit is lower than that of others of its kind. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line, where

CODE = "gpu-power-uneven"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    highest: dict[str, float] = {}
    for _, gpu in evidence.gpus():
        highest[gpu.name] = max(highest.get(gpu.name, 0.0), gpu.health.power_limit_w or 0.0)
    for host, gpu in evidence.gpus():
        limit, best = gpu.health.power_limit_w, highest[gpu.name]
        if limit is None or limit >= 0.95 * best:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            f"GPU{gpu.index}",
            f"power limit {limit:g} W, others of its kind have {best:g} W",
            (gpu.name,),
            "set the same limit everywhere: the slowest GPU sets the pace of its group",
            root_line(host, "nvidia-smi", "-i", str(gpu.index), "-pl", f"{best:g}"),
            verify=f"nvidia-smi -i {gpu.index} --query-gpu=power.limit --format=csv,noheader,nounits | {where(f'$1 < {0.95 * best:g}')}",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Power limit below that of twins", _judge, (Need.GPUS,))
