"""What measurements mean: a verdict for each, and what a user must be told. Codes are in docs/findings.md. Pure.

Limits are ours; those of round trips were set so that scheduling noise of a busy machine stays below them.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

from dynctl.core.hardware import HostWarning
from dynctl.core.links import SLOW_RATIO, LinkEnd, LinkKind, LinkMeasurement, is_asymmetric
from dynctl.core.units import format_number, format_seconds

LOSSY_RATIO = 0.01
OTHERS_RATIO = 0.1
JITTER_S = 200e-6
UNEVEN_RATIO = 1 / 3
MIN_MESSAGES = 20


class Verdict(StrEnum):
    """One word for one direction of a link."""

    OK = "ok"
    SLOW = "slow"
    JITTERY = "jittery"
    PROCESSOR_BOUND = "processor-bound"
    """Below the negotiated rate, but the processors could not do more: measured is a lower bound."""
    UNRATED = "unrated"
    """Measured, and nothing to compare with: no negotiated rate is known."""
    FAILED = "failed"


def verdict(link: LinkMeasurement) -> Verdict:
    """Judge one direction."""
    if link.error is not None or link.best is None:
        return Verdict.FAILED
    if link.nominal_ratio is not None and link.nominal_ratio < SLOW_RATIO:
        return Verdict.PROCESSOR_BOUND if link.is_processor_bound else Verdict.SLOW
    if is_jittery(link):
        return Verdict.JITTERY
    return Verdict.OK if link.nominal_ratio is not None else Verdict.UNRATED


def is_jittery(link: LinkMeasurement) -> bool:
    """Whether round trips or messages of one size differ much from each other."""
    if is_on_one_machine(link) or (link.kind is not LinkKind.TCP and link.is_processor_bound):
        return False
    trip = link.round_trip
    if trip is not None and trip.num_messages >= MIN_MESSAGES:
        if trip.p95_s - trip.p50_s > max(JITTER_S, trip.p50_s / 2):
            return True
        if trip.p99_s - trip.p50_s > max(1e-3, trip.p50_s):
            return True
    ratio = link.evenness_ratio
    return ratio is not None and ratio < UNEVEN_RATIO and not link.is_processor_bound


def is_on_one_machine(link: LinkMeasurement) -> bool:
    """Whether the bytes never left the machine."""
    return any(
        end is not None and end.route_interface == "lo" for end in (link.source, link.target)
    )


def warnings(
    links: Sequence[LinkMeasurement], rdma_hosts: Collection[str] = ()
) -> list[HostWarning]:
    """Everything a user must be told, in the order of the links. `rdma_hosts` have an RDMA port that is up."""
    by_key = {(m.source_name, m.target_name, m.kind): m for m in links}
    found: list[HostWarning] = []
    for link in links:
        back = by_key.get((link.target_name, link.source_name, link.kind))
        is_first = link.source_name < link.target_name or back is None
        if link.error is not None:
            if is_first:
                found.append(_warn("link-failed", link, link.error, both=True))
            continue
        found += _of_direction(link)
        if is_first:
            found += _of_pair(link, back)
        found += _of_nixl(link, by_key.get((*_ends(link), LinkKind.TCP)), rdma_hosts)
    return found


def _ends(link: LinkMeasurement) -> tuple[str, str]:
    return link.source_name, link.target_name


def _of_direction(link: LinkMeasurement) -> Iterable[HostWarning]:
    if verdict(link) is Verdict.SLOW:
        yield _warn(
            "link-slow",
            link,
            f"{rate(link.bytes_s)} of {rate(link.nominal_bytes_s)} negotiated ({link.nominal_ratio:.0%})",
        )
    if verdict(link) is Verdict.PROCESSOR_BOUND:
        yield _warn(
            "link-processor-bound",
            link,
            f"at least {rate(link.bytes_s)} of {rate(link.nominal_bytes_s)}: the processors could do no more",
        )
    if link.retransmit_ratio is not None and link.retransmit_ratio >= LOSSY_RATIO:
        yield _warn(
            "link-lossy", link, f"{link.retransmit_ratio:.1%} of the segments were sent again"
        )
    for name, end in ((link.source_name, link.source), (link.target_name, link.target)):
        if end is not None and _is_detour(end):
            yield HostWarning(
                "link-interface",
                f"{link.source_name} → {link.target_name}: {name} sends by {end.route_interface}, "
                f"its data address is on {end.data_interface}",
            )


def _of_pair(link: LinkMeasurement, back: LinkMeasurement | None) -> Iterable[HostWarning]:
    if is_on_one_machine(link):
        yield _warn(
            "link-on-one-machine",
            link,
            "both are on one machine; no network was measured",
            both=True,
        )
        return
    jittery = [m for m in (link, back) if m is not None and is_jittery(m)]
    if jittery:
        yield _warn("link-jittery", jittery[0], _spread(jittery[0]), both=True)
    if back is not None and back.bytes_s and link.bytes_s:
        slower, faster = sorted((link, back), key=lambda m: m.bytes_s or 0)
        if is_asymmetric(slower, faster):
            yield _warn(
                "link-asymmetric",
                slower,
                f"{rate(slower.bytes_s)}, the other way {rate(faster.bytes_s)}",
            )
    ends = [end for end in (link.source, link.target) if end is not None]
    if len({end.mtu_bytes for end in ends if end.mtu_bytes}) > 1:
        sizes = " and ".join(str(end.mtu_bytes) for end in ends)
        yield _warn("link-mtu-differs", link, f"MTU {sizes} bytes", both=True)
    yield from _others(link, [m for m in (link, back) if m is not None])


def _others(link: LinkMeasurement, both: Sequence[LinkMeasurement]) -> Iterable[HostWarning]:
    limit = link.nominal_bytes_s or link.bytes_s or 0
    seen = [e.other_bytes_s for m in both for e in (m.source, m.target) if e and e.other_bytes_s]
    if limit and seen and max(seen) > limit * OTHERS_RATIO:
        yield _warn(
            "link-busy", link, f"{rate(max(seen))} of other traffic during the test", both=True
        )


def _of_nixl(
    link: LinkMeasurement, tcp: LinkMeasurement | None, rdma_hosts: Collection[str]
) -> Iterable[HostWarning]:
    if link.kind is LinkKind.TCP:
        return
    if link.transport.startswith("tcp/") and set(_ends(link)) <= set(rdma_hosts):
        yield _warn("nixl-over-tcp", link, f"goes by {link.transport} although both have RDMA")
    if tcp is None or not tcp.bytes_s or not link.bytes_s:
        return
    if (
        link.bytes_s < tcp.bytes_s / 2
        and not is_on_one_machine(link)
        and not link.is_processor_bound
    ):
        text = f"{rate(link.bytes_s)} by {link.transport or 'an unknown transport'}, plain TCP has {rate(tcp.bytes_s)}"
        yield _warn("nixl-slower-than-tcp", link, text)


def _spread(link: LinkMeasurement) -> str:
    trip = link.round_trip
    text = ""
    if trip is not None:
        text = (
            f"round trips P50 {format_seconds(trip.p50_s)}, P95 {format_seconds(trip.p95_s)}, "
            f"P99 {format_seconds(trip.p99_s)}; "
        )
    ratio = link.evenness_ratio
    return text + ("" if ratio is None else f"slow messages have {ratio:.0%} of the usual rate")


def _is_detour(end: LinkEnd) -> bool:
    return (
        end.route_interface is not None
        and end.data_interface is not None
        and end.route_interface not in {"lo", end.data_interface}
    )


def _warn(code: str, link: LinkMeasurement, text: str, *, both: bool = False) -> HostWarning:
    arrow = "↔" if both else "→"
    return HostWarning(
        code, f"{link.source_name} {arrow} {link.target_name} {link.kind.value}: {text}"
    )


def rate(bytes_s: float | None) -> str:
    """Write a rate as networks are sold, in decimal bits: `9.41 Gb/s`, `940 Mb/s`."""
    if bytes_s is None:
        return "–"
    bits_s = bytes_s * 8
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits_s >= size:
            return f"{format_number(bits_s / size)} {unit}"
    return f"{bits_s:.0f} b/s"
