"""Other hosts would be told to reach this one at a loopback address. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.addresses import is_any, is_loopback

CODE = "loopback-advertised"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    shared = {host.machine_id for host in evidence.topology.hosts if host.machine_id}
    if len(shared) == 1 and all(host.machine_id for host in evidence.topology.hosts):
        return  # several entries of one machine reach each other by loopback
    for host in evidence.topology.hosts:
        address = evidence.data_address(host)
        if not (is_loopback(address) or is_any(address)):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            address,
            "other hosts are told to reach it at an address that leads to themselves",
            (f"data address {address}",),
            "set data_address for this host to its address on the network the hosts share",
            verify=f"ip -o route get {quote(address)} 2>&1 | grep -E 'dev lo|^local|unspecified|RTNETLINK|inet'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Loopback advertised to other hosts", _judge, (Need.PEERS,))
