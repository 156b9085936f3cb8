"""KV blocks travel between hosts whose RDMA devices are not of one kind: transfers fall back to TCP or hang. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import on_host
from dynctl.core.hardware import Host

CODE = "transfer-fabric-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    hosts = {host.name: host for host in evidence.topology.hosts}
    for source, target in evidence.transfers_between_hosts():
        if source not in hosts or target not in hosts:
            continue
        if not (evidence.is_split(source) and evidence.is_split(target)):
            continue  # simulated engines move no blocks
        a, b = _kinds(hosts[source]), _kinds(hosts[target])
        if a & b or not (a or b):
            continue
        line = "cat /sys/class/infiniband/*/ports/*/link_layer 2>/dev/null | sort -u | tr '\\n' ' '"
        ask = [on_host(evidence.inventory.host(name), line) for name in (source, target)]
        yield Finding(
            CODE,
            red_if(a and b),
            source,
            target,
            f"KV blocks go to {target}, and no RDMA fabric joins the two: {_text(a)} here, {_text(b)} there",
            (f"{source}: {_text(a)}", f"{target}: {_text(b)}"),
            "put prefill and decode on hosts of one fabric, or leave RDMA devices out with UCX_NET_DEVICES and use TCP on purpose",
            verify=f'a=$({ask[0]}); b=$({ask[1]}); echo "${{a:-none}} / ${{b:-none}}"; [ "$a" != "$b" ]',
        )


def _kinds(host: Host) -> set[str]:
    return {
        nic.kind
        for nic in host.nics
        if nic.kind != "ethernet" and nic.state == "up" and not nic.is_management
    }


def _text(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds)) or "no RDMA"


CHECK = Check(CODE, "Prefill and decode on different fabrics", _judge, (Need.PLAN, Need.PEERS))
