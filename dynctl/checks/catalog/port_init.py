"""An InfiniBand port has link and waits for a subnet manager. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.ports import waits_for_manager
from dynctl.checks.shell import rdma_port, root_line

CODE = "port-init"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if nic.kind == "ethernet" or nic.is_management or not waits_for_manager(host, nic):
                continue
            yield Finding(
                CODE,
                red_if(evidence.uses_nic(host.name, nic)),
                host.name,
                nic.name,
                "the port has link but no subnet manager configured it",
                (f"physical state {nic.physical or 'unknown'}, logical state init",),
                "start a subnet manager (opensm) on one host of the fabric, or in the switch",
                root_line(host, "systemctl", "start", "opensm"),
                verify=f"grep -E 'INIT|ARMED' {rdma_port(nic)}/state",
                verify_on=host.name,
            )


CHECK = Check(CODE, "InfiniBand port without a subnet manager", _judge, (Need.RDMA,))
