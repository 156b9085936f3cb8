"""A RoCE port works with small packets, because its network device has a small MTU. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote, root_line, where

CODE = "rdma-mtu-small"
_LEAST_BYTES = 2048
"""RDMA packets are of 256 … 4096 bytes: 1024 is what a network device of 1500 leaves."""


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for nic in host.nics:
            is_small = nic.mtu_bytes is not None and nic.mtu_bytes in {256, 512, 1024}
            if nic.kind != "roce" or nic.state != "up" or nic.is_management or not is_small:
                continue
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                nic.name,
                f"RDMA packets of {nic.mtu_bytes} bytes: large transfers cost several times the packets",
                (f"active MTU {nic.mtu_bytes}, network device {nic.netdev or 'unknown'}",),
                "set MTU 9000 on the network device, the other hosts and the switch",
                root_line(host, "ip", "link", "set", "dev", nic.netdev, "mtu", "9000")
                if nic.netdev
                else None,
                verify=f"ibv_devinfo -d {quote(nic.device)} -i {nic.port or 1} | "
                + where(f"/active_mtu/ && $2 < {_LEAST_BYTES}"),
                verify_on=host.name,
            )


CHECK = Check(CODE, "Small RDMA MTU", _judge, (Need.RDMA,))
