"""KV blocks and relay traffic would use a public address. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote
from dynctl.core.addresses import is_loopback, is_public

CODE = "public-data-address"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        address = evidence.data_address(host)
        if not is_public(address):
            continue
        private = [
            a for nic in host.nics for a in nic.addresses if not is_public(a) and not is_loopback(a)
        ]
        hint = (
            f"set data_address: {private[0]}"
            if private
            else "give the host a private address and set data_address to it"
        )
        yield Finding(
            CODE,
            red_if(evidence.is_split(host.name)),
            host.name,
            address,
            "the data address is public: NIXL's ports ask nobody who they are",
            (f"private addresses of this host: {', '.join(private) or 'none'}",),
            f"{hint} in the inventory, and plan again",
            verify=f"ip -o address show | grep -F ' '{quote(address)}/",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Data address is public", _judge)
