"""An RDMA port runs on fewer lanes than its twins. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import rdma_port

CODE = "port-narrow"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    widest: dict[str, int] = {}
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if nic.num_lanes and nic.state == "up":
                widest[nic.card or nic.kind] = max(
                    widest.get(nic.card or nic.kind, 0), nic.num_lanes
                )
    for host in evidence.topology.hosts:
        for nic in host.nics:
            best = widest.get(nic.card or nic.kind, 0)
            if nic.state != "up" or not nic.num_lanes or nic.num_lanes >= best:
                continue
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                nic.name,
                f"runs on {nic.num_lanes} lanes, others of its kind on {best}",
                (f"{nic.num_lanes}X",),
                "clean or change cable and transceiver; a broken lane halves or quarters the rate",
                verify=f"grep -E '\\({nic.num_lanes}X' {rdma_port(nic)}/rate",
                verify_on=host.name,
            )


CHECK = Check(CODE, "RDMA port with lanes down", _judge, (Need.RDMA,))
