"""A link moves less than 70 % in one direction of what it does in the other. Pure."""

from collections.abc import Iterator

from dynctl.checks.both_ends import between
from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.links import ASYMMETRIC_RATIO, is_asymmetric
from dynctl.core.units import format_number

CODE = "link-uneven"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.topology.links:
        back = evidence.topology.link(link.target_name, link.source_name, link.kind)
        if back is None or not is_asymmetric(link, back):
            continue
        to, fro = link.bytes_s or 0.0, back.bytes_s or 1.0
        address = evidence.address_of(link.target_name)
        yield Finding(
            CODE,
            Severity.WARNING,
            link.source_name,
            link.target_name,
            f"{link.kind.value} to {link.target_name} has {to / fro:.0%} of the rate back",
            (
                f"there {format_number(to * 8 / 1e9)} Gb/s, back {format_number(fro * 8 / 1e9)} Gb/s",
            ),
            "a shaper, a full queue or a damaged receiver on one side: compare error counters of both devices",
            f"ethtool -S {quote(link.source.interface)}"
            if link.source and link.source.interface
            else None,
            verify=(
                f"a=$({between(evidence, link, f'iperf3 -c {quote(address)} -t 5 -f m')} | awk '/receiver/ {{ print int($(NF-2)) }}'); "
                f"b=$({between(evidence, link, f'iperf3 -c {quote(address)} -t 5 -R -f m')} | awk '/receiver/ {{ print int($(NF-2)) }}'); "
                'echo "there $a, back $b Mbit/s"; '
                f"[ $((a * 100)) -lt $((b * {ASYMMETRIC_RATIO * 100:.0f})) ]"
            ),
        )


CHECK = Check(CODE, "Link slower in one direction", _judge, (Need.LINKS,))
