"""A link moves far less than its network devices negotiated, or than the other links do. Pure."""

from collections.abc import Iterator

from dynctl.checks.both_ends import between
from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote, where
from dynctl.core.links import SLOW_RATIO, LinkMeasurement
from dynctl.core.units import format_number

CODE = "link-slow"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    used = evidence.transfers_between_hosts()
    for link in evidence.topology.links:
        rate, usual = link.bytes_s, _usual(evidence, link)
        if rate is None or usual is None or rate >= SLOW_RATIO * usual[0]:
            continue
        if link.is_processor_bound:
            continue
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            red_if((link.source_name, link.target_name) in used and rate < 0.25 * usual[0]),
            link.source_name,
            link.target_name,
            f"{link.kind.value} to {link.target_name} moves {format_number(rate * 8 / 1e9)} of {format_number(usual[0] * 8 / 1e9)} Gb/s",
            (
                f"measured {format_number(rate * 8 / 1e9)} Gb/s, {usual[1]}",
                f"device {link.source.interface if link.source else 'unknown'}, transport {link.transport or link.kind.value}",
                *_traffic(link),
            ),
            "look for a shaper or limit on the device (tc qdisc), a port at a low rate, other traffic, a wrong route",
            verify=(
                f"{between(evidence, link, f'iperf3 -c {quote(address)} -t 5 -P 4 -f m')} | grep -E 'SUM.*receiver' | "
                + where(f"$(NF-2) < {SLOW_RATIO * usual[0] * 8 / 1e6:.0f}")
            ),
            fix_command=f"tc -s qdisc show dev {quote(link.source.interface)}"
            if link.source and link.source.interface
            else None,
        )


def _usual(evidence: Evidence, link: LinkMeasurement) -> tuple[float, str] | None:
    """The negotiated rate; where nobody tells it, the middle of the other links of this kind."""
    if link.nominal_bytes_s:
        return (
            link.nominal_bytes_s,
            f"negotiated {format_number(link.nominal_bytes_s * 8 / 1e9)} Gb/s",
        )
    rates = sorted(
        o.bytes_s
        for o in evidence.topology.links
        if o is not link and o.kind is link.kind and o.bytes_s
    )
    if len(rates) < 3:
        return None
    middle = rates[len(rates) // 2]
    return (
        middle,
        f"the other {len(rates)} links have {format_number(middle * 8 / 1e9)} Gb/s in the middle",
    )


def _traffic(link: LinkMeasurement) -> list[str]:
    ends = [
        (name, end)
        for name, end in ((link.source_name, link.source), (link.target_name, link.target))
        if end
    ]
    return [
        f"other traffic on {name} {end.interface}: {format_number(end.other_bytes_s * 8 / 1e9)} Gb/s"
        for name, end in ends
        if end.other_bytes_s and link.bytes_s and end.other_bytes_s > 0.1 * link.bytes_s
    ]


CHECK = Check(CODE, "Link below its rate", _judge, (Need.LINKS,))
