"""Different machines have one machine id: they were cloned from one image. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host, root_line
from dynctl.core.hardware import Host

CODE = "machine-id-cloned"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    by_id: dict[str, list[Host]] = defaultdict(list)
    for host in evidence.topology.hosts:
        if host.machine_id:
            by_id[host.machine_id].append(host)
    for machine_id, hosts in by_id.items():
        keys = {evidence.identities.get(host.name) for host in hosts}
        # One boot of one kernel is one machine with several SSH servers or containers, not a clone.
        if len(keys) < 2 or len({host.boot_id for host in hosts}) < 2:
            continue
        a, b = (evidence.entry(host) for host in hosts[:2])
        yield Finding(
            CODE,
            Severity.WARNING,
            hosts[1].name,
            "",
            f"{', '.join(h.name for h in hosts)} have one machine id: cloned from one image",
            (f"machine id {machine_id}",),
            "make a new one on all but one of them (DHCP and logs go by it as well)",
            root_line(hosts[1], "sh", "-c", "rm /etc/machine-id && systemd-machine-id-setup"),
            verify=(
                f"a=$({on_host(a, 'cat /etc/machine-id')}); b=$({on_host(b, 'cat /etc/machine-id')}); "
                'echo "$a $b"; [ "$a" = "$b" ]'
            ),
        )


CHECK = Check(CODE, "Machine id of a cloned image", _judge, (Need.PEERS,))
