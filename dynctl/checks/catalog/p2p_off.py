"""The driver refuses direct copies between GPUs of one planned engine, or of one host. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.core.hardware import Host

CODE = "p2p-off"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        refused = _refused(host)
        if not refused:
            continue
        groups = [{p.uuid for p in r.gpus} for r in evidence.replicas_on(host.name)]
        used = [
            (a, b)
            for a, b, _ in refused
            if any({host.gpus[a].uuid, host.gpus[b].uuid} <= group for group in groups)
        ]
        yield Finding(
            CODE,
            Severity.WARNING if used or not evidence.plan else Severity.INFO,
            host.name,
            "",
            "direct copies between some GPUs are refused: they go through host memory",
            tuple(
                f"GPU{host.gpus[a].index}–GPU{host.gpus[b].index}: {cell}" for a, b, cell in refused
            ),
            "GeForce boards do not have it; elsewhere switch ACS off on the bridges between them and use a driver that supports it",
            verify="nvidia-smi topo -p2p r | grep -E '^ *GPU[0-9]+.*(CNS|GNS|TNS|DR|NS)'",
            verify_on=host.name,
        )


def _refused(host: Host) -> list[tuple[int, int, str]]:
    squares = dict(host.p2p)
    matrix = squares.get("read") or squares.get("status") or ()
    return [
        (a, b, cell)
        for a, row in enumerate(matrix)
        for b, cell in enumerate(row)
        if a < b < len(host.gpus) and cell not in (None, "OK", "X")
    ]


CHECK = Check(CODE, "Peer-to-peer copies refused", _judge, (Need.GPUS,))
