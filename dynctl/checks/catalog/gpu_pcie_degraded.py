"""A GPU's PCIe link has fewer lanes than it could have, or an older generation than its twins. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import smi, where
from dynctl.core.hardware import Gpu, Host

CODE = "gpu-pcie-degraded"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    newest: dict[str, int] = {}
    for _, gpu in evidence.gpus():
        newest[gpu.name] = max(newest.get(gpu.name, 0), gpu.health.pcie_generation_max or 0)
    for host, gpu in evidence.gpus():
        health = gpu.health
        if (
            health.pcie_width
            and health.pcie_width_max
            and health.pcie_width < health.pcie_width_max
        ):
            yield _finding(
                evidence,
                host,
                gpu,
                f"x{health.pcie_width} of x{health.pcie_width_max} PCIe lanes",
                f"{smi(gpu, 'pcie.link.width.current,pcie.link.width.max')} | awk -F', *' '$1 < $2 {{ print; n++ }} END {{ exit !n }}'",
            )
        if health.pcie_generation_max and health.pcie_generation_max < newest[gpu.name]:
            yield _finding(
                evidence,
                host,
                gpu,
                f"PCIe generation {health.pcie_generation_max} at most, others of its kind {newest[gpu.name]}",
                f"{smi(gpu, 'pcie.link.gen.max')} | {where(f'$1 < {newest[gpu.name]}')}",
            )


def _finding(evidence: Evidence, host: Host, gpu: Gpu, text: str, verify: str) -> Finding:
    return Finding(
        CODE,
        red_if(evidence.uses_gpu(gpu) and evidence.is_split(host.name)),
        host.name,
        f"GPU{gpu.index}",
        text,
        (f"{gpu.name} at {gpu.pci_bus_id or 'unknown address'}",),
        "reseat the card or riser, check the slot and the firmware's setting for it, reboot",
        None,
        verify=verify,
        verify_on=host.name,
    )


CHECK = Check(CODE, "PCIe link of a GPU too narrow", _judge, (Need.GPUS,))
