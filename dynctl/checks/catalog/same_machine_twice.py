"""Two entries of the inventory are one machine: its GPUs would be planned twice. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host
from dynctl.inventory.duplicates import same_machines

CODE = "same-machine-twice"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    identities = {
        h.name: (h.machine_id, evidence.identities.get(h.name)) for h in evidence.topology.hosts
    }
    for names in same_machines(identities):
        a, b = (evidence.inventory.host(name) for name in names[:2])
        yield Finding(
            CODE,
            Severity.RED,
            names[0],
            "",
            f"{' and '.join(names)} are one machine",
            (f"machine id {identities[names[0]][0]}", f"host key {identities[names[0]][1]}"),
            "keep one entry for it",
            verify=(
                f"a=$({on_host(a, 'cat /etc/machine-id /proc/sys/kernel/random/boot_id')}); "
                f"b=$({on_host(b, 'cat /etc/machine-id /proc/sys/kernel/random/boot_id')}); "
                'echo "$a"; [ "$a" = "$b" ]'
            ),
        )


CHECK = Check(CODE, "One machine listed twice", _judge, (Need.PEERS,))
