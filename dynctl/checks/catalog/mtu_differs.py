"""The network devices of the data addresses have different MTUs. Pure."""

from collections import Counter
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote, root_line, where
from dynctl.core.hardware import Host, Nic

CODE = "mtu-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    found: list[tuple[Host, Nic]] = []
    for host in evidence.topology.hosts:
        address = evidence.data_address(host)
        nic = next(
            (
                n
                for n in host.nics
                if address in n.addresses and n.mtu_bytes and n.kind == "ethernet"
            ),
            None,
        )
        if nic is not None:
            found.append((host, nic))
    sizes = Counter(nic.mtu_bytes for _, nic in found)
    if len(sizes) < 2:
        return
    largest = max(size for size in sizes if size)
    for host, nic in found:
        if nic.mtu_bytes != largest:
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                nic.name,
                f"MTU {nic.mtu_bytes}, other hosts have {largest}",
                tuple(f"{h.name} {n.name}: {n.mtu_bytes}" for h, n in found),
                "set one MTU on hosts and switches; larger packets are dropped or cut on the way",
                root_line(host, "ip", "link", "set", "dev", nic.name, "mtu", str(largest)),
                verify=where(f"$1 != {largest}", f"/sys/class/net/{quote(nic.name)}/mtu"),
                verify_on=host.name,
            )


CHECK = Check(CODE, "MTU differs between hosts", _judge, (Need.PEERS,))
