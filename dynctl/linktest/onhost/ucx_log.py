"""What UCX says of the way it moves data, from its own log (`UCX_PROTO_INFO=y`, `UCX_LOG_LEVEL=info`).

Written from logs of UCX 1.23 in nixl 1.5.1; also takes the tables of 1.14 to 1.18, whose title has two columns.
Standard library only. Pure.
"""

import re
from typing import NamedTuple

_TITLE = re.compile(r"remote memory read by ucp_get\S*(.*)")
_MEMORIES = re.compile(r"into (\S+)(?: memory)?(?: from (\S+))?")
_ROW = re.compile(r"\|\s*(\d+[KMG]?)(?:\.\.(\d+[KMG]?|inf))?\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")
_LANE = re.compile(r"([a-z][a-z0-9_]*)/([A-Za-z0-9_.-]+(?::[0-9]+)?)")
_CONFIG = re.compile(r"(?:intra|inter)-node cfg#\d+\s+(.*)")
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\d+\.\d+\.\d+)")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Way(NamedTuple):
    """How reads of one size go."""

    description: str
    """`zero-copy`, `software emulation`, …; empty when only the connection's lanes are known."""
    lanes: tuple[tuple[str, str], ...]
    """Transport and device of each lane, e.g. `rc_mlx5`, `mlx5_0:1`."""

    def text(self) -> str:
        """`rc_mlx5/mlx5_0:1`, with what must be known of the protocol."""
        names = " + ".join(f"{transport}/{device}" for transport, device in self.lanes)
        return f"{names} (software emulation)" if "emulation" in self.description else names


def version(log: str) -> str:
    """The version of UCX; empty when the log does not tell."""
    match = _VERSION.search(log)
    return match[1] if match else ""


def way_of_reads(log: str, num_bytes: int, *, into_gpu: bool, from_gpu: bool) -> Way:
    """Find how reads of this size between these memories go; no lanes when the log does not tell."""
    found = Way("", ())
    is_wanted = False
    for line in log.splitlines():
        title = _TITLE.search(line)
        if title:
            is_wanted = _memories(title[1]) == (into_gpu, from_gpu)
            continue
        row = _ROW.search(line)
        if row and is_wanted:
            if _size(row[1]) <= num_bytes <= _size(row[2] or row[1]):
                found = Way(row[3], _lanes(row[4]))
        elif " by ucp_" in line:
            is_wanted = False
    # Without a table, the lanes for remote memory of the last connection that is not to itself.
    return found if found.lanes else Way("", _lanes_of_connection(log))


def _memories(text: str) -> tuple[bool, bool]:
    match = _MEMORIES.search(text)
    if match is None:
        return False, False
    # Only what differs from host memory is named in older titles.
    return _is_gpu(match[1]), _is_gpu(match[2] or match[1])


def _is_gpu(memory: str) -> bool:
    return memory.startswith(("cuda", "rocm"))


def _size(text: str) -> float:
    if text == "inf":
        return float("inf")
    return int(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)


def _lanes(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys(_LANE.findall(text)))


def _lanes_of_connection(log: str) -> tuple[tuple[str, str], ...]:
    for config in reversed(_CONFIG.findall(log)):
        for kind in ("rma", "rma_am", "am"):
            match = re.search(rf"(?:^|\s){kind}\(([^)]*)\)", config)
            if match:
                return _lanes(match[1])
    return ()
