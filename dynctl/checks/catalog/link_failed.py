"""Two hosts could not move bytes between each other. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote
from dynctl.core.links import LinkKind

CODE = "link-failed"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    used = evidence.transfers_between_hosts()
    for link in evidence.topology.links:
        if not link.error:
            continue
        target = next((h for h in evidence.topology.hosts if h.name == link.target_name), None)
        address = evidence.data_address(target) if target else link.target_name
        yield Finding(
            CODE,
            red_if((link.source_name, link.target_name) in used or link.kind is LinkKind.TCP),
            link.source_name,
            link.target_name,
            f"no {link.kind.value} link to {link.target_name}",
            (link.error,),
            "look for a firewall between them, and at routes and data addresses",
            verify=f"! ping -c 3 -W 1 -q {quote(address)}",
            verify_on=link.source_name,
        )


CHECK = Check(CODE, "Link could not be measured", _judge, (Need.LINKS,))
