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


class LinkClasses:
    """The class of any pair of engines."""

    def __init__(self, places: Iterable[EnginePlace] = ()) -> None:
        self._places = {place.id: place for place in places}

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
