"""Many TCP segments had to be sent again. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, root_line

CODE = "link-lossy"


_LEAST = 0.005
_FLOOD = ("-f", "-c", "2000", "-s", "1400", "-q")
"""Without rights ping waits 0.2 s between packets."""


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.topology.links:
        if (link.retransmit_ratio or 0.0) < _LEAST:
            continue
        source = evidence.host(link.source_name)
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            Severity.WARNING,
            link.source_name,
            link.target_name,
            f"segments to {link.target_name} are lost and sent again",
            (f"{100 * (link.retransmit_ratio or 0):.2f} % sent again",),
            "look at error and drop counters of both devices and of the switch",
            verify=f"{root_line(source, 'ping', *_FLOOD, address) if source else join(('ping', *_FLOOD, address))} | grep -E 'packet loss' | grep -vE ' 0(\\.0*)?% packet loss'",
            verify_on=link.source_name,
        )


CHECK = Check(CODE, "Link loses packets", _judge, (Need.LINKS,))
