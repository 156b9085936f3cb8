"""Packets to another host leave by a network device that is not that of the data address. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "link-wrong-device"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.topology.links:
        end = link.source
        if end is None or not end.route_interface or not end.data_interface:
            continue
        if end.route_interface == end.data_interface:
            continue
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            Severity.WARNING,
            link.source_name,
            link.target_name,
            f"packets to {link.target_name} leave by {end.route_interface}, the data address is on {end.data_interface}",
            (f"{link.kind.value}: {end.address} on {end.interface}",),
            "set data_address of both hosts to addresses of one network, or correct the route",
            verify=f"ip -o route get {quote(address)} | grep -v 'dev {quote(end.data_interface)}' | grep dev",
            verify_on=link.source_name,
        )


CHECK = Check(CODE, "Data leaves by another device", _judge, (Need.LINKS,))
