"""What joins two engines for their KV blocks, by where they stand. Pure.

The best way both ends have, by layout; which of them the transfer library takes, it does not tell.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NVLINK = "nvlink"
HOST = "host"
"""One host without NVLink between them: PCIe, through main memory or not."""
RDMA = "rdma"
TCP = "tcp"
UNKNOWN = "unknown"
"""Where nobody said where they stand."""

LINK_CLASSES = (NVLINK, HOST, RDMA, TCP, UNKNOWN)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine stands."""

    id: str
    host_name: str
    island: str = ""
    """All of its GPUs are in: of GPUs every pair of which is joined by NVLink; empty: in none."""
    has_rdma: bool = False


MEASURED = "measured"
"""By `linktest`."""
NOMINAL = "nominal"
"""By what the devices say of themselves."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What is known of one class of link from one host to another before anything was moved over it."""

    source_host: str
    target_host: str
    link: str
    """One of the classes above."""
    ms_per_token: float
    latency_ms: float = 0.0
    """Of the link alone, before the first byte."""
    basis: str = MEASURED
    """`measured` or `nominal`."""

    @property
    def route(self) -> tuple[str, str, str]:
        """What it is of: hosts and class."""
        return self.source_host, self.target_host, self.link


class LinkClasses:
    """The class of any pair of engines, and what is known of such links."""

    def __init__(self, places: Iterable[EnginePlace] = (), rates: Iterable[LinkRate] = ()) -> None:
        self._places = {place.id: place for place in places}
        self.rates = tuple(rates)

    def route(self, source: str, target: str) -> tuple[str, str, str]:
        """The hosts of two engines and what joins them; empty names where nobody said where they stand."""
        one, other = self._places.get(source), self._places.get(target)
        if one is None or other is None:
            return "", "", UNKNOWN
        return one.host_name, other.host_name, self.of(source, target)

    def of(self, source: str, target: str) -> str:
        """Name what joins two engines."""
        one, other = self._places.get(source), self._places.get(target)
        if one is None or other is None:
            return UNKNOWN
        if one.island and one.island == other.island:
            return NVLINK
        if one.host_name == other.host_name:
            return HOST
        return RDMA if one.has_rdma and other.has_rdma else TCP
