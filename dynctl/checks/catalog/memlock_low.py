"""Engines cannot lock the memory RDMA transfers need. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.limits import limits_of
from dynctl.core.tolerances import low_memlock_bytes
from dynctl.core.units import format_bytes

CODE = "memlock-low"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        value = low_memlock_bytes(host)
        if value is None:
            continue
        source = limits_of(evidence, host)
        has_rdma = any(nic.kind != "ethernet" and nic.state == "up" for nic in host.nics)
        yield Finding(
            CODE,
            red_if(has_rdma and evidence.is_split(host.name)),
            host.name,
            "",
            f"locked memory is limited to {format_bytes(value)}: registering KV memory with RDMA devices fails",
            (f"memlock of {source.whose}: {value} bytes",),
            f"lift it {source.where_to_set(host)}, log in anew and run dynctl up (running sessions keep their limits)",
            source.cure(host, "memlock unlimited", "LimitMEMLOCK=infinity"),
            verify=source.proof(
                "Max locked memory",
                "DefaultLimitMEMLOCKSoft",
                'VALUE != "unlimited" && VALUE != "infinity"',
            ),
            verify_on=host.name,
        )


CHECK = Check(CODE, "Locked memory limited", _judge)
