"""An RDMA port is down; nothing is planned on it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.ports import waits_for_manager
from dynctl.checks.shell import rdma_port, root_line

CODE = "port-down"
_CURES = {
    "polling": "it hears nothing: check cable, transceiver and the switch port",
    "disabled": "it is switched off: switch it on, in its network device or in the firmware",
    "sleep": "it sleeps: a cable is missing, or the switch saves power",
}


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if nic.kind == "ethernet" or nic.state != "down" or nic.is_management:
                continue
            if waits_for_manager(host, nic):
                continue  # a finding of its own
            is_planned = evidence.uses_nic(host.name, nic)
            yield Finding(
                CODE,
                red_if(is_planned),
                host.name,
                nic.name,
                "the port is down" + (f" ({nic.physical})" if nic.physical else ""),
                (
                    f"{nic.kind} port {nic.port or 1}, state {nic.state}",
                    *(["planned for KV transfer"] if is_planned else []),
                ),
                _CURES.get(
                    nic.physical or "", "check cable, switch port and whether it is switched on"
                )
                + "; or leave it out of the plan",
                root_line(host, "ip", "link", "set", nic.netdev, "up")
                if nic.netdev and nic.physical == "disabled"
                else None,
                verify=f"grep -v ACTIVE {rdma_port(nic)}/state",
                verify_on=host.name,
            )


CHECK = Check(CODE, "RDMA port down", _judge, (Need.RDMA,))
