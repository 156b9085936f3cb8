"""A link moves less than half as much in one direction as in the other. Pure."""

from collections.abc import Iterator

from dynctl.checks.both_ends import between
from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.units import format_number

CODE = "link-uneven"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.topology.links:
        back = evidence.topology.link(link.target_name, link.source_name, link.kind)
        if (
            not link.bytes_s
            or back is None
            or not back.bytes_s
            or link.bytes_s >= 0.5 * back.bytes_s
        ):
            continue
        target = next((h for h in evidence.topology.hosts if h.name == link.target_name), None)
        address = evidence.data_address(target) if target else link.target_name
        yield Finding(
            CODE,
            Severity.WARNING,
            link.source_name,
            link.target_name,
            f"{link.kind.value} to {link.target_name} is {back.bytes_s / link.bytes_s:.1f} times slower than back",
            (
                f"there {format_number(link.bytes_s * 8 / 1e9)} Gb/s, back {format_number(back.bytes_s * 8 / 1e9)} Gb/s",
            ),
            "a shaper, a full queue or a damaged receiver on one side: compare error counters of both devices",
            f"ethtool -S {quote(link.source.interface)}"
            if link.source and link.source.interface
            else None,
            verify=(
                f"a=$({between(evidence, link, f'iperf3 -c {quote(address)} -t 5 -f m')} | awk '/receiver/ {{ print int($(NF-2)) }}'); "
                f"b=$({between(evidence, link, f'iperf3 -c {quote(address)} -t 5 -R -f m')} | awk '/receiver/ {{ print int($(NF-2)) }}'); "
                'echo "there $a, back $b Mbit/s"; [ $((a * 2)) -lt "$b" ]'
            ),
        )


CHECK = Check(CODE, "Link slower in one direction", _judge, (Need.LINKS,))
