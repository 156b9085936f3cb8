"""The inventory sets a GID index that is no routable RoCE v2 address on a host. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import rdma_port
from dynctl.core.hardware import Host, Nic
from dynctl.core.units import whole

CODE = "roce-gid-wrong"


_NAMES = ("UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX")


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        for name, value in wish.engine.env:
            index = whole(value)
            if name not in _NAMES or index is None:
                continue
            for host in evidence.topology.hosts:
                if not evidence.may_run(host, wish):
                    continue
                for nic in host.nics:
                    if nic.kind != "roce" or nic.state != "up" or not nic.gids:
                        continue
                    gid = next((g for g in nic.gids if g.index == index), None)
                    if gid and gid.version == "v2" and not gid.gid.lower().startswith("fe80"):
                        continue
                    yield _finding(
                        host,
                        nic,
                        name,
                        index,
                        f"{gid.gid} ({gid.version})" if gid else "no GID",
                    )


def _finding(host: Host, nic: Nic, name: str, index: int, what: str) -> Finding:
    good = [g.index for g in nic.gids if g.version == "v2" and not g.gid.lower().startswith("fe80")]
    port = rdma_port(nic)
    advice = (
        f"set {name} to {good[0]}" if good else "give the device an address of the data network"
    )
    return Finding(
        CODE,
        Severity.RED,
        host.name,
        nic.name,
        f"{name}={index} is no routable RoCE v2 address",
        (f"GID {index}: {what}",),
        f"{advice}, or leave the variable out: UCX then chooses by itself",
        verify=(
            f"cd {port} && cat gids/{index} gid_attrs/types/{index} 2>&1 | tr '\\n' ' ' "
            "| grep -vE '^[0-9a-f:]+ RoCE v2 $' || grep -E '^fe80' gids/" + str(index)
        ),
        verify_on=host.name,
    )


CHECK = Check(CODE, "GID index leads to the wrong address", _judge, (Need.RDMA,))
