"""GPUs of one host belong to different NVLink cliques, so they cannot all reach each other. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "fabric-cliques-differ"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        cliques = {gpu.health.fabric_clique for gpu in host.gpus if gpu.health.fabric_clique}
        if len(cliques) < 2:
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            "",
            "GPUs of this host are in different NVLink cliques",
            tuple(f"GPU{g.index}: {g.health.fabric_clique}" for g in host.gpus),
            "see the fabric manager's and IMEX' configuration: one domain for each clique",
            verify="nvidia-smi -q | grep -E 'CliqueId' | sort -u | awk 'END { print NR \" cliques\"; exit NR < 2 }'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPUs of one host in different cliques", _judge, (Need.GPUS,))
