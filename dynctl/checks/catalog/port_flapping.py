"""An RDMA port counted many link losses. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import rdma_port, where
from dynctl.core.tolerances import MANY_LINK_LOSSES, is_flapping

CODE = "port-flapping"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if not is_flapping(nic):
                continue
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                nic.name,
                "lost its link many times since the driver was loaded",
                (f"link_downed = {nic.num_link_downed}",),
                "change cable or transceiver; transfers under way die with each loss",
                verify=where(
                    f"$1 >= {MANY_LINK_LOSSES}",
                    f"{rdma_port(nic)}/counters/link_downed",
                ),
                verify_on=host.name,
            )


CHECK = Check(CODE, "RDMA port loses its link again and again", _judge, (Need.RDMA,))
