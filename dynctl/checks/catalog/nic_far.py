"""The nearest RDMA device of a GPU is across the link between processor sockets. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "nic-far"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for row, gpu in zip(host.gpu_nic_links, host.gpus, strict=False):
            labels = [label for label in row if label is not None]
            if not labels or any(label not in ("SYS", "SOC") for label in labels):
                continue
            used = evidence.uses_gpu(gpu) and evidence.is_split(host.name)
            names = ", ".join(host.nic_names)
            yield Finding(
                CODE,
                Severity.WARNING if used or evidence.plan is None else Severity.INFO,
                host.name,
                f"GPU{gpu.index}",
                "every RDMA device is across the link between sockets",
                (f"{names}: SYS", *(f"planned for {name}" for name in evidence.uses_gpu(gpu))),
                "give GPUs near a NIC to prefill and decode, or move a card to the GPU's socket",
                verify=_proof(gpu.index),
                verify_on=host.name,
            )


def _proof(index: int) -> str:
    """Only the NICs' columns count; the header has no label of its own, so columns are shifted by one."""
    return (
        "nvidia-smi topo -m | awk '/CPU Affinity/ { for (i = 1; i <= NF; i++) "
        "if ($i !~ /^(GPU|CPU|NUMA|Affinity|ID)/) nics[i + 1] } "
        f'$1 == "GPU{index}" && !/Affinity/ {{ print; n = 1; '
        "for (i in nics) if ($i ~ /^(P|NODE)/) n = 0 } END { exit !n }'"
    )


CHECK = Check(CODE, "NIC far from its GPU", _judge, (Need.GPUS, Need.RDMA))
