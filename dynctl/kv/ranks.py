"""An engine's data-parallel ranks: each has a cache of its own, and publishes its KV events at a place of its own.

A place speaks of one rank: batches that name another are none of its (K16).
Source: `ZmqEventPublisher.offset_endpoint_port` of vLLM 0.32.0. Pure.
"""

from dynctl.core.units import whole

MAX_RANKS = 64
"""Of one engine."""

RANK_HEADER = b"x-data-parallel-rank"
"""In which a request names its rank. Source: `GenerateBaseServing._get_data_parallel_rank` of vLLM 0.32.0."""

COUNTED = "inproc"
"""vLLM has a place per rank for endpoints with this text in them, and for TCP ports; other Unix sockets make it give up."""


def endpoint_of(first: str, rank: int) -> str:
    """Where a rank publishes, as vLLM derives it from the place of rank 0; `can_count` tells whether it does."""
    if rank == 0:
        return first
    if COUNTED in first:
        return f"{first}_dp{rank}"
    host, _, port = first.rpartition(":")
    return f"{host}:{int(port) + rank}"


def can_count(first: str, ranks: int) -> bool:
    """Whether so many ranks have a place each, with rank 0 at this one."""
    if ranks == 1 or COUNTED in first:
        return True
    port = whole(first.rpartition(":")[2])
    return first.startswith("tcp://") and port is not None and 0 < port <= 65536 - ranks


def rank_headers(rank: int, ranks: int) -> tuple[tuple[bytes, bytes], ...]:
    """What a request says that is meant for one of an engine's ranks; nothing, where there is only one."""
    return () if ranks == 1 else ((RANK_HEADER, b"%d" % rank),)


class RankOrder:
    """Which rank is meant at each of an engine's places, by their order."""

    def __init__(self) -> None:
        self._first: int | None = None
        """Not 0 where several servers share an engine's ranks. The first batch tells."""

    def takes(self, position: int, rank: int) -> bool:
        """Tell whether batches of a rank belong to a place."""
        if self._first is None and rank >= position:
            self._first = rank - position
        return self._first is not None and rank == self._first + position
