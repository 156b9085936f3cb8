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
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            red_if((link.source_name, link.target_name) in used or link.kind is LinkKind.TCP),
            link.source_name,
            link.target_name,
            f"no {link.kind.value} link to {link.target_name}",
            (link.error,),
            "look for a firewall between them, and at routes and data addresses",
            verify=_proof(address, evidence.inventory.port_base),
            verify_on=link.source_name,
        )


def _proof(address: str, port: int) -> str:
    """A port that refuses was reached; one that does not answer was not, whatever ping says."""
    return (
        f"out=$(timeout 5 bash -c '</dev/tcp/{quote(address)}/{port}' 2>&1); s=$?; "
        '[ "$s" -ne 124 ] || out="no answer within 5 s"; echo "${out:-connected}"; '
        '[ "$s" -ne 0 ] && ! echo "$out" | grep -qi refused'
    )


CHECK = Check(CODE, "Link could not be measured", _judge, (Need.LINKS,))
