"""A GPU fell off the bus or does not answer its driver. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote, root_line
from dynctl.core.hardware import GpuState

CODE = "gpu-lost"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if gpu.state is not GpuState.LOST:
            continue
        used = evidence.uses_gpu(gpu)
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            f"GPU{gpu.index}",
            f"GPU {gpu.index} does not answer the driver",
            (
                f"state lost, {gpu.pci_bus_id or gpu.uuid}",
                *(f"planned for {name}" for name in used),
            ),
            "see dmesg for Xid 79, reboot the host; if it comes back, have the card or its power checked",
            root_line(host, "reboot"),
            # Without it the driver counts the others anew: an index may then be that of another GPU.
            verify=f"nvidia-smi -i {quote(gpu.pci_bus_id or gpu.index)} -q 2>&1 | grep -iE 'is lost|unable to determine the device handle|no devices'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU lost", _judge, (Need.GPUS,))
