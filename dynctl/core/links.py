"""Links between hosts as they were measured: what flowed from one host to another, how fast and how evenly. Pure.

A measurement has a direction: bytes flowed from source to target. Round trips have none and stand in both directions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

SLOW_RATIO = 0.6
"""Below this share of the negotiated rate a link is slow; TCP on several streams reaches 0.9 where nothing is wrong."""
ASYMMETRIC_RATIO = 0.7
"""A direction with less than this share of the other's rate is slower than it should be."""
BUSY_RATIO = 0.5
"""From here on the processors were the limit, or near it, and the link cannot be judged."""
STARVED_RATIO = 0.2
"""The same for NIXL: from here on its threads waited too long for a processor."""
NEAR_RATIO = 0.8
"""A point with this share of the best rate came near it."""


class LinkKind(StrEnum):
    """What moved the bytes, and between which memories."""

    TCP = "tcp"
    NIXL_DRAM = "nixl-dram"
    """NIXL over UCX, main memory to main memory."""
    NIXL_DRAM_VRAM = "nixl-dram-vram"
    """From main memory into a GPU's memory."""
    NIXL_VRAM = "nixl-vram"
    """GPU memory to GPU memory."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Round trips of small messages, one at a time."""

    message_bytes: int
    num_messages: int
    p50_s: float
    p95_s: float
    p99_s: float
    jitter_s: float
    """Mean difference from one round trip to the next, the largest 1 % left out."""


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Messages of one size on some streams at once; each counts when the other end has confirmed all of it."""

    message_bytes: int
    num_streams: int
    num_messages: int
    bytes_s: float
    """All streams together, over the whole time."""
    p50_bytes_s: float
    p95_bytes_s: float
    """95 % of the messages were at least this fast."""
    p99_bytes_s: float
    busy_ratio: float = 0.0
    """How much of the time the processors of the busier end were at work or waited for; 1 is all of it.

    For NIXL, which always spins: waited for alone.
    """


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a link as its kernel tells it."""

    address: str
    """Local address of the connection that was used; empty where UCX chose."""
    interface: str | None
    """Network device that has this address, or the devices UCX used."""
    route_interface: str | None = None
    """Network device packets to the other end leave by."""
    data_interface: str | None = None
    """Network device that has the host's data address."""
    rate_bits_s: int | None = None
    """Negotiated rate of what was used; None where nobody tells (loopback, most virtual devices)."""
    mtu_bytes: int | None = None
    other_bytes_s: float | None = None
    """Traffic that was not ours on this device while only small messages were sent."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """One direction between two hosts, or why it could not be measured."""

    source_name: str
    target_name: str
    kind: LinkKind
    measured_unix_s: float
    round_trip: RoundTrip | None = None
    points: tuple[LinkPoint, ...] = ()
    source: LinkEnd | None = None
    target: LinkEnd | None = None
    transport: str = ""
    """`tcp`, or what UCX chose for the largest messages, e.g. `rc_mlx5/mlx5_0:1`; empty when it did not say."""
    retransmit_ratio: float | None = None
    """Segments sent again, of all that were sent."""
    error: str | None = None

    @property
    def best(self) -> LinkPoint | None:
        """The point with the highest rate."""
        return max(self.points, key=lambda point: point.bytes_s, default=None)

    @property
    def bytes_s(self) -> float | None:
        """The highest rate that was seen over a whole point."""
        return self.best.bytes_s if self.best else None

    @property
    def is_processor_bound(self) -> bool:
        """Whether processors were the limit, or too near it to tell: measured is a lower bound.

        One point that comes near the best with idle processors proves that it was the link.
        """
        limit = BUSY_RATIO if self.kind is LinkKind.TCP else STARVED_RATIO
        near = [p.busy_ratio for p in self.points if p.bytes_s >= (self.bytes_s or 0) * NEAR_RATIO]
        return min(near, default=0.0) >= limit

    @property
    def evenness_ratio(self) -> float | None:
        """How near the slow messages come to the usual ones: P95 to P50 of the best single stream; 1 is even.

        Several streams wait for each other, so they do not tell. None below 20 messages.
        """
        single = [p for p in self.points if p.num_streams == 1 and p.num_messages >= 20]
        best = max(single, key=lambda point: point.bytes_s, default=None)
        return None if best is None else min(1.0, best.p95_bytes_s / best.p50_bytes_s)

    @property
    def steady_bytes_s(self) -> float | None:
        """The rate reduced by unevenness: rank links by this, so that a jittery one comes after a steady one."""
        ratio = self.evenness_ratio
        return self.bytes_s if self.bytes_s is None or ratio is None else self.bytes_s * ratio

    @property
    def nominal_bytes_s(self) -> float | None:
        """The slower end's negotiated rate; None while it is known of neither."""
        rates = [e.rate_bits_s for e in (self.source, self.target) if e and e.rate_bits_s]
        return min(rates) / 8 if rates else None

    @property
    def nominal_ratio(self) -> float | None:
        """Measured to negotiated rate."""
        if self.bytes_s is None or self.nominal_bytes_s is None:
            return None
        return self.bytes_s / self.nominal_bytes_s


def is_asymmetric(link: LinkMeasurement, back: LinkMeasurement) -> bool:
    """Whether a link is slower than its way back, and not for want of processors."""
    if not link.bytes_s or not back.bytes_s or link.is_processor_bound:
        return False
    return link.bytes_s < ASYMMETRIC_RATIO * back.bytes_s


@dataclass(frozen=True, slots=True)
class LinkHost:
    """Which machine a name meant when its links were measured."""

    name: str
    machine_id: str
    data_address: str


@dataclass(frozen=True, slots=True)
class LinkBook:
    """All measurements of a cluster that are kept, the newest of each direction and kind."""

    hosts: tuple[LinkHost, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()

    def updated(self, newer: "LinkBook") -> "LinkBook":
        """Put newer measurements over these; links of a machine that was replaced are dropped."""
        hosts = {host.name: host for host in self.hosts}
        now = {host.name: host for host in newer.hosts}
        replaced = {name for name, host in now.items() if hosts.get(name, host) != host}
        links = {_key(link): link for link in _without(self.links, replaced)}
        links |= {_key(link): link for link in newer.links}
        return replace(
            self,
            hosts=tuple(sorted((hosts | now).values(), key=lambda host: host.name)),
            links=tuple(links[key] for key in sorted(links)),
        )

    def matching(self, hosts: Iterable[LinkHost]) -> tuple[LinkMeasurement, ...]:
        """The links between these hosts, as far as each is still the machine that was measured."""
        known = {host.name: host for host in self.hosts}
        good = {host.name for host in hosts if known.get(host.name) == host}
        return tuple(link for link in self.links if {link.source_name, link.target_name} <= good)


def _key(link: LinkMeasurement) -> tuple[str, str, str]:
    return link.source_name, link.target_name, link.kind.value


def _without(links: Iterable[LinkMeasurement], names: set[str]) -> list[LinkMeasurement]:
    return [link for link in links if not names & {link.source_name, link.target_name}]
