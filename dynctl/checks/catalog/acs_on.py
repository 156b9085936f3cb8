"""PCI bridges above GPUs or NICs redirect peer requests upwards (ACS), so direct copies hang or crawl. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "acs-on"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        bridges = host.acs_bridges
        if not bridges or not host.gpus:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            "",
            f"{len(bridges)} PCI bridges redirect peer requests (ACS): copies between GPUs and to NICs hang or crawl",
            (f"bridges: {', '.join(bridges[:8])}",),
            "switch ACS off in the firmware, or on the bridges after each boot",
            root_line(host, "setpci", "-s", bridges[0], "ECAP_ACS+0x6.w=0000"),
            verify=f"{root_line(host, 'setpci', '-s', bridges[0], 'ECAP_ACS+0x6.w')} | grep -vx 0000",
            verify_on=host.name,
        )


CHECK = Check(CODE, "ACS redirects peer copies", _judge, (Need.GPUS,))
