"""What the programs on the two ends said, as measurements: checked, bounded, cleaned. Hosts may be broken or lie. Pure."""

from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from dynctl.core.links import LinkEnd, LinkKind, LinkMeasurement, LinkPoint, RoundTrip
from dynctl.core.text import clean
from dynctl.errors import ProbeError

T = TypeVar("T")

Text = Annotated[str, Meta(max_length=400)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Size = Annotated[int, Meta(ge=1, le=1 << 34)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Rate = Annotated[float, Meta(ge=0, le=1e14)]
Ratio = Annotated[float, Meta(ge=0, le=1.01)]


class PointSaid(Struct, frozen=True):
    """One point, as the end that sent (TCP) or pulled (NIXL) timed it."""

    message_bytes: Size
    num_streams: Annotated[int, Meta(ge=1, le=64)]
    num_messages: Annotated[int, Meta(ge=1, le=10_000_000)]
    bytes_s: Rate
    p50_s: Seconds
    p95_s: Seconds
    p99_s: Seconds
    busy_ratio: Ratio = 0.0
    direction: Annotated[str, Meta(pattern="^(out|in)$")] = "in"

    def point(self, starved_ratio: float = 0.0) -> LinkPoint:
        """Turn times into rates: this many bytes were under way on all streams for one message's time."""
        moved = self.message_bytes * self.num_streams
        return LinkPoint(
            self.message_bytes,
            self.num_streams,
            self.num_messages,
            self.bytes_s,
            moved / self.p50_s,
            moved / self.p95_s,
            moved / self.p99_s,
            min(1.0, max(self.busy_ratio, starved_ratio)),
        )


class TripSaid(Struct, frozen=True):
    """Round trips."""

    message_bytes: Size
    num_messages: Annotated[int, Meta(ge=1, le=10_000_000)]
    p50_s: Seconds
    p95_s: Seconds
    p99_s: Seconds
    jitter_s: Annotated[float, Meta(ge=0, le=3600)]

    def round_trip(self) -> RoundTrip:
        """The same as a noun."""
        return RoundTrip(
            self.message_bytes,
            self.num_messages,
            self.p50_s,
            self.p95_s,
            self.p99_s,
            self.jitter_s,
        )


class EndSaid(Struct, frozen=True):
    """One end."""

    address: Text = ""
    interface: Text | None = None
    route_interface: Text | None = None
    data_interface: Text | None = None
    rate_bits_s: Count | None = None
    mtu_bytes: Count | None = None
    other_bytes_s: Rate | None = None

    def end(self) -> LinkEnd:
        """The same as a noun, texts cleaned."""
        return LinkEnd(
            clean(self.address, 60),
            _clean(self.interface),
            _clean(self.route_interface),
            _clean(self.data_interface),
            self.rate_bits_s,
            self.mtu_bytes,
            self.other_bytes_s,
        )


class TcpEndSaid(Struct, frozen=True):
    """One end and its segments sent again and sent at all."""

    end: EndSaid
    retransmits: tuple[Count, Count]

    @property
    def ratio(self) -> float | None:
        """Share of segments sent again."""
        again, sent = self.retransmits
        return min(1.0, again / sent) if sent else None


class TcpSaid(Struct, frozen=True):
    """What the connecting end of a TCP test prints."""

    round_trip: TripSaid
    points: Annotated[tuple[PointSaid, ...], Meta(max_length=100)]
    here: TcpEndSaid
    there: TcpEndSaid


class KindSaid(Struct, frozen=True):
    """One kind of memory by NIXL, pulled by one end, or why that could not be."""

    error: Text | None = None
    round_trip: TripSaid | None = None
    points: Annotated[tuple[PointSaid, ...], Meta(max_length=100)] = ()
    transport: Text = ""
    end: EndSaid | None = None


class PullSaid(Struct, frozen=True):
    """What one end pulled."""

    kinds: dict[LinkKind, KindSaid]
    ucx: Text = ""
    starved: Ratio = 0.0


class NixlSaid(Struct, frozen=True, rename={"into_near": "in", "out_of_near": "out"}):
    """What the connecting end of a NIXL test prints."""

    into_near: PullSaid
    out_of_near: PullSaid


class LookSaid(Struct, frozen=True):
    """What a host's engine environment has."""

    nixl: Text | None
    num_gpus: Annotated[int, Meta(ge=0, le=1024)] = 0


class Line(Struct, frozen=True):
    """A line that may carry an error, a port, or the end of a listener."""

    error: Text | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    done: bool = False


def parse(host_name: str, line: bytes, kind: type[T]) -> T:
    """Read one line a program printed.

    Raises:
        ProbeError: with the host's name, when it is not what that program prints.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ProbeError(
            f"{host_name}: the link test's answer cannot be read: {clean(str(error))}"
        ) from error


def tcp_measurements(
    near: str, far: str, line: bytes, measured_unix_s: float
) -> list[LinkMeasurement]:
    """Both directions from the connecting end's answer.

    Raises:
        ProbeError: when the answer is none, or holds no point.
    """
    said = parse(near, line, TcpSaid)
    found = []
    for direction, source, target in (("out", near, far), ("in", far, near)):
        points = tuple(p.point() for p in said.points if p.direction == direction)
        if not points:
            raise ProbeError(f"{near}: the link test's answer has no figures")
        ours, theirs = said.here, said.there
        sender, receiver = (ours, theirs) if direction == "out" else (theirs, ours)
        found.append(
            LinkMeasurement(
                source,
                target,
                LinkKind.TCP,
                measured_unix_s,
                said.round_trip.round_trip(),
                points,
                sender.end.end(),
                receiver.end.end(),
                "tcp",
                sender.ratio,
            )
        )
    return found


def nixl_measurements(
    near: str, far: str, line: bytes, measured_unix_s: float
) -> list[LinkMeasurement]:
    """Both directions of every kind from the connecting end's answer.

    A direction's figures are the puller's, the target's. What the source used is what it said of its own pulls.

    Raises:
        ProbeError: when the answer is none.
    """
    said = parse(near, line, NixlSaid)
    found = []
    for mine, others, source, target in (
        (said.into_near, said.out_of_near, far, near),
        (said.out_of_near, said.into_near, near, far),
    ):
        for kind, pulled in mine.kinds.items():
            back = others.kinds.get(kind)
            points = tuple(p.point(mine.starved) for p in pulled.points)
            link = _pulled(kind, pulled, back, (source, target), measured_unix_s)
            found.append(replace(link, points=points) if link.error is None else link)
    return found


def _pulled(
    kind: LinkKind,
    said: KindSaid,
    back: KindSaid | None,
    names: tuple[str, str],
    measured_unix_s: float,
) -> LinkMeasurement:
    if said.error is not None or not said.points:
        error = clean(said.error or "no figures", 400)
        return LinkMeasurement(*names, kind, measured_unix_s, error=error)
    return LinkMeasurement(
        *names,
        kind,
        measured_unix_s,
        said.round_trip.round_trip() if said.round_trip else None,
        (),
        back.end.end() if back and back.end else None,
        said.end.end() if said.end else None,
        clean(said.transport, 200),
    )


def failed(
    near: str, far: str, kind: LinkKind, measured_unix_s: float, error: str
) -> list[LinkMeasurement]:
    """Both directions of a pair that could not be measured."""
    text = clean(error, 400)
    return [
        LinkMeasurement(a, b, kind, measured_unix_s, error=text)
        for a, b in ((near, far), (far, near))
    ]


def _clean(text: str | None) -> str | None:
    return None if text is None else clean(text, 200)
