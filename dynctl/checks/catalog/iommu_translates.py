"""DMA is translated by the IOMMU, so peer copies over PCIe make a detour through the root complex or fail. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "iommu-translates"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        kernel = audit.kernel
        if (
            kernel is None
            or not kernel.iommu_translates
            or not host.gpus
            or host.gpus[0].is_simulated
        ):
            continue
        labels = {label for row in host.gpu_links for label in row if label not in (None, "X")}
        has_rdma = any(nic.kind != "ethernet" and nic.state == "up" for nic in host.nics)
        matters = has_rdma or any(not (label or "").startswith("NV") for label in labels)
        yield Finding(
            CODE,
            Severity.WARNING if matters else Severity.INFO,
            host.name,
            "",
            "DMA goes through the IOMMU: peer copies over PCIe are slow or hang",
            (
                "IOMMU groups of type DMA",
                f"links between GPUs: {', '.join(sorted(str(x) for x in labels)) or 'none'}",
            ),
            "boot with iommu=pt (or intel_iommu=off / amd_iommu=off) on bare metal",
            verify="cat /sys/kernel/iommu_groups/*/type 2>/dev/null | sort | uniq -c | grep -E 'DMA(-FQ)?$'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "IOMMU between GPUs and NICs", _judge, (Need.GPUS, Need.AUDIT))
