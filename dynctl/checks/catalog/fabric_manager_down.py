"""There are NVSwitches and no running fabric manager: CUDA cannot start (error 802). Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "fabric-manager-down"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        fabric = host.fabric
        if not fabric.num_switches or fabric.manager_state in (None, "active"):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            "nvidia-fabricmanager",
            "NVSwitches without a running fabric manager: CUDA does not start",
            (f"{fabric.num_switches} NVSwitches, service {fabric.manager_state}",),
            "start the fabric manager of exactly the driver's version",
            root_line(host, "systemctl", "enable", "--now", "nvidia-fabricmanager"),
            verify="systemctl is-active nvidia-fabricmanager | grep -vx active",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Fabric manager not running", _judge, (Need.GPUS,))
