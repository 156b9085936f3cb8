"""One host has GPUs of different kinds; they are never joined in one engine. Pure."""

from collections import Counter
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpus-mixed"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        names = Counter(gpu.name for gpu in host.gpus if not gpu.is_simulated and gpu.memory_bytes)
        if len(names) < 2:
            continue
        yield Finding(
            CODE,
            Severity.INFO,
            host.name,
            "",
            "GPUs of different kinds: engines use those of one kind only",
            tuple(f"{count} × {name}" for name, count in names.items()),
            "nothing has to be done; started processes get CUDA_DEVICE_ORDER=PCI_BUS_ID and UUIDs, so that indexes cannot be mistaken",
            verify="nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | awk '{ print } END { exit NR < 2 }'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPUs of different kinds", _judge, (Need.GPUS,))
