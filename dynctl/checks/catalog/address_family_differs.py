"""Data addresses are IPv4 on some hosts and IPv6 on others. Pure."""

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote
from dynctl.core.hardware import Host

CODE = "address-family-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    versions: dict[int, list[Host]] = defaultdict(list)
    for host in evidence.topology.hosts:
        try:
            versions[ipaddress.ip_address(evidence.data_address(host)).version].append(host)
        except ValueError:
            continue
    if len(versions) < 2:
        return
    odd = min(versions.values(), key=len)
    version = next(v for v, hosts in versions.items() if hosts is odd)
    for host in odd:
        others = [a for nic in host.nics for a in nic.addresses if (":" in a) == (version == 4)]
        address = evidence.data_address(host)
        yield Finding(
            CODE,
            red_if(not others),
            host.name,
            address,
            f"an IPv{version} data address, while other hosts use IPv{10 - version}",
            (f"IPv{10 - version} addresses here: {', '.join(others) or 'none'}",),
            "set data_address of all hosts to addresses of one family and network",
            verify=f"ip -o address show to {quote(address)} | grep {'-w inet6' if version == 6 else '-w inet'}",
            verify_on=host.name,
        )


CHECK = Check(CODE, "IPv4 on some hosts, IPv6 on others", _judge, (Need.PEERS,))
