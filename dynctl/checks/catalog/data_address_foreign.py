"""The data address of a host is on none of its network devices. Pure."""

import ipaddress
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.addresses import is_loopback

CODE = "data-address-foreign"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        address = evidence.data_address(host)
        own = [a for nic in host.nics for a in nic.addresses]
        if not own or address in own or is_loopback(address):
            continue
        try:
            ipaddress.ip_address(address)
        except ValueError:
            continue  # a name: which address it has is the resolver's answer, not ours
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            address,
            "the data address is on no network device of this host: nothing can listen there",
            (f"its addresses: {', '.join(own)}",),
            "set data_address to one of its own addresses (behind NAT: the inner one)",
            verify=f"ip -o address show | awk '{{ print $4 }}' | grep -vF {quote(address)}/ | sort -u; ! ip -o address show | grep -qF ' '{quote(address)}/",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Data address is not the host's own", _judge)
