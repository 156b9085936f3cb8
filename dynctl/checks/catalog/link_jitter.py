"""Round trips or rates of a link vary much: transfers stall now and then. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.units import format_number

CODE = "link-jitter"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.topology.links:
        trip, best = link.round_trip, link.best
        facts = []
        if trip and trip.p95_s > 5e-4 and trip.p95_s > 4 * trip.p50_s:
            facts.append(
                f"round trip P50 {trip.p50_s * 1e3:.2f} ms, P95 {trip.p95_s * 1e3:.2f} ms, jitter {trip.jitter_s * 1e3:.2f} ms"
            )
        if best and best.num_messages >= 20 and best.p95_bytes_s < 0.4 * best.p50_bytes_s:
            facts.append(
                f"P50 {format_number(best.p50_bytes_s * 8 / 1e9)} Gb/s, 95 % of messages reached {format_number(best.p95_bytes_s * 8 / 1e9)} Gb/s only"
            )
        if not facts:
            continue
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            Severity.WARNING,
            link.source_name,
            link.target_name,
            f"{link.kind.value} to {link.target_name} is unsteady",
            tuple(facts),
            "look for other traffic, pause frames and drops on the switch; RoCE needs flow control",
            # The last line of ping is `rtt min/avg/max/mdev = …`: a maximum four times the average is unsteady.
            verify=f"ping -c 50 -i 0.2 -q {quote(address)} | awk -F'[ /]' '/^(rtt|round-trip)/ {{ print; n = $9 > 4 * $8 }} END {{ exit !n }}'",
            verify_on=link.source_name,
        )


CHECK = Check(CODE, "Link unsteady", _judge, (Need.LINKS,))
