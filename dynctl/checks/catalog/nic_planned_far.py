"""The plan gives an engine RDMA devices that are not near its GPUs although nearer ones are up. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "nic-planned-far"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for _, _, replica in evidence.replicas():
        host = evidence.host(replica.host_name)
        if host is None or not replica.nics or not host.gpu_nics:
            continue
        indexes = {g.index for g in host.gpus if any(p.uuid == g.uuid for p in replica.gpus)}
        up = {nic.device for nic in host.nics if nic.state == "up"}
        near = up & {
            n.partition(":")[0] for i, names in host.gpu_nics for n in names if i in indexes
        }
        far = [name for name in replica.nics if name.partition(":")[0] not in near]
        if not near or not far:
            continue
        index = min(indexes)
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            replica.id,
            f"{', '.join(far)} is not near its GPUs; {', '.join(sorted(near))} is",
            (f"planned: {', '.join(replica.nics)}", f"near GPU{index}: {', '.join(sorted(near))}"),
            "plan again: dynctl plan",
            verify=(
                f"a=$(cat /sys/class/infiniband/{quote(far[0].partition(':')[0])}/device/numa_node); "
                f"b=$(cat /sys/class/infiniband/{quote(min(near))}/device/numa_node); "
                'echo "NUMA nodes: planned $a, near $b"; [ "$a" != "$b" ]'
            ),
            verify_on=host.name,
        )


CHECK = Check(CODE, "Planned NIC is not the nearest", _judge, (Need.PLAN, Need.GPUS, Need.RDMA))
