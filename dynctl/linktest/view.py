"""Measured links as the JSON document of `dynctl linktest -o json` and as rows of a table. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynctl.core.hardware import HostFailure, HostWarning
from dynctl.core.links import LinkEnd, LinkHost, LinkKind, LinkMeasurement, LinkPoint, RoundTrip
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.linktest.judge import rate, verdict

SCHEMA = "dynctl.linktest/1"
COLUMNS = ("LINK", "KIND", "→", "←", "NEGOTIATED", "RATIO", "RTT P50", "P95", "VIA", "VERDICT")


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Something that was not measured, and why: a host for a kind, or one kind on all hosts (empty name)."""

    host_name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run of `linktest`."""

    cluster: str
    measured_unix_s: float
    hosts: tuple[LinkHost, ...]
    links: tuple[LinkMeasurement, ...]
    failures: tuple[HostFailure, ...]
    unmeasured: tuple[Unmeasured, ...]
    warnings: tuple[HostWarning, ...]


def document(report: Report) -> dict[str, Any]:
    """Make the JSON document; rates in bytes per second, times in seconds."""
    return {
        "schema": SCHEMA,
        "cluster": report.cluster,
        "measured_unix_s": report.measured_unix_s,
        "hosts": [{"name": host.name, "data_address": host.data_address} for host in report.hosts],
        "links": [link_document(link) for link in report.links],
        "unmeasured": [
            {"host": item.host_name or None, "kind": item.kind, "reason": item.reason}
            for item in report.unmeasured
        ],
        "unmeasured_pairs": unmeasured_pairs(report),
        "failures": [
            {"name": f.name, "cause": f.cause, "hint": f.hint, "exit_code": f.exit_code}
            for f in report.failures
        ],
        "warnings": [{"code": w.code, "text": w.text} for w in report.warnings],
    }


def unmeasured_pairs(report: Report) -> list[dict[str, Any]]:
    """Pairs of the hosts that were chosen which have no figures, per kind that was wished."""
    names = sorted([host.name for host in report.hosts] + [f.name for f in report.failures])
    done = {(m.source_name, m.target_name, m.kind) for m in report.links if m.points}
    return [
        {"hosts": [a, b], "kind": kind.value}
        for kind in (LinkKind.TCP, LinkKind.NIXL_DRAM)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if (a, b, kind) not in done or (b, a, kind) not in done
    ]


def link_document(link: LinkMeasurement) -> dict[str, Any]:
    """One direction as JSON, its verdict included."""
    return {
        "source": link.source_name,
        "target": link.target_name,
        "kind": link.kind.value,
        "verdict": verdict(link).value,
        "measured_unix_s": link.measured_unix_s,
        "bytes_s": link.bytes_s,
        "steady_bytes_s": link.steady_bytes_s,
        "nominal_bytes_s": link.nominal_bytes_s,
        "nominal_ratio": link.nominal_ratio,
        "transport": link.transport or None,
        "round_trip": None if link.round_trip is None else _trip(link.round_trip),
        "points": [_point(point) for point in link.points],
        "source_end": None if link.source is None else _end(link.source),
        "target_end": None if link.target is None else _end(link.target),
        "retransmit_ratio": link.retransmit_ratio,
        "error": link.error,
    }


def _trip(trip: RoundTrip) -> dict[str, Any]:
    return {
        "message_bytes": trip.message_bytes,
        "num_messages": trip.num_messages,
        "p50_s": trip.p50_s,
        "p95_s": trip.p95_s,
        "p99_s": trip.p99_s,
        "jitter_s": trip.jitter_s,
    }


def _point(point: LinkPoint) -> dict[str, Any]:
    return {
        "message_bytes": point.message_bytes,
        "num_streams": point.num_streams,
        "num_messages": point.num_messages,
        "bytes_s": point.bytes_s,
        "p50_bytes_s": point.p50_bytes_s,
        "p95_bytes_s": point.p95_bytes_s,
        "p99_bytes_s": point.p99_bytes_s,
        "busy_ratio": point.busy_ratio,
    }


def _end(end: LinkEnd) -> dict[str, Any]:
    return {
        "address": end.address or None,
        "interface": end.interface,
        "route_interface": end.route_interface,
        "data_interface": end.data_interface,
        "rate_bits_s": end.rate_bits_s,
        "mtu_bytes": end.mtu_bytes,
        "other_bytes_s": end.other_bytes_s,
    }


def rows(links: Sequence[LinkMeasurement]) -> list[list[str]]:
    """One row per pair and kind, both directions in it."""
    by_key = {(m.source_name, m.target_name, m.kind): m for m in links}
    found = []
    for link in links:
        back = by_key.get((link.target_name, link.source_name, link.kind))
        if back is None or link.source_name < link.target_name:
            found.append(_row(link, back))
    return found


def _row(link: LinkMeasurement, back: LinkMeasurement | None) -> list[str]:
    both = [m for m in (link, back) if m is not None]
    ratios = [m.nominal_ratio for m in both if m.nominal_ratio is not None]
    trip = link.round_trip
    verdicts = list(dict.fromkeys(verdict(m).value for m in both))
    return [
        f"{clean(link.source_name, 24)} ↔ {clean(link.target_name, 24)}",
        link.kind.value,
        rate(link.bytes_s),
        rate(back.bytes_s if back else None),
        rate(link.nominal_bytes_s),
        f"{min(ratios):.0%}" if ratios else "–",
        format_small(trip.p50_s) if trip else "–",
        format_small(trip.p95_s) if trip else "–",
        _via(link),
        "/".join(verdicts),
    ]


def _via(link: LinkMeasurement) -> str:
    if link.kind is not LinkKind.TCP:
        return clean(link.transport, 40) or "–"
    ends = [
        end.route_interface or end.interface or "?" for end in (link.source, link.target) if end
    ]
    return clean(" – ".join(dict.fromkeys(ends)), 40) or "–"


def format_small(seconds: float) -> str:
    """Round trips are often below the tenth of a millisecond that durations are written to."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.9995e-3 else format_seconds(seconds)
