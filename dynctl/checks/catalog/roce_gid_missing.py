"""A RoCE port has no RoCE v2 GID with a routable address, so no other host can be reached by it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import rdma_port, root_line

CODE = "roce-gid-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if nic.kind != "roce" or nic.state != "up" or not nic.gids or nic.is_management:
                continue
            if any(g.version == "v2" and not g.gid.lower().startswith("fe80") for g in nic.gids):
                continue
            port = rdma_port(nic)
            yield Finding(
                CODE,
                red_if(evidence.uses_nic(host.name, nic)),
                host.name,
                nic.name,
                "no RoCE v2 GID with a routable address: KV transfer over it cannot be set up",
                tuple(f"GID {g.index}: {g.gid} ({g.version})" for g in nic.gids[:6]),
                f"give {nic.netdev or 'its network device'} an address of the data network",
                root_line(host, "ip", "address", "add", "ADDRESS/PREFIX", "dev", nic.netdev)
                if nic.netdev
                else None,
                verify=(
                    f"cd {port} && ! for t in gid_attrs/types/*; do grep -q 'RoCE v2' $t 2>/dev/null && cat gids/${{t##*/}}; done "
                    "| grep -vE '^(fe80|0000:0000:0000:0000:0000:0000:0000:0000)'"
                ),
                verify_on=host.name,
            )


CHECK = Check(CODE, "No usable RoCE v2 address", _judge, (Need.RDMA,))
